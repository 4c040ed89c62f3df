# SPDX-License-Identifier: Apache-2.0
"""The thread that one episode's environment lives on."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any

_Job = Callable[[], None]


class EnvThread:
    """Runs plain (blocking) methods of one environment, all on the same daemon thread.

    Things that belong to the thread that made them (a SQLite connection, a browser) work, and a call costs half of
    what a thread of its own would. The thread starts with the first call, so an async environment has none.

    >>> async def main():
    ...     thread = EnvThread()
    ...     one, two = await thread.call(threading.get_ident), await thread.call(threading.get_ident)
    ...     thread.close()
    ...     return one == two != threading.get_ident()
    >>> asyncio.run(main())
    True
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] | None = None

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run ``function()`` there and wait without blocking the loop; what it raises is raised here.

        When the waiting is cancelled the call is given up and its result dropped. The thread ends once the call
        returns, if ever; the next call gets a new one.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        context = contextvars.copy_context()

        def deliver(value: Any, error: BaseException | None) -> None:
            if not done.done():
                done.set_result((value, error))

        def job() -> None:
            try:
                outcome: tuple[Any, BaseException | None] = (context.run(function), None)
            except BaseException as error:  # carried over to the waiting task, which raises it
                outcome = (None, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(deliver, *outcome)

        self._started().put(job)
        try:
            value, error = await done
        except asyncio.CancelledError:
            self.close()
            raise
        if error is None:
            return value
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise error
        # A coroutine cannot raise StopIteration, and sys.exit() in an environment ends its episode, not the run.
        raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Let the thread end after what it is doing."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None

    def _started(self) -> queue.SimpleQueue[_Job | None]:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._jobs,), name="palestra-env", daemon=True).start()
        return self._jobs


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
