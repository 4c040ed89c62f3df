# SPDX-License-Identifier: Apache-2.0
"""A step's groups: played, scored, refilled where the config says so, and the rows that are learned from."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from palestra.data.source import Cursor, Gated
from palestra.engine.base import Engine
from palestra.engine.local import LocalEngine
from palestra.learn.batch import Rows
from palestra.rollout.collect import collect
from palestra.rollout.dump import from_line, to_line
from palestra.rollout.failures import Failures
from palestra.rollout.refill import Filled, fill, select
from palestra.train.config import AlgorithmConfig, RLConfig
from palestra.train.metrics import rollout_timings, success_rate, timed
from palestra.train.setup import World
from palestra.types import Group, Task


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """What a step learns from. groups: scored, in the order of their draws. cursor: where the tasks of the next step
    begin. metrics, timings: of the drawing, under the names of :mod:`palestra.run.metrics`. remembered: what the
    rewards remember once they have scored it."""

    groups: tuple[Group, ...]
    cursor: Cursor
    metrics: Mapping[str, float]
    timings: Mapping[str, float]
    remembered: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint: plain values, and what the rewards keep."""
        return {
            "groups": [to_line(group) for group in self.groups],
            "cursor": self.cursor.to_dict(),
            "metrics": dict(self.metrics),
            "timings": dict(self.timings),
            "remembered": dict(self.remembered),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Collected:
        """The inverse of :meth:`to_dict`."""
        groups = tuple(from_line(line, "groups collected ahead") for line in data["groups"])
        rest = (data[name] for name in ("metrics", "timings", "remembered"))
        return cls(groups, Cursor.from_dict(data["cursor"]), *rest)


async def collect_step(
    config: RLConfig,
    world: World,
    sampler: Engine,
    engine: LocalEngine,
    step: int,
    cursor: Cursor,
    failures: Failures,
) -> Collected:
    """The batch of step ``step``, whose tasks begin at ``cursor``. sampler: what episodes sample from; engine: what is
    behind it. failures: those in a row, kept from step to step."""
    world.journal.at("rl", step)
    timings: dict[str, float] = {}
    engine.take_stats()  # what came before is not this step's
    loop_began = time.thread_time()
    filled = await draw_groups(config, world, sampler, step, cursor, failures=failures, timings=timings)
    loop_s = time.thread_time() - loop_began - timings["time/reward_s"]
    timings |= rollout_timings(engine.take_stats(), timings["time/rollout_s"], loop_s=loop_s)
    following, metrics = filled.cursor, filled.metrics()
    if isinstance(world.tasks, Gated) and world.tasks.gate is not None:
        following = world.tasks.heard(cursor, following, success_rate(filled.groups, config.eval.metric))
        metrics |= {"rollout/stage": float(cursor.stage)}
    return Collected(filled.groups, following, metrics, timings, world.remembered())


async def draw_groups(
    config: RLConfig,
    world: World,
    engine: Engine,
    step: int,
    cursor: Cursor,
    *,
    failures: Failures,
    timings: dict[str, float],
) -> Filled:
    """The groups that step ``step`` draws from ``cursor`` on, scored, in the order of their draws. The weights that
    learn from them are of version ``step``: that is what staleness is counted from."""
    rollout = world.rollout(engine, config.sampling, purpose="train")

    async def play(draws: Sequence[tuple[int, Task]]) -> list[Group]:
        groups = collect(
            draws,
            rollout,
            group_size=config.algorithm.group_size,
            concurrency=config.train.concurrency,
            retries=config.train.retries,
            min_group=config.algorithm.min_group,
            max_staleness=config.train.max_staleness,
            version=lambda: step,
            failures=failures,
        )
        with timed(timings, "time/rollout_s"):
            async with aclosing(groups):
                done = [group async for group in groups]
        # Groups come back as they finish; they are scored in the order of their draws, so that runs repeat.
        with timed(timings, "time/reward_s"):
            return [await world.rubric.score(group) for group in sorted(done, key=lambda g: g.draw)]

    return await fill(
        world.tasks,
        cursor,
        config.train.tasks_per_step,
        play,
        useful=lambda group: any(s.trained_tokens for s in learnable([group], config.algorithm).samples),
        max_batches=config.algorithm.max_gen_batches,
    )


def learnable(groups: Sequence[Group], algorithm: AlgorithmConfig) -> Rows:
    """What of these groups is learned from."""
    return select(
        groups,
        min_group=algorithm.min_group,
        unscored=algorithm.unscored,
        dynamic_sampling=algorithm.dynamic_sampling,
        mask_truncated=algorithm.mask_truncated,
    )
