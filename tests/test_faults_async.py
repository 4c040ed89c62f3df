# SPDX-License-Identifier: Apache-2.0
"""Async environments that misbehave: their siblings and the loop that drives the engine go on."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from fakes import DONE, MORE, StepsEnv
from test_faults import played_beside

from palestra.rollout import worker
from palestra.types import StopReason


class AsyncSick(StepsEnv):
    def __init__(self, act):
        super().__init__(DONE)
        self.act = act

    async def step(self, action):
        return await self.act()


def raises(error):
    async def act():
        raise error

    return act


async def stops_the_loop():
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)
    raise KeyError("afterwards")


async def closes_the_loop():
    asyncio.get_running_loop().close()


async def blocks_the_loop():
    time.sleep(1.0)
    return MORE


async def refuses_to_be_cancelled():
    for _ in range(50):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)


async def returns_garbage():
    return ("observation", 1.0)


FAULTS = {
    "stops the loop": (stops_the_loop, "env.step.KeyError"),
    "closes the loop": (closes_the_loop, "env.step.RuntimeError"),
    "blocks the loop": (blocks_the_loop, "env.step.StepTimeout"),
    "refuses to be cancelled": (refuses_to_be_cancelled, "env.step.StepTimeout"),
    "interrupts": (raises(KeyboardInterrupt()), "env.step.RuntimeError"),
    "exits": (raises(SystemExit(3)), "env.step.RuntimeError"),
    "cancels": (raises(asyncio.CancelledError()), "env.step.RuntimeError"),
    "returns garbage": (returns_garbage, "env.step.TypeError"),
}


@pytest.mark.parametrize(("act", "reason"), FAULTS.values(), ids=FAULTS.keys())
def test_a_sick_async_environment_is_one_failed_episode(act, reason, monkeypatch):
    monkeypatch.setattr(worker, "GRACE_S", 0.1)
    begin = time.perf_counter()
    group = played_beside(lambda: AsyncSick(act), step_timeout_s=0.5)
    assert group.episodes[1].info["failure"] == reason
    assert [e.member for e in group.episodes if e.stop is StopReason.ENV_TERMINATED] == [0, 2, 3]
    assert time.perf_counter() - begin < 5
