# SPDX-License-Identifier: Apache-2.0
"""``kill -9`` at random moments of a small run like the demo's: warm-up, evaluations, rollouts, updates, checkpoints.

``PALESTRA_KILLS=50`` kills fifty times in the place of ten.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_resume_matrix import KINDS, PAIRS, PLAYED, end_of, forked, one_thread, run, small  # noqa: F401

from palestra.train.config import RLConfig
from palestra.train.rl import train_rl

pytestmark = [
    pytest.mark.slow,  # a run for every kill, and one to compare with
    pytest.mark.skipif(sys.platform != "linux", reason="forks a process in which torch is loaded"),
]

KILLS = int(os.environ.get("PALESTRA_KILLS", "10"))
DEMO: dict[str, Any] = PLAYED | {
    "warmup": PAIRS | {"steps": 6, "batch_size": 4, "learning_rate": 1e-3, "save_every": 2},
    "algorithm": {"group_size": 2, "updates_per_batch": 2, "kl_control": {"target": 0.01}},
    "train": PLAYED["train"] | {"save_every": 1, "keep_best": 1},
    "eval": {"size": 2, "every": 2, "warmup_every": 3, "curve_size": 2},
}


@dataclass(frozen=True)
class Whole:
    """The run that nobody stopped, and how long it took in a process of its own."""

    end: dict[str, Any]
    seconds: float


def begun(out: Path, *, resume: bool = False) -> int:
    """The run in a process of its own; its id."""
    return forked(lambda: run("demo", out, adapter=False, resume=resume), seconds=300)


@pytest.fixture(scope="module")
def whole(small: None, one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: F811
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "demo", (RLConfig, train_rl, DEMO))
        out, began = tmp_path_factory.mktemp("whole") / "run", time.monotonic()
        os.waitpid(begun(out), 0)
        yield Whole(end_of(out), time.monotonic() - began)


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_run_killed_at_any_moment_ends_as_if_it_had_never_been_stopped(
    whole: Whole, tmp_path: Path, seed: int
) -> None:
    """Killed twice: in its first process, and in the one that had gone on with it."""
    out, chance, moments = tmp_path / "run", random.Random(seed), list[float]()
    for resume in (False, True):
        child = begun(out, resume=resume)
        moments.append(chance.uniform(0.0, 0.9 * whole.seconds))
        time.sleep(moments[-1])
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    run("demo", out, adapter=False, resume=True)
    got = end_of(out)
    for part in ("rows", "state", "weights"):
        assert got[part] == whole.end[part], f"{part}, killed after {moments} s"
