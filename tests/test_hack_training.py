# SPDX-License-Identifier: Apache-2.0
"""A reward that can be had without the work, in a real training run: the alarm rings, and names what is paid."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from palestra.config import load
from palestra.reward.base import REWARDS
from palestra.run.progress import Progress
from palestra.train.config import RLConfig
from palestra.train.rl import train_rl


@REWARDS.register("planted_sevens")
def planted_sevens(completions: Sequence[str], **_: Any) -> list[float]:
    """The share of sevens among what was written: easy to have, and no arithmetic."""
    return [text.count("7") / max(len(text), 1) for text in completions]


def run(out: Path, *overrides: str, **rewards: Any) -> list[dict[str, Any]]:
    """The alarms of a short run of a random model."""
    config = {
        "model": "builtin:calculator",
        "renderer": "plain",
        "env": "calculator",
        "data": {"name": "arithmetic", "max_operand": 9},
        "rewards": {"accuracy": {"function": "calculator_accuracy", "weight": 1.0}, **rewards},
        "sampling": {"max_new_tokens": 12},
        "limits": {"max_turns": 1},
        "algorithm": {"group_size": 8, "kl_coef": 0.0},
        "train": {"steps": 24, "tasks_per_step": 4, "learning_rate": 1e-3, "save_every": 0, "dump_every": 0},
        "eval": {"size": 20, "every": 12},
        "out": str(out),
    }
    train_rl(load(config, list(overrides), RLConfig), progress=Progress(quiet=True))
    file = out / "alarms.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


@pytest.mark.slow  # two dozen steps of training, twice
def test_a_planted_hack_rings_the_alarm_in_a_real_run_and_only_where_it_is_paid(tmp_path: Path) -> None:
    paid = run(tmp_path / "paid", sevens={"function": "planted_sevens", "weight": 0.5})
    (seen,) = [a["seen"] for a in paid if a["rule"] == "reward_hacking"]
    assert seen.startswith("the part sevens rose from 0.0") and seen.endswith("accuracy went from 0.00 to 0.00")
    watched = run(tmp_path / "watched", sevens={"function": "planted_sevens", "weight": 0.0})
    assert "reward_hacking" not in {a["rule"] for a in watched}
