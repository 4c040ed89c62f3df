# SPDX-License-Identifier: Apache-2.0
"""Blocking functions beside an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
import time

import pytest

from palestra.env import run_on_thread


def test_the_result_and_the_exception_come_back() -> None:
    assert asyncio.run(run_on_thread(divmod, 7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run_on_thread(divmod, 7, 0))


def test_an_exception_that_a_future_cannot_hold_does_not_hang_the_loop() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(run_on_thread(next, iter(()), timeout_s=5))


def test_many_blocking_calls_run_at_the_same_time() -> None:
    """Each waits for all the others, which no pool of fewer threads would survive."""
    everybody = threading.Barrier(64)

    async def main() -> list[int]:
        return await asyncio.gather(*(run_on_thread(everybody.wait, 30.0) for _ in range(64)))

    assert sorted(asyncio.run(main())) == list(range(64))


def test_a_hung_function_costs_its_timeout_and_holds_up_nothing() -> None:
    released = threading.Event()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await run_on_thread(released.wait, timeout_s=0.05)

    start = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - start < 3.0
    released.set()
    left = [t for t in threading.enumerate() if t.name == "palestra-wait"]
    for thread in left:
        thread.join(1.0)
    assert not any(t.is_alive() for t in left)


def test_a_hung_function_does_not_keep_the_process_alive() -> None:
    code = (
        "import asyncio, time\n"
        "from palestra.env.threads import run_on_thread\n"
        "try: asyncio.run(run_on_thread(time.sleep, 60, timeout_s=0.05))\n"
        "except TimeoutError: print('timed out')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "timed out\n"
    assert done.stderr == ""


def test_context_variables_reach_the_thread() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    variable.set("seen")
    assert asyncio.run(run_on_thread(variable.get)) == "seen"
