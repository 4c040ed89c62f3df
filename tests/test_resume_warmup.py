# SPDX-License-Identifier: Apache-2.0
"""RL's warm-up meets SIGKILL: it goes on from its own last checkpoint, and the run ends as if it had never stopped."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from test_resume_matrix import KINDS, PAIRS, PLAYED, end_of, killed, one_thread, run, small  # noqa: F401

from palestra.run.progress import Progress
from palestra.train.checkpoint import latest_checkpoint
from palestra.train.config import RLConfig
from palestra.train.rl import train_rl

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks a process in which torch is loaded")

WARMUP: dict[str, Any] = PAIRS | {"steps": 5, "learning_rate": 1e-3, "save_every": 2}
"""It is killed in its third step, one after its first checkpoint."""


class Phases(Progress):
    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.begun: dict[str, int] = {}

    def phase(self, name: str, *, total: int, done: int = 0) -> None:
        self.begun[name] = done


def kind(**warmup: Any) -> tuple[Any, Any, dict[str, Any]]:
    more = {"algorithm": {"group_size": 2}, "warmup": WARMUP | warmup, "eval": {"size": 1, "warmup_every": 2}}
    return RLConfig, train_rl, PLAYED | more


# The adapter's is slow, for it is three runs more.
@pytest.mark.parametrize("adapter", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["full", "adapter"])
def test_a_run_killed_in_its_warm_up_ends_as_if_it_had_never_been_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, adapter: bool
) -> None:
    monkeypatch.setitem(KINDS, "warmed up", kind())
    run("warmed up", tmp_path / "whole", adapter=adapter)
    out, progress = tmp_path / "out", Phases()
    killed("warmed up", out, "update", adapter=adapter)
    found = latest_checkpoint(out / "warmup")
    assert found is not None and found.name == "step_000002" and not (out / "checkpoints").exists()
    run("warmed up", out, adapter=adapter, resume=True, progress=progress)
    assert progress.begun["warm-up (SFT)"] == 2, "not from the beginning"
    want, got = end_of(tmp_path / "whole"), end_of(out)
    assert [r["step"] for r in got["rows"] if r["phase"] == "sft"] == [1, 2, 3, 4, 5]
    for part in ("rows", "state", "weights"):
        assert got[part] == want[part], part
    assert not (out / "warmup").exists(), "the run's own first checkpoint has taken its place"
    run("warmed up", out, adapter=adapter, resume=True)
    assert end_of(out)["rows"] == want["rows"], "to resume a run behind its end adds no row"


def test_the_steps_between_two_checkpoints_are_the_configs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(KINDS, "unsaved", kind(save_every=0))
    killed("unsaved", tmp_path / "out", "update", adapter=False)
    assert latest_checkpoint(tmp_path / "out" / "warmup") is None
