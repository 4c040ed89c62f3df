# SPDX-License-Identifier: Apache-2.0
"""Where environments run: plain methods on a thread of their episode's own, async ones on an event loop beside ours.

Whatever an environment does there (block, stop or close its loop, raise KeyboardInterrupt, swallow a cancellation)
the loop that drives the engine goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import os
import queue
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from palestra.env.threads import end_children, harmless, message_of

_Job = Callable[[], None]
_Outcome = tuple[Any, BaseException | None]

GRACE_S = 1.0
"""How long a cancelled call may take to end before it is left alone."""


class EnvThread:
    """Runs the methods of one environment.

    Plain (blocking) methods all run on the same daemon thread, so things that belong to the thread that made them (a
    SQLite connection, a browser) work. It starts with the first call, so an async environment has none: its methods
    run on the event loop that all async environments share, which is not the caller's.

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
        self._thread: threading.Thread | None = None

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run ``function()`` there, await what it returns if that is awaitable, and hand over the result; what it
        raises is raised here, as RuntimeError where it would mean something to the loop.

        When the waiting is cancelled the call is given up and its result dropped. Processes that the thread started
        are killed; it ends once the call returns, if ever; the next call gets a new one.
        """
        if inspect.iscoroutinefunction(function):
            return await SideLoop.shared().run(function)
        result = await self._on_thread(function)
        return await SideLoop.shared().run(lambda: result) if inspect.isawaitable(result) else result

    async def _on_thread(self, function: Callable[[], Any]) -> Any:
        waiting = _Waiting()
        context = contextvars.copy_context()

        def job() -> None:
            try:
                outcome: _Outcome = (context.run(function), None)
            except BaseException as error:  # carried over to the waiting task, which raises it
                outcome = (None, error)
            waiting.deliver(outcome)

        self._started().put(job)
        try:
            return await waiting.result()
        except asyncio.CancelledError:
            if self._thread is not None:
                end_children(self._thread)
            self.close()
            raise

    def close(self) -> None:
        """Let the thread end after what it is doing; processes that were started on it and are left end with it."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None

    def _started(self) -> queue.SimpleQueue[_Job | None]:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name="palestra-env", daemon=True)
            self._thread.start()
        return self._jobs


class SideLoop:
    """An event loop on a daemon thread, for the coroutines of environments.

    One that is stopped from within is started again. One that is found blocked is given up: what waits for it fails,
    as an outage, and later calls get another.

    >>> async def main():
    ...     async def where(): return threading.current_thread().name
    ...     return await SideLoop.shared().run(where)
    >>> asyncio.run(main())
    'palestra-env-loop'
    """

    _current: SideLoop | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._waiting: set[_Waiting] = set()
        self._lost, self._process = False, os.getpid()
        threading.Thread(target=self._serve, name="palestra-env-loop", daemon=True).start()

    @classmethod
    def shared(cls) -> SideLoop:
        """The one in use; a new one where there is none that works (a fork takes no thread along)."""
        with cls._lock:
            now = cls._current
            if now is None or now._lost or now._loop.is_closed() or now._process != os.getpid():
                now = cls._current = cls()
            return now

    async def run(self, function: Callable[[], Awaitable[Any]]) -> Any:
        """Await ``function()`` on that loop. Cancelled, it is cancelled there, and left alone after ``GRACE_S``."""
        waiting = _Waiting()
        context = contextvars.copy_context()
        tasks: list[asyncio.Task[None]] = []

        async def work() -> None:
            try:
                outcome: _Outcome = (await function(), None)
            except BaseException as error:
                outcome = (None, error)
            waiting.deliver(outcome)

        def start() -> None:
            tasks.append(self._loop.create_task(work(), context=context))

        self._waiting.add(waiting)
        self._post(start)
        try:
            return await waiting.result()
        except asyncio.CancelledError:
            self._post(lambda: [task.cancel() for task in tasks])
            await self._ended(waiting)
            raise
        finally:
            self._waiting.discard(waiting)

    async def _ended(self, waiting: _Waiting) -> None:
        """Wait a moment for a cancelled call to end. When not even a call of ours gets through, the loop is lost."""
        pong = _Waiting()
        self._post(lambda: pong.deliver((None, None)))
        await asyncio.wait({waiting.done, pong.done}, timeout=GRACE_S, return_when=asyncio.FIRST_EXCEPTION)
        if pong.done.done() or self._lost:
            return
        self._lost = True
        self._post(self._loop.stop)
        self._fail(self._waiting - {waiting}, "was blocked by one of them")

    def _post(self, job: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(job)
        except RuntimeError:  # closed, by whatever ran on it
            self._fail(self._waiting, "was closed by one of them")

    def _fail(self, those: Iterable[_Waiting], why: str) -> None:
        lost = RuntimeError(f"the event loop of the environments {why}; it has been replaced")
        for waiting in tuple(those):
            waiting.deliver((None, lost))

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._loop.is_closed() and not self._lost:
            with contextlib.suppress(BaseException):  # SystemExit in a callback: the loop goes on
                self._loop.run_forever()
        self._fail(self._waiting, "was closed by one of them")
        if not self._loop.is_closed():
            self._abandon(asyncio.all_tasks(self._loop))
            self._loop.close()

    def _abandon(self, tasks: set[asyncio.Task[Any]]) -> None:
        """What is left on a lost loop may end; what does not is dropped."""
        for task in tasks:
            task.cancel()
        if tasks:
            with contextlib.suppress(BaseException):
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=GRACE_S))


class _Waiting:
    """An outcome that another thread delivers to the loop which made this."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[_Outcome] = self._loop.create_future()

    def deliver(self, outcome: _Outcome) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._set, outcome)

    async def result(self) -> Any:
        """The value, or what was raised. SystemExit in an environment ends its episode, not the run."""
        await asyncio.wait({self.done})  # unlike a plain await, this leaves the outcome receivable when cancelled
        value, error = self.done.result()
        if error is None:
            return value
        error = harmless(error)
        if isinstance(error, Exception):
            raise error
        raise RuntimeError(f"{type(error).__name__}: {message_of(error)}") from error

    def _set(self, outcome: _Outcome) -> None:
        if not self.done.done():
            self.done.set_result(outcome)


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
    end_children(threading.current_thread())  # once the thread is gone, nobody knows whose they are
