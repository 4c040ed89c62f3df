# SPDX-License-Identifier: Apache-2.0
"""A step's groups: played, scored, refilled where the config says so, and the rows that are learned from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, aclosing

from palestra.data.source import Cursor
from palestra.engine.base import Engine
from palestra.learn.batch import Rows
from palestra.rollout.collect import collect
from palestra.rollout.failures import Failures
from palestra.rollout.refill import Filled, fill, select
from palestra.train.config import AlgorithmConfig, RLConfig
from palestra.train.setup import World
from palestra.types import Group, Task


async def draw_groups(
    config: RLConfig,
    world: World,
    engine: Engine,
    cursor: Cursor,
    *,
    version: Callable[[], int],
    failures: Failures,
    timed: Callable[[str], AbstractContextManager[None]],
) -> Filled:
    """The groups of the step that begins at ``cursor``, scored, in the order of their draws. timed: clocks a block."""
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
            version=version,
            failures=failures,
        )
        with timed("time/rollout_s"):
            async with aclosing(groups):
                done = [group async for group in groups]
        # Groups come back as they finish; they are scored in the order of their draws, so that runs repeat.
        with timed("time/reward_s"):
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
