# SPDX-License-Identifier: Apache-2.0
"""One daemon thread on which plain (not async) reward functions run, in order.

Off the event loop, so that a slow scorer does not hold up the engine; always the same thread, so that a user's
function needs no locks; a daemon, so that a scorer that hangs does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

Job = tuple[Callable[..., Any], dict[str, Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class Worker:
    """Runs functions one after another on its own thread, which starts with the first of them.

    >>> import asyncio
    >>> asyncio.run(Worker().run(dict, a=1))
    {'a': 1}
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._started = False

    async def run(self, function: Callable[..., Any], **kwargs: Any) -> Any:
        """Awaits ``function(**kwargs)`` and returns, or raises, what it does."""
        if not self._started:
            self._started = True
            threading.Thread(target=_serve, args=(self._jobs,), name="palestra-reward", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.put((function, kwargs, loop, future))
        return await future


def _serve(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        function, kwargs, loop, future = job
        try:
            outcome: tuple[Any, BaseException | None] = (function(**kwargs), None)
        except BaseException as error:
            outcome = (None, error)
        # The loop may have been closed by Ctrl-C while the function ran: then nobody waits for the outcome.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, future, *outcome)


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if isinstance(error, StopIteration):
        error = RuntimeError(f"StopIteration: {error}")
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
