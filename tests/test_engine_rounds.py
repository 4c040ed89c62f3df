# SPDX-License-Identifier: Apache-2.0
"""Sampling in rounds: which requests meet in the engine follows from the episodes, not from how long tools take."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from palestra.config import load
from palestra.engine.base import Completion, Engine, SamplingParams
from palestra.engine.rounds import Rounds
from palestra.engine.scripted import ScriptedEngine
from palestra.errors import ConfigError
from palestra.model.testing import ByteTokenizer
from palestra.train.config import RLConfig
from palestra.train.schedule import UNREPEATABLE, sampler
from palestra.types import IntArray


class Watched(ScriptedEngine):
    """Notes which requests were in the engine together: those that came before any of them was answered."""

    def __init__(self) -> None:
        super().__init__(lambda prompt, params, session: "ok", ByteTokenizer())
        self.batches: list[list[str]] = []
        self._open = 0

    async def sample(self, prompt: IntArray, params: SamplingParams, *, session: str) -> Completion:
        if not self._open:
            self.batches.append([])
        self.batches[-1].append(session)
        self._open += 1
        try:
            await asyncio.sleep(0.002)
            return await super().sample(prompt, params, session=session)
        finally:
            self._open -= 1


TURNS = [3, 1, 2, 3]


async def play(rounds: Rounds, tools: random.Random) -> None:
    """Four episodes of so many turns; how long their tools take is drawn from ``tools``."""

    async def episode(engine: Engine, name: str, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(tools.random() / 100)
            await engine.sample(np.array([65], np.int32), SamplingParams(4), session=name)
        await asyncio.sleep(tools.random() / 100)

    await asyncio.gather(
        *(rounds.play(lambda engine, n=n, t=t: episode(engine, f"e{n}", t)) for n, t in enumerate(TURNS))
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_batches_are_the_same_however_long_the_tools_take(seed: int) -> None:
    engine = Watched()
    asyncio.run(play(Rounds(engine), random.Random(seed)))
    assert engine.batches == [["e0", "e1", "e2", "e3"], ["e0", "e2", "e3"], ["e0", "e3"]]


def test_an_episode_that_fails_or_is_cancelled_holds_nobody_up() -> None:
    async def main() -> list[Any]:
        rounds = Rounds(Watched())

        async def fails(engine: Engine) -> None:
            raise RuntimeError("no tool")

        async def waits(engine: Engine) -> str:
            return (await engine.sample(np.array([65], np.int32), SamplingParams(4), session="w")).text

        async def sleeps(engine: Engine) -> None:
            await asyncio.sleep(60)

        asleep = asyncio.create_task(rounds.play(sleeps))
        others = [asyncio.create_task(rounds.play(fails)), asyncio.create_task(rounds.play(waits))]
        await asyncio.sleep(0.01)
        assert not others[1].done(), "one is still out"
        asleep.cancel()
        return await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), 5)

    failed, text = asyncio.run(main())
    assert isinstance(failed, RuntimeError) and text == "ok"


def config(**train: Any) -> RLConfig:
    given = {"model": "builtin:calculator", "env": "calculator", "data": "arithmetic", "train": train}
    return load(given | {"eval": {"size": 10}}, [], RLConfig)


def test_rounds_are_for_engines_that_need_them_and_only_when_asked_for() -> None:
    engine = Watched()
    assert sampler(config(deterministic=True), engine, batch_invariant=True) == (engine, None)
    assert sampler(config(), engine, batch_invariant=False) == (engine, UNREPEATABLE)
    chosen, said = sampler(config(deterministic=True), engine, batch_invariant=False)
    assert isinstance(chosen, Rounds) and said is not None and "rounds" in said
    with pytest.raises(ConfigError, match=r"the 64 episodes .* set train\.concurrency=64"):
        sampler(config(deterministic=True, concurrency=63), engine, batch_invariant=False)
