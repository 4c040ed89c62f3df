# SPDX-License-Identifier: Apache-2.0
"""Small runs with ``train.max_staleness``, in whose episodes a test can look in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_train_rl import BASE, config, logged

from palestra.env.base import Action, Observation, StepResult
from palestra.train.config import RLConfig
from palestra.types import Task

STEPS = 4
PATIENCE_S = 20.0
"""How long an event is waited for that must come; what comes too late fails the test instead of hanging it."""

Hook = Callable[[Task], None]
HOOKS: dict[str, Hook] = {}


class Hooked:
    """One turn, behind which the test looks in."""

    def reset(self, task: Task, *, seed: int) -> Observation:
        self.task = task
        return Observation(task.messages())

    def step(self, action: Action) -> StepResult:
        HOOKS["step"](self.task)
        return StepResult(terminated=True)


@pytest.fixture(autouse=True)
def no_hooks() -> Iterator[None]:
    HOOKS["step"] = lambda task: None
    yield
    HOOKS.clear()


def lagging(out: Path, lag: int, *overrides: str, **more: Any) -> RLConfig:
    given = ["eval.size=0", "train.dump_every=1", f"train.steps={STEPS}", f"train.max_staleness={lag}", *overrides]
    return config(out, *given, **{"env": f"{__name__}:Hooked", **more})


def step_of(task: Task) -> int:
    """Of the training step that draws it: two tasks each."""
    return int(task.id.rpartition("/")[2]) // BASE["train"]["tasks_per_step"]


def rows_of(run: Path) -> list[dict[str, Any]]:
    """What was logged, times apart."""
    timed = ("time", "speed")
    return [{k: v for k, v in row.items() if k.partition("/")[0] not in timed} for row in logged(run)]
