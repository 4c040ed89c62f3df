# SPDX-License-Identifier: Apache-2.0
"""The bench of guesses plays the same steps with and without them, and tells what differs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from bench import guessing
from palestra.engine.stats import EngineStats

TINY = {
    "renderer": "plain",
    "env": {"name": "calculator", "max_steps": 2},
    "data": "arithmetic",
    "rewards": {"accuracy": {"function": "calculator_accuracy"}},
    "sampling": {"max_new_tokens": 6},
    "limits": {"max_turns": 2},
    "algorithm": {"group_size": 2, "kl_coef": 0.0},
    "train": {"steps": 2, "tasks_per_step": 2, "learning_rate": 1e-3},
    "eval": {"size": 0},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(TINY))
    return file


def test_both_ways_write_the_same_and_the_table_has_a_line_for_each(path: Path) -> None:
    shown = CliRunner().invoke(guessing.app, [str(path), "builtin:calculator", "--steps", "1"])
    assert shown.exit_code == 0, shown.output
    told, rows = shown.output.splitlines()[:4], shown.output.splitlines()[6:]
    assert all("4 of 4 episodes alike" in line for line in told)
    assert [line.split(" | ")[0] for line in rows] == ["| 0", "| 8"]
    assert " | 0% | 1.00 × |" in shown.output


def test_what_differs_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(9))
    monkeypatch.setattr(guessing, "written", lambda groups: [([next(numbers)], [0.0])])
    shown = CliRunner().invoke(guessing.app, [str(path), "builtin:calculator", "--steps", "1"])
    assert "max_draft 8: 0 of 1 episodes alike" in shown.output


def test_the_table_by_hand() -> None:
    plain = [(100.0, EngineStats(passes=90, decode_tokens=50)), (110.0, EngineStats(passes=80, decode_tokens=50))]
    guessed = [(s * 2, EngineStats(passes=30, decode_tokens=50, guessed_tokens=25)) for s, _ in plain]
    assert guessing.table({0: plain, 8: guessed}).splitlines()[2:] == [
        "| 0 | 105 | 85 | 0% | 1.00 × |",
        "| 8 | 210 | 30 | 50% | 2.00 × |",
    ]
