# SPDX-License-Identifier: Apache-2.0
"""Episodes as training would play them, before there is a run: for a look at what a reward pays."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from palestra.data.source import Cursor
from palestra.reward.rubric import Rubric
from palestra.rollout.collect import collect
from palestra.run.progress import Progress
from palestra.train import setup
from palestra.train.config import RLConfig
from palestra.types import Group


def play_groups(config: RLConfig, episodes: int, *, progress: Progress) -> tuple[list[Group], Rubric]:
    """The first groups of a run, scored, at least ``episodes`` episodes in all, and the rubric that scored them.

    Tasks, sampling and group size are the config's; the policy is its ``model`` as it stands (a ``warmup`` has not
    happened: name a checkpoint as ``model`` to see the policy after one).
    """
    world = setup.make_world(config, loaded := setup.load(config.model))
    size = config.algorithm.group_size
    tasks, _ = world.tasks.take(Cursor(), -(-episodes // size))
    engine = setup.make_engine(config, loaded.model, world.renderer)
    progress.phase("sampling", total=len(tasks) * size)

    async def play() -> list[Group]:
        rollout = world.rollout(engine, config.sampling, purpose="train")
        played = collect(
            enumerate(tasks),
            rollout,
            group_size=size,
            concurrency=config.train.concurrency,
            retries=config.train.retries,
            min_group=1,
        )
        done: list[Group] = []
        async with aclosing(played):
            async for group in played:
                done.append(group)
                progress.update(len(done) * size, {})
        return [await world.rubric.score(group) for group in sorted(done, key=lambda g: g.draw)]

    try:
        return asyncio.run(play()), world.rubric
    finally:
        engine.close()
