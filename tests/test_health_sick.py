# SPDX-License-Identifier: Apache-2.0
"""Planted sicknesses: real runs that are ill in one known way each ring the right alarm, and a healthy one none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from palestra.config import load
from palestra.engine.local import LocalEngine
from palestra.run.doctor import diagnose
from palestra.run.progress import Progress
from palestra.train import rl, setup
from palestra.train.config import RAILS, RLConfig, SFTConfig
from palestra.train.rl import train_rl
from palestra.train.sft import train_sft

# Slow: each is a real run of the demo's model, of 10 to 40 s on two idle cores.
pytestmark = pytest.mark.slow

SICK = Path(__file__).with_name("sick")
RINGS = {
    "constant": {"group_collapse"},
    "format_weight": {"format_over_accuracy"},
    "hackable": {"reward_hacking"},
    "healthy": set(),
    "learning_rate": {"kl_high"},
    "max_new_tokens": {"truncation"},
    "small_groups": {"small_group"},
    "stale": {"stale_sampler"},
}
"""The alarm that names what is wrong. Beside it only what follows from it may ring."""

FOLLOWS: dict[str, set[str]] = {
    "hackable": {"length_explosion", "truncation", "group_collapse"},
    "learning_rate": {"reward_falls", "grad_norm_high", "group_collapse", "clip_saturated"},
    "max_new_tokens": {"group_collapse"},
    "small_groups": {"group_collapse"},
}


def nines(completions: Sequence[str], **_: Any) -> list[float]:
    """Pays for a digit, whatever it is good for."""
    return [min(text.count("9"), 8) / 8 for text in completions]


def constant(completions: Sequence[Any], **_: Any) -> list[float]:
    return [0.5] * len(completions)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that calls and often answers wrongly."""
    out = tmp_path_factory.mktemp("sick") / "start"
    train_sft(load(SICK / "start.yaml", [f"out={json.dumps(str(out))}"], SFTConfig), progress=Progress(quiet=True))
    return out / "checkpoints" / "step_000200"


def never_loads(patch: pytest.MonkeyPatch) -> None:
    """A sampler with weights of its own that says it has the new ones, and keeps the old."""
    make, load_weights, loaded = setup.make_engine, LocalEngine.load_weights, list[int]()

    def apart(config: Any, model: Any, renderer: Any, **_: Any) -> LocalEngine:
        return make(config, model, renderer, apart=True)

    def stuck(self: LocalEngine, policy: Any, version: int) -> None:
        if not loaded:
            load_weights(self, policy, version)
        loaded.append(version)
        self._version = version

    patch.setattr(rl.setup, "make_engine", apart)
    patch.setattr(LocalEngine, "load_weights", stuck)


@pytest.mark.parametrize("name", sorted(RINGS))
def test_a_sick_run_rings_the_alarm_that_names_its_sickness(
    name: str, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "stale":
        never_loads(monkeypatch)
    given = [f"out={json.dumps(str(tmp_path / name))}", f"model={json.dumps(str(start))}"]
    summary = train_rl(load(SICK / f"{name}.yaml", given, RLConfig), progress=Progress(quiet=True))
    found = diagnose(tmp_path / name, rails=RAILS)
    rung = {alarm.rule for alarm in found.alarms}
    assert RINGS[name] <= rung <= RINGS[name] | FOLLOWS.get(name, set()), found.text()
    assert summary["alarms"] == len(found.alarms)
    assert all(alarm.changes for alarm in found.alarms), "each says what to change"


def test_every_config_that_we_keep_is_run() -> None:
    assert sorted(p.stem for p in SICK.glob("*.yaml")) == sorted([*RINGS, "start"])
