# SPDX-License-Identifier: Apache-2.0
"""Many episodes at once: bounded, retried, matched by identity, and nothing left running."""

from __future__ import annotations

import asyncio
import contextlib
import time

import numpy as np
import pytest
from fakes import DONE, TASK, FakeRenderer, StepsEnv, run

from palestra.engine.scripted import ScriptedEngine
from palestra.errors import ConfigError, EngineError
from palestra.rollout.collect import collect
from palestra.rollout.episode import Limits, SamplingConfig, run_episode
from palestra.types import Author, Episode, RewardTerm, Span, StopReason, Task, Trajectory, Turn


def good(task, *, version=0, reward=1.0):
    span = Span(np.array([1]), Author.MODEL, "assistant", "x", np.array([-1.0]), version)
    turn = Turn((span,), (), {"role": "assistant", "content": "x"}, "eos")
    terms = {"accuracy": RewardTerm(reward)}
    return Episode(task, (Trajectory((turn,), StopReason.ENV_TERMINATED, rewards=terms),))


def tasks(n):
    return [(i, Task(f"p{i}", "go")) for i in range(n)]


def gather(draws, rollout, **options):
    async def main():
        async with contextlib.aclosing(collect(draws, rollout, **options)) as groups:
            return [g async for g in groups]

    return run(main())


def test_da_007_episodes_are_matched_by_identity_never_by_order_of_arrival():
    async def later_first(task, draw, member):
        await asyncio.sleep(0.01 * (4 - 2 * draw - member))
        return Episode(task, info={"said": f"c{draw}{'ab'[member]}"})

    groups = gather(tasks(2), later_first, group_size=2)
    pairs = [(g.task.id, e.info["said"]) for g in sorted(groups, key=lambda g: g.draw) for e in g.episodes]
    assert pairs == [("p0", "c0a"), ("p0", "c0b"), ("p1", "c1a"), ("p1", "c1b")]
    assert [g.task.id for g in groups] == ["p1", "p0"], "groups come as they complete"


def test_the_same_task_drawn_twice_makes_two_groups():
    async def rollout(task, draw, member):
        return good(task)

    assert sorted(g.id for g in gather([(0, TASK), (1, TASK)], rollout, group_size=2)) == ["0:t", "1:t"]


def test_et_005_an_outage_is_retried_then_excluded_and_its_siblings_are_kept():
    asked = []

    async def rollout(task, draw, member):
        asked.append(member)
        if member == 2:
            raise ConnectionError("sandbox\nis gone")
        return good(task)

    (group,) = gather(tasks(1), rollout, group_size=4, retries=1)
    assert asked.count(2) == 2 and len(asked) == 5
    assert [e.member for e in group.scored] == [0, 1, 3]
    failed = group.episodes[2]
    assert failed.error == "rollout: ConnectionError: sandbox is gone"
    assert (failed.reward, sum(t.loss_mask.sum() for t in failed.trajectories)) == (None, 0)
    assert sum(e.error is not None for e in group.episodes) == 1
    assert not any("excluded" in e.info for e in group.scored)


def test_et_027_a_failing_reset_is_the_outage_of_one_episode_not_the_end_of_the_run():
    class Broken(StepsEnv):
        def reset(self, task, *, seed):
            raise OSError("no free port")

    renderer = FakeRenderer()
    engine = ScriptedEngine(["x"], renderer.tokenizer)

    async def rollout(task, draw, member):
        env = (Broken if member == 1 else StepsEnv)(DONE)
        return await run_episode(
            task,
            env=env,
            engine=engine,
            renderer=renderer,
            limits=Limits(),
            sampling=SamplingConfig(),
            seed=0,
            draw=draw,
            member=member,
        )

    groups = gather(tasks(3), rollout, group_size=4, retries=1)
    assert len(groups) == 3
    for group in groups:
        assert [e.member for e in group.episodes if e.error is None] == [0, 2, 3]
        assert group.episodes[1].error == "env.reset: OSError: no free port"
        assert [e.info["attempts"] for e in group.episodes] == [1, 2, 1, 1]


def test_a_failure_that_passes_is_gone_after_the_retry():
    tries = []

    async def rollout(task, draw, member):
        tries.append(member)
        return good(task) if len(tries) > 1 else Episode(task, error="env.step: OSError")

    (group,) = gather(tasks(1), rollout, group_size=1, min_group=1)
    assert (group.episodes[0].error, group.episodes[0].info["attempts"]) == (None, 2)


def test_a_failure_that_would_come_again_is_not_retried():
    tries = []

    async def rollout(task, draw, member):
        tries.append(member)
        return Episode(task, error="the prompt has 600 tokens", info={"permanent": True})

    gather(tasks(1), rollout, group_size=2, retries=5)
    assert tries == [0, 1]


def test_a_group_with_too_few_good_episodes_comes_whole_but_marked():
    async def rollout(task, draw, member):
        return good(task) if member == 0 else Episode(task, error="outage")

    (group,) = gather(tasks(1), rollout, group_size=3, retries=0, min_group=2)
    assert len(group.episodes) == 3
    assert group.episodes[0].info["excluded"] == "1 of 3 episodes are good; min_group is 2"
    (lone,) = gather(tasks(1), rollout, group_size=3, retries=0, min_group=1)
    assert "excluded" not in lone.episodes[0].info


def test_et_022_a_stale_episode_is_marked_and_keeps_its_reward_for_the_baseline():
    async def rollout(task, draw, member):
        return good(task, version=(7, 3)[member], reward=(1.0, 0.0)[member])

    (group,) = gather(tasks(1), rollout, group_size=2, max_staleness=2, version=lambda: 7)
    assert [e.info["stale"] for e in group.episodes] == [False, True]
    assert [e.info["staleness"] for e in group.episodes] == [0, 4]
    assert [e.reward for e in group.scored] == [1.0, 0.0]


def test_staleness_equal_to_the_bound_is_not_stale():
    async def rollout(task, draw, member):
        return good(task, version=5)

    (group,) = gather(tasks(1), rollout, group_size=1, min_group=1, max_staleness=2, version=lambda: 7)
    assert group.episodes[0].info["stale"] is False


def test_et_023_a_lost_episode_surfaces_as_an_error_that_names_its_task():
    async def rollout(task, draw, member):
        if task.id == "p1":
            await asyncio.Event().wait()
        return good(task)

    begin = time.perf_counter()
    with pytest.raises(EngineError, match="'p1'") as raised:
        gather(tasks(3), rollout, group_size=1, min_group=1, stall_timeout_s=0.1)
    assert time.perf_counter() - begin < 2
    assert "'p0'" not in str(raised.value)


def test_a_lost_episode_surfaces_even_while_others_keep_finishing():
    async def rollout(task, draw, member):
        if task.id == "p0":
            await asyncio.Event().wait()
        await asyncio.sleep(0.01)
        return good(task)

    with pytest.raises(EngineError, match="'p0'"):
        gather(
            ((i, Task(f"p{i}", "")) for i in range(10**9)), rollout, group_size=1, concurrency=2, stall_timeout_s=0.1
        )


def test_the_consumers_own_time_is_no_stall():
    async def rollout(task, draw, member):
        for _ in range(1 + 5 * draw):
            await asyncio.sleep(0.01)
        return good(task)

    async def main():
        seen = []
        async with contextlib.aclosing(collect(tasks(2), rollout, group_size=1, stall_timeout_s=0.2)) as groups:
            async for group in groups:
                seen.append(group.draw)
                time.sleep(0.3)  # a training step that holds the loop
        return seen

    assert run(main()) == [0, 1]


def test_no_more_than_concurrency_run_at_once_and_draws_are_taken_only_as_room_appears():
    running = most = 0
    drawn = []

    async def rollout(task, draw, member):
        nonlocal running, most
        running += 1
        most = max(most, running)
        assert len(drawn) <= draw + 3
        await asyncio.sleep(0.001)
        running -= 1
        return good(task)

    def source():
        for pair in tasks(10):
            drawn.append(pair[0])
            yield pair

    assert len(gather(source(), rollout, group_size=4, concurrency=5)) == 10
    assert most == 5


@pytest.mark.parametrize("how", ["cancelled", "left early"])
def test_nothing_is_left_running(how):
    ended = []

    async def rollout(task, draw, member):
        if draw == 0:
            return good(task)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # an environment that is being closed
            ended.append(member)
            raise

    async def consume():
        async with contextlib.aclosing(collect(tasks(2), rollout, group_size=3)) as groups:
            async for _ in groups:
                if how == "left early":
                    await asyncio.sleep(0.01)
                    break

    async def main():
        before = asyncio.all_tasks()
        task = asyncio.create_task(consume())
        await asyncio.sleep(0.05)
        if how == "cancelled":
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return asyncio.all_tasks() - before

    assert run(main()) == set()
    assert sorted(ended) == [0, 1, 2], "each was cancelled, and awaited until it had closed"


def test_a_mistake_of_the_user_stops_the_run_and_its_siblings():
    cancelled = []

    async def rollout(task, draw, member):
        if member == 1:
            await asyncio.sleep(0.01)
            raise ConfigError("no such tool")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(member)
            raise

    with pytest.raises(ConfigError, match="no such tool"):
        gather(tasks(1), rollout, group_size=3)
    assert sorted(cancelled) == [0, 2]


@pytest.mark.parametrize(
    "options", [{"group_size": 0}, {"group_size": 1, "concurrency": 0}, {"group_size": 1, "retries": -1}]
)
def test_sizes_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigError, match="must be at least"):
        gather(tasks(1), None, **options)


def test_no_draws_no_groups():
    assert gather([], None, group_size=2) == []
