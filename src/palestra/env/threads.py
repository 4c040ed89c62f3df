# SPDX-License-Identifier: Apache-2.0
"""Blocking functions beside an event loop.

The loop's default executor has few threads and waits for all of them at exit: a handful of sleeping tools
froze every episode, and one hung tool kept the process alive. Here every call gets a daemon thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from palestra.foreign import end_children, harmless, message_of

T = TypeVar("T")


async def run_on_thread(function: Callable[..., T], *args: Any, timeout_s: float | None = None) -> T:
    """Run ``function(*args)`` on a new daemon thread and wait for it without blocking the loop.

    Raises what the function raises, and :class:`TimeoutError` after ``timeout_s`` seconds. Python cannot end a
    thread: after a timeout (or a cancellation) the processes that it started are killed, and the function goes on
    until it returns; its result is dropped, and whatever object it works on must not be used again. It holds up
    neither the loop nor the end of the process. Starting a thread costs about 0.1 ms.

    >>> asyncio.run(run_on_thread(pow, 2, 5))
    32
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(value: T | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((value, error))

    def work() -> None:
        outcome: tuple[T | None, BaseException | None]
        try:
            outcome = context.run(function, *args), None
        except BaseException as error:  # handed to the waiting coroutine, which raises it
            outcome = None, error
        # A loop that is closed by now has nobody left who waits for this.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(deliver, *outcome)

    name = getattr(function, "__name__", type(function).__name__)
    thread = threading.Thread(target=work, daemon=True, name=f"palestra-{name}")
    thread.start()
    try:
        value, error = await asyncio.wait_for(done, timeout_s)
    except BaseException:
        end_children(thread)
        raise
    if error is not None:
        raise harmless(error)
    return value  # type: ignore[return-value]


__all__ = ["end_children", "harmless", "message_of", "run_on_thread"]
