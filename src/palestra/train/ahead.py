# SPDX-License-Identifier: Apache-2.0
"""Episodes of the steps to come, played while those before them are learned from (``train.max_staleness`` > 0).

The batch of step n (counted from 0) is sampled by version max(0, n − k) of the policy, where k is ``max_staleness``.
That is a rule and not a race: what a run samples follows from its seed, whoever is faster. It holds because batches are
collected one after another, and the engine gets new weights between two of them and never within one.

What the checkpoint before step n needs is then known as well: the batches that older weights were to sample, and where
it was written before those were complete, the older weights themselves.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor, nn

from palestra.data.source import Cursor
from palestra.engine.local import LocalEngine
from palestra.train.groups import Collected

T = TypeVar("T")
Collect = Callable[[int, Cursor], Coroutine[Any, Any, Collected]]
"""(step, where its tasks begin) → its batch."""


class Ahead:
    """The batches of a run, in order. ``lag`` 0: each is collected when its step asks for it, and nothing else happens
    meanwhile; what is said below of what goes on beside one another is about a lag above 0.

    steps: of the run; nothing is collected beyond. model: what trains. engine: samples from its own copy of what
    trains, or with ``lag`` 0 from the model. No two methods may run at once.
    """

    def __init__(self, lag: int, steps: int, collect: Collect, engine: LocalEngine, model: nn.Module) -> None:
        self._lag, self._steps = lag, steps
        self._collect, self._engine, self._model = collect, engine, model
        self._batches: deque[Collected | asyncio.Task[Collected]] = deque()
        self._first = 0  # no batch is sampled by an older version
        self._next, self._end = 0, 0  # the step whose batch begins next; the one at which none begins
        self._cursor = Cursor()
        self._playing = False
        self._still: int | None = 0  # the version that the model holds; None while that changes
        self._held: dict[int, Mapping[str, Tensor]] = {}  # weights by version, until the engine takes them

    @property
    def learning(self) -> bool:
        """Whether the model may be changing at this moment."""
        return self._still is None

    # One step --------------------------------------------------------------------------------------------------

    async def take(self, step: int, cursor: Cursor) -> Collected:
        """The batch of the step that comes now. cursor: where its tasks begin. Raises here what its collection raised,
        whenever that was."""
        if not self._lag:
            return await self._collect(step, cursor)
        self._end = self._steps
        self._begin()
        return await _outcome(self._batches[0])

    async def learn(self, step: int, work: Callable[[], T]) -> T:
        """``work()``, which learns from the batch that was taken, on a thread of its own: episodes go on meanwhile.

        A cancellation strikes behind it, for half an update is no step; a second one strikes at once.
        """
        if not self._lag:
            return work()
        wanted = {self._version(s) for s in range(self._next, min(step + self._lag + 1, self._steps))}
        if step in wanted and self._engine.version != step:
            self._held[step] = {name: p.detach().clone() for name, p in _trained(self._model)}
        self._still = None
        try:
            result = await _beside(work)
        except Exception:
            self._still = step  # the thread has ended
            raise
        self._batches.popleft()
        self._still = step + 1
        return result

    async def settle(self, step: int) -> None:
        """Wait until nothing is under way and nothing is left to be sampled by weights older than version ``step``, the
        present one, which the engine has afterwards. The next :meth:`take` lets things go on."""
        if not self._lag:
            return
        self._end = min(step + self._lag, self._steps) if step > self._first else self._next
        self._begin()
        while self._playing:
            await _outcome(self._batches[-1])
        self._engine.load_weights(self._model, step)

    async def close(self) -> None:
        """End what is under way; whole batches stay for :meth:`state`."""
        tasks = [batch for batch in self._batches if isinstance(batch, asyncio.Task)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Checkpoints -----------------------------------------------------------------------------------------------

    def state(self, step: int) -> dict[str, Any] | None:
        """For the checkpoint before ``step``: the batches that are whole and, where others still need weights older
        than the checkpoint's, those that train. Settled, there are none. None where ``lag`` is 0."""
        if not self._lag:
            return None
        whole = [found for batch in self._batches if (found := _whole(batch)) is not None]
        missing = {self._version(s) for s in range(step + len(whole), min(step + self._lag, self._steps))}
        weights = {version: self._weights(version) for version in sorted(missing) if version < step}
        return {"lag": self._lag, "first": self._first, "batches": [b.to_dict() for b in whole], "weights": weights}

    def restore(self, state: Mapping[str, Any] | None, step: int, cursor: Cursor) -> Collected | None:
        """Go on before ``step``, whose tasks begin at ``cursor``; returns the last batch that is there already. Where
        the state is of another lag its batches are dropped, and none is sampled by older weights than the present."""
        self._next, self._still, self._cursor, self._first = step, step, cursor, step
        if state is None or state["lag"] != self._lag:
            return None
        self._first = state["first"]
        self._held = dict(state["weights"])
        batches = [Collected.from_dict(batch) for batch in state["batches"]]
        self._batches = deque(batches)
        self._next += len(batches)
        if not batches:
            return None
        self._cursor = batches[-1].cursor
        return batches[-1]

    # What begins when -------------------------------------------------------------------------------------------

    def _version(self, step: int) -> int:
        """By which the batch of a step is sampled."""
        return max(self._first, step - self._lag)

    def _weights(self, version: int) -> dict[str, Tensor]:
        """Of an older version that a batch still needs: put aside, or what the engine has."""
        if (held := self._held.get(version)) is not None:
            return dict(held)
        assert self._engine.version == version
        return self._engine.weights(name for name, _ in _trained(self._model))

    def _begin(self) -> None:
        """Let the next batch begin, if none is under way and its weights are at hand."""
        step, version = self._next, self._version(self._next)
        if self._playing or step >= self._end:
            return
        weights: Any = self._held.pop(version, None)
        if weights is None and version != self._engine.version:
            if version != self._still:
                return  # these weights are still being learned
            weights = self._model
        began = time.perf_counter()
        self._engine.load_weights(weights, version)  # the same ones as well: no batch sees keys of another's
        sync_s = time.perf_counter() - began
        self._playing, self._next = True, step + 1
        self._batches.append(asyncio.get_running_loop().create_task(self._play(step, self._cursor, sync_s)))

    async def _play(self, step: int, cursor: Cursor, sync_s: float) -> Collected:
        found = await self._collect(step, cursor)  # where that fails, nothing begins behind it
        self._playing, self._cursor = False, found.cursor
        self._begin()
        return replace(found, timings={**found.timings, "time/sync_s": sync_s})


async def _outcome(batch: Collected | asyncio.Task[Collected]) -> Collected:
    """Wait for a batch, and leave it running where the waiting is cancelled."""
    if isinstance(batch, Collected):
        return batch
    await asyncio.wait({batch})
    return batch.result()


def _whole(batch: Collected | asyncio.Task[Collected]) -> Collected | None:
    if isinstance(batch, Collected):
        return batch
    failed = not batch.done() or batch.cancelled() or batch.exception() is not None
    return None if failed else batch.result()


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


async def _beside(work: Callable[[], T]) -> T:
    """``work()`` on a thread of its own. Cancelled, this ends behind it, and the cancellation strikes at the next
    ``await``; cancelled again, at once."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # carried over to the loop, which raises it
            outcome.set_exception(error)

    threading.Thread(target=run, name="palestra-learner", daemon=True).start()
    waiting, cancelled = asyncio.wrap_future(outcome), False
    while not waiting.done():
        try:
            await asyncio.wait({waiting})
        except asyncio.CancelledError:
            if cancelled:
                raise
            cancelled = True
    result = waiting.result()
    task = asyncio.current_task()
    if cancelled and task is not None:
        task.uncancel()
        task.cancel()
    return result


__all__ = ["Ahead"]
