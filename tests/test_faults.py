# SPDX-License-Identifier: Apache-2.0
"""Episodes that fail in every way we know: the others go on, the failed one is left out and counted, and a world in
which nothing works ends the run with the reason."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
import time

import numpy as np
import pytest
from fakes import DONE, END, MORE, TASK, FakeRenderer, StepsEnv, run

from palestra.engine.scripted import ScriptedEngine
from palestra.env.base import Observation, StepResult
from palestra.learn.advantage import ADVANTAGES, AdvantageConfig
from palestra.learn.batch import rows
from palestra.rollout import failures
from palestra.rollout.collect import collect
from palestra.rollout.episode import Limits, SamplingConfig, run_episode
from palestra.rollout.failures import Budget, Failures, RolloutError
from palestra.types import Author, Episode, RewardTerm, Span, StopReason, Task, Trajectory, Turn

X = 12


def good(task, reward=1.0):
    span = Span(np.array([1]), Author.MODEL, "assistant", "x", np.array([-1.0]), 0)
    turn = Turn((span,), (), {"role": "assistant", "content": "x"}, "eos")
    return Episode(task, (Trajectory((turn,), StopReason.ENV_TERMINATED, rewards={"r": RewardTerm(reward)}),))


def gather(rollout, *, draws=1, **options):
    async def main():
        given = ((i, Task(f"p{i}", "go")) for i in range(draws))
        async with contextlib.aclosing(collect(given, rollout, **options)) as groups:
            return [g async for g in groups]

    return run(main())


# One episode of a group of four is sick --------------------------------------------------------------------


class Sick(StepsEnv):
    """Misbehaves in ``reset`` or ``step`` as told."""

    def __init__(self, where, act):
        super().__init__(DONE)
        self.where, self.act = where, act

    def reset(self, task, *, seed):
        return self.act() if self.where == "reset" else super().reset(task, seed=seed)

    def step(self, action):
        return self.act() if self.where == "step" else super().step(action)


def played_beside(make_env, *, retries=1, **limits):
    """A group of four of which member 1 plays ``make_env()``; the others are well."""
    renderer = FakeRenderer()
    engine = ScriptedEngine([[X, END]] * 8, renderer.tokenizer)

    def rollout(task, draw, member):
        return run_episode(
            task,
            env=make_env() if member == 1 else StepsEnv(DONE),
            engine=engine,
            renderer=renderer,
            limits=Limits(**limits),
            sampling=SamplingConfig(),
            seed=0,
            draw=draw,
            member=member,
        )

    (group,) = gather(rollout, group_size=4, retries=retries)
    return group


def raises(error):
    def act():
        raise error

    return act


FAULTS = {
    "step raises": ("step", raises(ValueError("x")), "env.step.ValueError"),
    "step raises StopIteration": ("step", raises(StopIteration()), "env.step.RuntimeError"),
    "step raises KeyboardInterrupt": ("step", raises(KeyboardInterrupt()), "env.step.RuntimeError"),
    "step exits": ("step", raises(SystemExit(1)), "env.step.RuntimeError"),
    "step cancels": ("step", raises(asyncio.CancelledError()), "env.step.RuntimeError"),
    "step runs out of memory": ("step", raises(MemoryError()), "env.step.MemoryError"),
    "step recurses": ("step", raises(RecursionError("deep")), "env.step.RecursionError"),
    "reset raises": ("reset", raises(OSError("no port")), "env.reset.OSError"),
    "reset exits": ("reset", raises(SystemExit(1)), "env.reset.RuntimeError"),
    "a reward that is text": ("step", lambda: StepResult(reward="much"), "env.step.TypeError"),
    "an infinite reward": ("step", lambda: StepResult(reward=float("inf")), "env.step.ValueError"),
    "a reward that is a list": ("step", lambda: StepResult(reward={"a": [1]}), "env.step.TypeError"),
    "messages that are numbers": ("reset", lambda: Observation((1, 2)), "env.reset.TypeError"),
    "a loop of its own that it closes": (
        "step",
        lambda: asyncio.get_event_loop_policy().get_event_loop().close(),
        "env.step.RuntimeError",
    ),
}


@pytest.mark.filterwarnings("ignore:.*event_loop_policy.*:DeprecationWarning")
@pytest.mark.parametrize(("where", "act", "reason"), FAULTS.values(), ids=FAULTS.keys())
def test_a_sick_episode_is_left_out_and_counted_and_its_siblings_are_kept(where, act, reason):
    group = played_beside(lambda: Sick(where, act))
    assert [e.member for e in group.episodes if e.error is None] == [0, 2, 3]
    failed = group.episodes[1]
    assert (failed.info["failure"], failed.info["attempts"], failed.reward) == (reason, 2, None)
    assert "\n" not in failed.error
    assert not any("failure" in e.info for e in group.episodes if e.error is None)


def test_a_failed_episode_is_part_of_neither_loss_nor_baseline():
    async def rollout(task, draw, member):
        return Episode(task, error="env.step: OSError: x") if member == 1 else good(task, reward=float(member == 0))

    (group,) = gather(rollout, group_size=4, retries=0)
    learned = rows([group])
    assert [s.episode for s in learned.samples] == ["0:p0/0", "0:p0/2", "0:p0/3"]
    assert learned.counts["errors"] == 1
    centred = ADVANTAGES["group_mean"](learned, AdvantageConfig())
    # Rewards 1, 0, 0: their mean is 1/3. With a zero for the failed one it would be 1/4.
    assert [a[-1] for a in centred] == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_a_group_below_its_minimum_is_dropped_and_counted():
    async def rollout(task, draw, member):
        return good(task) if draw == 1 or member == 0 else Episode(task, error="env.step: OSError: x")

    groups = gather(rollout, draws=2, group_size=3, retries=0)
    learned = rows(groups)
    assert {s.group for s in learned.samples} == {"1:p1"}
    assert (learned.counts["groups_dropped"], learned.counts["errors"]) == (1, 2)


@pytest.mark.parametrize("where", ["reset", "step"])
def test_a_hung_episode_is_given_up_on_time_with_what_it_had_started(where):
    children = []

    def hang():
        children.append(subprocess.Popen(["sh", "-c", "sleep 300 & sleep 300"]))
        children[-1].wait()

    begin = time.perf_counter()
    group = played_beside(lambda: Sick(where, hang), retries=0, step_timeout_s=0.3)
    assert time.perf_counter() - begin < 5
    failed = group.episodes[1]
    assert failed.info["failure"] == f"env.{where}.StepTimeout"
    assert failed.reward is None
    assert [e.stop for e in group.episodes if e.member != 1] == [StopReason.ENV_TERMINATED] * 3
    if os.path.exists("/proc/self/task"):
        assert children[0].wait(5) == -9, "the process that it waited for is dead"


def test_a_hung_step_is_no_reason_to_play_again():
    plays = []

    def make():
        plays.append(1)
        return Sick("step", threading.Event().wait)

    played_beside(make, retries=3, step_timeout_s=0.5)
    assert len(plays) == 1


def test_a_rollout_that_cancels_itself_or_returns_garbage_is_one_failed_episode():
    async def rollout(task, draw, member):
        if member == 0:
            asyncio.current_task().get_loop().call_soon(lambda: None)
            raise asyncio.CancelledError
        return "nonsense" if member == 1 else good(task)

    (group,) = gather(rollout, group_size=4, retries=0)
    assert [e.info.get("failure") for e in group.episodes] == [
        "rollout.CancelledError",
        "rollout.TypeError",
        None,
        None,
    ]


# Another try -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("engine.sample: ConnectionResetError: by peer", "outage"),
        ("env.step: ReadTimeout: 5 s", "outage"),
        ("env.step: TimeoutError: socket", "outage"),
        ("env.step: HTTPStatusError: 500", "outage"),
        ("env.reset: OSError: no free port", "outage"),
        ("env.reset: StepTimeout: no answer within 3 s", "hang"),
        ("no turn was finished within timeout_s=3 (in engine.sample)", "hang"),
        ("env.step: KeyError: 'a: OSError: b'", "bug"),
        ("env.step: FileNotFoundError: x", "bug"),
    ],
)
def test_failures_are_told_apart_by_their_class(error, kind):
    assert failures.kind_of(Episode(TASK, error=error)).value == kind


def test_what_is_down_is_tried_again_after_a_while_and_a_bug_at_once():
    times: dict[str, list[float]] = {"OSError": [], "KeyError": []}

    async def rollout(task, draw, member):
        name = ["OSError", "KeyError"][draw]
        times[name].append(time.perf_counter())
        return Episode(task, error=f"env.step: {name}: x")

    gather(rollout, draws=2, group_size=1, min_group=1, retries=2)
    gaps = {name: np.diff(at) for name, at in times.items()}
    assert gaps["OSError"][0] >= 0.25 and gaps["OSError"][1] >= 0.5
    assert max(gaps["KeyError"]) < 0.2


def test_retries_have_a_budget():
    tries = []

    async def rollout(task, draw, member):
        tries.append(draw)
        return Episode(task, error="env.step: KeyError: x")

    groups = gather(rollout, draws=40, group_size=1, min_group=1, retries=9, failures=Failures(limit=10**6))
    # 8 to begin with and one for every second episode, on top of the 40 first tries.
    assert len(groups) == 40 and len(tries) == 40 + 8 + 20


def test_a_budget_is_earned_by_episodes():
    budget = Budget(left=0)
    budget.earn()
    assert not budget.spend()
    budget.earn()
    assert budget.spend() and not budget.spend()


# Nothing works any more ------------------------------------------------------------------------------------


def test_when_everything_fails_the_run_stops_with_the_reason():
    tries = []

    async def rollout(task, draw, member):
        tries.append(draw)
        raise (KeyError if draw % 4 else ValueError)("bad\ntask")

    with pytest.raises(RolloutError) as stopped:
        gather(rollout, draws=10**6, group_size=1, min_group=1, retries=1, concurrency=8)
    assert len(tries) < 2 * (16 + 8)
    assert str(stopped.value).startswith("16 episodes in a row failed, 12 of them by rollout.KeyError; the last: ")
    assert "\n" not in str(stopped.value)


def test_when_every_environment_hangs_the_run_stops_too():
    renderer = FakeRenderer()
    engine = ScriptedEngine([[X, END]] * 99, renderer.tokenizer)

    def rollout(task, draw, member):
        env = Sick("step", lambda: threading.Event().wait(3) and MORE)
        settings = {"limits": Limits(step_timeout_s=0.2), "sampling": SamplingConfig(), "seed": 0}
        return run_episode(task, env=env, engine=engine, renderer=renderer, draw=draw, member=member, **settings)

    begin = time.perf_counter()
    with pytest.raises(RolloutError, match=r"16 episodes in a row failed, \d+ of them by env\.step\.StepTimeout; the"):
        gather(rollout, draws=10**6, group_size=4, concurrency=8)
    assert time.perf_counter() - begin < 10


def test_failures_in_a_row_are_counted_over_the_steps_of_a_run():
    async def rollout(task, draw, member):
        raise KeyError("x")

    kept = Failures(limit=6)
    assert len(gather(rollout, group_size=4, retries=0, failures=kept)) == 1
    with pytest.raises(RolloutError, match="6 episodes in a row"):
        gather(rollout, group_size=4, retries=0, failures=kept)


def test_quick_failures_are_no_row_while_slow_successes_are_under_way():
    async def rollout(task, draw, member):
        if draw % 2:
            raise KeyError("x")
        await asyncio.sleep(0.05)
        return good(task)

    groups = gather(rollout, draws=60, group_size=1, min_group=1, retries=0)
    assert sum(e.error is None for g in groups for e in g.episodes) == 30


def test_tasks_that_cannot_be_played_stop_the_run_only_when_there_are_very_many():
    async def rollout(task, draw, member):
        return (
            good(task) if draw in (30, 70) else Episode(task, error="the prompt is too long", info={"permanent": True})
        )

    assert len(gather(rollout, draws=100, group_size=1, min_group=1)) == 100
    with pytest.raises(RolloutError, match="128 episodes in a row failed, 128 of them by prompt_too_long"):
        gather(rollout, draws=300, group_size=1, min_group=1)


def test_an_outage_is_waited_for_one_episode_at_a_time(monkeypatch):
    monkeypatch.setattr(failures, "_LONGEST_WAIT_S", 0.01)
    running = most = calls = 0

    async def rollout(task, draw, member):
        nonlocal running, most, calls
        calls += 1
        running += 1
        if 12 < calls < 20:  # the eight of the limit and what else was under way
            most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        if calls < 20:
            raise ConnectionError("refused")
        return good(task)

    groups = gather(rollout, draws=40, group_size=1, min_group=1, retries=0, concurrency=4, failures=Failures(limit=8))
    assert most == 1 and len(groups) == 40
    lost = [e for g in groups for e in g.episodes if e.error is not None]
    assert len(lost) <= 19, "what came after the outage is not lost"


def test_an_outage_that_does_not_pass_stops_the_run_when_patience_is_over(monkeypatch):
    monkeypatch.setattr(failures, "_LONGEST_WAIT_S", 0.02)

    async def rollout(task, draw, member):
        raise ConnectionError("refused")

    begin = time.perf_counter()
    with pytest.raises(RolloutError, match=r"rollout\.ConnectionError; the last: rollout: ConnectionError: refused"):
        gather(rollout, draws=10**6, group_size=1, min_group=1, failures=Failures(limit=4, patience_s=0.3))
    assert 0.3 <= time.perf_counter() - begin < 5
