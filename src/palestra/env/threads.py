# SPDX-License-Identifier: Apache-2.0
"""Blocking functions beside an event loop.

The loop's default executor has few threads and waits for all of them at exit: a handful of sleeping tools
froze every episode, and one hung tool kept the process alive. Here every call gets a daemon thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

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


def harmless(error: BaseException) -> BaseException:
    """What may be raised in a coroutine that waited for foreign code.

    KeyboardInterrupt, GeneratorExit, StopIteration and CancelledError mean something to the loop that their sender
    did not mean: they become a RuntimeError. SystemExit stays; whoever waits ends the call with it, not the run.

    >>> harmless(KeyboardInterrupt()), harmless(KeyError("x"))
    (RuntimeError('KeyboardInterrupt: '), KeyError('x'))
    """
    meant = isinstance(error, Exception | SystemExit) and not isinstance(error, StopIteration)
    if meant and not isinstance(error, asyncio.CancelledError):
        return error
    told = RuntimeError(f"{type(error).__name__}: {message_of(error)}")
    told.__cause__ = error
    return told


def message_of(error: BaseException) -> str:
    """What an exception says of itself; foreign ones may fail at that too.

    >>> class Mute(Exception):
    ...     def __str__(self): raise RuntimeError("no words")
    >>> message_of(ValueError("too big")), message_of(Mute())
    ('too big', '(a message that cannot be shown)')
    """
    try:
        return str(error)
    except Exception:
        return "(a message that cannot be shown)"


def end_children(thread: threading.Thread) -> None:
    """Kill the processes that a thread has started, with their descendants, so that giving up a hung call leaves
    none behind (and a call that waits for one of them returns). On Linux; elsewhere nothing is known of them."""
    for pid in _started_by(f"/proc/self/task/{thread.native_id}/children"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _started_by(path: str) -> list[int]:
    """The processes that a kernel's list names, and all of theirs."""
    try:
        direct = [int(pid) for pid in Path(path).read_text(encoding="ascii").split()]
    except (OSError, ValueError):
        return []
    return [p for pid in direct for p in (pid, *_of_process(pid))]


def _of_process(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    with contextlib.suppress(OSError):
        return [p for task in tasks.iterdir() for p in _started_by(f"{task}/children")]
    return []
