# SPDX-License-Identifier: Apache-2.0
"""A run in which tools timed out, killed and resumed on a quieter machine, sees them time out where they did."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest
from test_resume_matrix import KINDS, PLAYED, STEPS, end_of, killed, one_thread, run, small  # noqa: F401

from palestra.env.base import Action, Observation, StepResult
from palestra.env.tool_env import ToolEnv
from palestra.rollout.dump import read_rollouts
from palestra.rollout.journal import FILE
from palestra.train.config import RLConfig
from palestra.train.rl import train_rl
from palestra.types import Task

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks a process in which torch is loaded")

LATE_S = 1.0
HUNG = ("/4", "/5")
"""The tasks of the third step, in which the run is killed."""


class Waiting(ToolEnv):
    """Whatever the model writes calls a tool, which hangs on some tasks until the file ``quiet`` exists."""

    def __init__(self, quiet: str) -> None:
        def wait() -> str:
            """Wait."""
            if self.hangs and not Path(quiet).exists():
                time.sleep(5 * LATE_S)
            return "7"

        super().__init__([wait], timeout_s=LATE_S)

    def reset(self, task: Task, *, seed: int) -> Observation:
        self.hangs = task.id.endswith(HUNG)
        return Observation(task.messages())

    async def step(self, action: Action) -> StepResult:
        call = {"id": "c", "type": "function", "function": {"name": "wait", "arguments": {}}}
        result = await super().step(Action({"role": "assistant", "content": "", "tool_calls": [call]}, action.text))
        return StepResult(Observation(result.observation.messages), tool_calls=1, info=result.info)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The kind of run ``clock``, and the file that makes its tools answer."""
    quiet = tmp_path / "quiet"
    more = {
        "env": {"name": f"{__name__}:Waiting", "quiet": str(quiet)},
        "limits": {"max_turns": 2},
        "train": PLAYED["train"] | {"dump_every": 1},
        "algorithm": {"group_size": 2},
    }
    monkeypatch.setitem(KINDS, "clock", (RLConfig, train_rl, PLAYED | more))
    return quiet


def answers(out: Path, step: int) -> set[str]:
    groups = read_rollouts(out / "rollouts" / f"step_{step:06d}.jsonl.zst")
    turns = [t for g in groups for e in g.episodes for trajectory in e.trajectories for t in trajectory.turns]
    return {m["content"] for turn in turns for m in turn.observation if m["role"] == "tool"}


def test_a_tool_that_timed_out_before_the_kill_is_seen_to_time_out_after_it(waiting: Path, tmp_path: Path) -> None:
    whole, out, bare = (tmp_path / name for name in ("whole", "out", "bare"))
    run("clock", whole, adapter=False)
    killed("clock", out, "update", adapter=False)
    shutil.copytree(out, bare)
    (bare / FILE).unlink()
    waiting.touch()
    for again in (out, bare):
        run("clock", again, adapter=False, resume=True)
    late = {f"Error: tool wait timed out after {LATE_S:g} s"}
    assert answers(whole, 3) == answers(out, 3) == late and answers(bare, 3) == {"7"}
    assert answers(whole, STEPS) == {"7"}, "the other tasks do not hang"
    want, got, other = map(end_of, (whole, out, bare))
    for part in ("rows", "state", "weights"):
        assert got[part] == want[part] != other[part], part
    assert (out / FILE).read_bytes() == b"", "all of it is in the last checkpoint"
