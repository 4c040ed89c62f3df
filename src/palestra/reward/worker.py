# SPDX-License-Identifier: Apache-2.0
"""How a reward function is called: plain ones on one daemon thread, in order, async ones where we are; within a bound.

Off the event loop, so that a slow scorer does not hold up the engine; always the same thread, so that a user's
function needs no locks; a daemon, so that a scorer that hangs does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from palestra.foreign import end_children, harmless

TIMEOUT_S = 600.0
"""Of one call, which scores a whole group: what waits for a judge may take minutes."""

Job = tuple[Callable[..., Any], dict[str, Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]
Jobs = queue.SimpleQueue[Job | None]


class RewardTimeout(TimeoutError):
    """A reward function gave no score in time."""


class Worker:
    """Runs functions one after another on its own thread, which starts with the first of them.

    >>> import asyncio
    >>> asyncio.run(Worker().run(dict, a=1))
    {'a': 1}
    """

    def __init__(self) -> None:
        self._jobs: Jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._at: list[asyncio.Future[Any] | None] = [None]  # whose outcome the thread works at

    async def call(self, name: str, function: Callable[..., Any], columns: Mapping[str, Any], timeout_s: float) -> Any:
        """What the reward ``name`` gives for ``columns``. Raises what it raises, as RuntimeError where it would mean
        something to the loop or end the run, and RewardTimeout after ``timeout_s`` seconds."""
        try:
            async with asyncio.timeout(timeout_s) as bound:
                if inspect.iscoroutinefunction(function):
                    return await function(**columns)
                returned = await self.run(function, **columns)  # an awaitable when an async object was called
                return await returned if inspect.isawaitable(returned) else returned
        except SystemExit as error:  # it ends its call, not the run
            raise RuntimeError(f"reward function {name!r} called sys.exit({error.code!r})") from error
        except TimeoutError:
            if bound.expired():
                raise RewardTimeout(f"no score within {timeout_s:g} s (limits.reward_timeout_s)") from None
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, Exception) or (task is not None and task.cancelling()):
                raise  # the latter is Ctrl-C, or whoever waits for us has given up
            raise harmless(error) from error

    async def run(self, function: Callable[..., Any], **kwargs: Any) -> Any:
        """Awaits ``function(**kwargs)`` and returns, or raises, what it does. Where the waiting is cancelled while it
        runs, it is left alone: the processes it started are killed, and what comes next gets another thread."""
        if self._thread is None:
            self._begin()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.put((function, kwargs, loop, future))
        try:
            return await future
        finally:
            if future.cancelled() and self._at[0] is future:
                self._abandon()

    def _begin(self) -> None:
        arguments = (self._jobs, self._at)
        self._thread = threading.Thread(target=_serve, args=arguments, name="palestra-reward", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None)

    def _abandon(self) -> None:
        hung, thread = self._jobs, self._thread
        self._jobs, self._thread, self._at = queue.SimpleQueue(), None, [None]
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.put(hung.get_nowait())
        hung.put(None)
        if thread is not None:
            end_children(thread)
        if not self._jobs.empty():
            self._begin()


def _serve(jobs: Jobs, at: list[asyncio.Future[Any] | None]) -> None:
    while (job := jobs.get()) is not None:
        function, kwargs, loop, future = job
        if future.done():  # nobody waits for it any more
            continue
        at[0] = future
        try:
            outcome: tuple[Any, BaseException | None] = (function(**kwargs), None)
        except BaseException as error:
            outcome = (None, error)
        at[0] = None
        # The loop may have been closed by Ctrl-C while the function ran: then nobody waits for the outcome.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, future, *outcome)
        del job, function, kwargs, future, outcome  # what it was about must not live until the next job


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(harmless(error))


__all__ = ["TIMEOUT_S", "RewardTimeout", "Worker"]
