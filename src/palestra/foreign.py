# SPDX-License-Identifier: Apache-2.0
"""What code that is not ours may leave behind where it ran: exceptions with a meaning of their own, processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from pathlib import Path


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


__all__ = ["end_children", "harmless", "message_of"]
