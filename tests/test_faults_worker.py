# SPDX-License-Identifier: Apache-2.0
"""What foreign code may do on its thread or its event loop without reaching the loop that drives the engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time

import pytest

from palestra.env import run_on_thread
from palestra.env.base import Action
from palestra.env.tool_env import ToolEnv
from palestra.rollout import worker
from palestra.rollout.worker import EnvThread, SideLoop

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's list of a thread's children")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


def gone(pid: int) -> bool:
    until = time.monotonic() + 5
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return not alive(pid)


def ask(method, timeout_s=5.0):
    """What an environment's method answers, within the time limit of an episode's step."""

    async def main():
        thread = EnvThread()
        try:
            async with asyncio.timeout(timeout_s):
                return await thread.call(method)
        finally:
            thread.close()

    return asyncio.run(main())


@linux
@pytest.mark.parametrize("ends", ["returns", "raises"])
def test_what_an_episode_leaves_running_ends_with_its_thread(ends: str) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def step() -> None:
        started.append(subprocess.Popen(["sleep", "60"]))
        if ends == "raises":
            raise ValueError("and leaves it behind")

    with contextlib.suppress(ValueError):
        ask(step)
    assert gone(started[0].pid)
    started[0].wait(5)


# Threads ---------------------------------------------------------------------------------------------------


@linux
def test_giving_up_a_call_kills_what_it_started_down_to_the_grandchildren(tmp_path) -> None:
    pids = tmp_path / "pids"

    def hang() -> None:
        subprocess.run(["sh", "-c", f"sleep 300 & echo $! $$ > {pids}; sleep 300"])

    for giving_up in (lambda: ask(hang, 0.3), lambda: asyncio.run(run_on_thread(hang, timeout_s=0.3))):
        with pytest.raises(TimeoutError):
            giving_up()
        started = [int(pid) for pid in pids.read_text().split()]
        assert len(started) == 2 and all(map(gone, started))


@linux
def test_the_processes_of_other_threads_are_left_alone() -> None:
    mine = subprocess.Popen(["sleep", "300"])
    try:
        with pytest.raises(TimeoutError):
            ask(lambda: subprocess.run(["sleep", "300"]), 0.2)
        assert alive(mine.pid)
    finally:
        mine.kill()
        mine.wait()


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), StopIteration()])
def test_what_would_mean_something_to_the_loop_is_raised_as_an_ordinary_error(raised) -> None:
    def act() -> None:
        raise raised

    async def act_async() -> None:
        raise raised

    for method in (act, act_async):
        with pytest.raises(RuntimeError, match=type(raised).__name__):
            ask(method)
    with pytest.raises(RuntimeError, match=type(raised).__name__):
        asyncio.run(run_on_thread(act))


# The loop of async environments ----------------------------------------------------------------------------


def test_async_methods_run_on_a_loop_that_is_not_the_callers() -> None:
    async def where() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def main() -> None:
        first, second = await EnvThread().call(where), await EnvThread().call(where)
        assert first is second is not asyncio.get_running_loop()

    asyncio.run(main())


def test_a_plain_method_may_return_something_to_await() -> None:
    async def later() -> int:
        await asyncio.sleep(0)
        return 7

    assert ask(lambda: later()) == 7


def test_an_environment_that_stops_its_loop_stops_nobody() -> None:
    async def stop() -> str:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)
        return "went on"

    assert ask(stop) == "went on"


def test_an_environment_cannot_close_a_loop_that_runs() -> None:
    async def close() -> None:
        asyncio.get_running_loop().close()

    with pytest.raises(RuntimeError, match="Cannot close a running event loop"):
        ask(close)


def test_a_blocked_loop_is_given_up_its_other_calls_fail_as_an_outage_and_the_next_get_another(monkeypatch) -> None:
    monkeypatch.setattr(worker, "GRACE_S", 0.1)
    released = threading.Event()

    async def block() -> None:
        released.wait(10)

    async def wait() -> None:
        await asyncio.sleep(60)

    async def fine() -> str:
        return "fine"

    async def main() -> None:
        neighbour = asyncio.create_task(EnvThread().call(wait))
        await asyncio.sleep(0.05)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await EnvThread().call(block)
        with pytest.raises(RuntimeError, match="was blocked by one of them"):
            await asyncio.wait_for(neighbour, 1)
        assert await asyncio.wait_for(EnvThread().call(fine), 1) == "fine"

    begin = time.perf_counter()
    asyncio.run(main())
    assert time.perf_counter() - begin < 3
    released.set()


def test_an_environment_that_refuses_to_be_cancelled_is_left_alone(monkeypatch) -> None:
    monkeypatch.setattr(worker, "GRACE_S", 0.1)
    enough = False

    async def stubborn() -> None:
        while not enough:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    begin = time.perf_counter()
    with pytest.raises(TimeoutError):
        ask(stubborn, 0.05)
    assert time.perf_counter() - begin < 2
    before = SideLoop.shared()
    enough = True
    assert SideLoop.shared() is before, "its loop answers: it serves the others"


def test_a_cancelled_call_may_clean_up_before_the_next_begins() -> None:
    order = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)
            order.append("cleaned up")

    with pytest.raises(TimeoutError):
        ask(work, 0.05)
    order.append("next")
    assert order == ["cleaned up", "next"]


# Tools -----------------------------------------------------------------------------------------------------


def observed(function, **options) -> tuple[str, object]:
    """What the model reads after one call of a tool, and why the episode cannot go on."""
    env = ToolEnv([function], **options)
    call = {"id": "c", "type": "function", "function": {"name": function.__name__, "arguments": {}}}
    step = asyncio.run(env.step(Action({"role": "assistant", "content": "", "tool_calls": [call]}, "")))
    return step.observation.messages[0]["content"], step.tool_failure


def test_a_tool_that_raises_what_only_the_loop_may_is_an_observation() -> None:
    def interrupts() -> None:
        raise KeyboardInterrupt

    async def cancels() -> None:
        raise asyncio.CancelledError

    assert observed(interrupts) == ("Error: RuntimeError: KeyboardInterrupt: ", None)
    assert observed(cancels) == ("Error: tool cancels was cancelled from inside", None)


def test_a_tool_that_swallows_its_cancellation_costs_its_time_and_a_moment(monkeypatch) -> None:
    monkeypatch.setattr("palestra.env.tool_env.GRACE_S", 0.1)
    refusals = 0

    async def stubborn() -> None:
        nonlocal refusals
        while refusals < 2:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                refusals += 1

    begin = time.perf_counter()
    said, fatal = observed(stubborn, timeout_s=0.05)
    assert said == "Error: tool stubborn timed out after 0.05 s and does not end"
    assert fatal == "tool stubborn timed out after 0.05 s and does not end"
    assert time.perf_counter() - begin < 2


def test_text_that_no_tokenizer_can_encode_is_made_encodable() -> None:
    def broken() -> str:
        return "a\udc80b"

    said, _ = observed(broken)
    assert said == "a?b"
    said.encode()


@linux
def test_a_tool_that_times_out_leaves_no_process(tmp_path) -> None:
    pid = tmp_path / "pid"

    def waits() -> None:
        subprocess.run(["sh", "-c", f"echo $$ > {pid}; exec sleep 300"])

    said, fatal = observed(waits, timeout_s=0.3)
    assert said == "Error: tool waits timed out after 0.3 s" and fatal is None
    assert gone(int(pid.read_text()))
