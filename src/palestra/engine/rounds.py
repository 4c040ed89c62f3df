# SPDX-License-Identifier: Apache-2.0
"""A fixed schedule for engines whose numbers depend on who else is in the batch: sampling in rounds.

A round begins when every episode under way has asked for a completion; until then all wait, also for the slowest tool.
Its requests reach the engine together, in the order in which the episodes began. So which rows meet in a forward pass
follows from the seeds alone, as long as all episodes begin together and no clock ends one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from palestra.engine.base import Completion, Engine, SamplingParams
from palestra.types import IntArray

T = TypeVar("T")


class Rounds:
    """An engine that is used from episodes, by :meth:`play`; what those sample goes to ``engine`` in rounds.

    >>> from palestra.engine.scripted import ScriptedEngine
    >>> from palestra.model.testing import ByteTokenizer
    >>> Rounds(ScriptedEngine(["7"], ByteTokenizer())).version
    0
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._begun = 0
        self._playing: set[int] = set()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def max_context(self) -> int:
        return self.engine.max_context

    async def play(self, episode: Callable[[Engine], Awaitable[T]]) -> T:
        """Play one episode, which samples from the engine that it is given."""
        number, self._begun = self._begun, self._begun + 1
        self._playing.add(number)
        try:
            return await episode(_Seat(self, number))
        finally:
            self._playing.discard(number)
            self._begin_round()

    async def sample(self, prompt: IntArray, params: SamplingParams, *, session: str) -> Completion:
        """Outside of an episode: a request of its own, at once."""
        return await self.engine.sample(prompt, params, session=session)

    def release(self, session: str) -> None:
        self.engine.release(session)

    def load_weights(self, policy: Any, version: int) -> None:
        self.engine.load_weights(policy, version)

    def close(self) -> None:
        self.engine.close()

    async def wait(self, number: int) -> None:
        """Until the round of this episode's request begins."""
        turn = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._begin_round()
        try:
            await turn
        finally:
            self._waiting.pop(number, None)

    def _begin_round(self) -> None:
        """Soon, when the last to ask waits like the others: a turn that came before it waits would be out of order."""
        if self._waiting and self._waiting.keys() == self._playing:
            asyncio.get_running_loop().call_soon(self._give_turns)

    def _give_turns(self) -> None:
        if self._waiting.keys() != self._playing:
            return
        for number in sorted(self._waiting):  # they go on in this order, within one turn of the event loop
            if not (turn := self._waiting.pop(number)).done():
                turn.set_result(None)


class _Seat:
    """The engine as one episode sees it."""

    def __init__(self, rounds: Rounds, number: int) -> None:
        self._rounds, self._number = rounds, number

    @property
    def version(self) -> int:
        return self._rounds.version

    @property
    def max_context(self) -> int:
        return self._rounds.max_context

    async def sample(self, prompt: IntArray, params: SamplingParams, *, session: str) -> Completion:
        await self._rounds.wait(self._number)
        return await self._rounds.sample(prompt, params, session=session)

    def release(self, session: str) -> None:
        self._rounds.release(session)

    def load_weights(self, policy: Any, version: int) -> None:
        self._rounds.load_weights(policy, version)

    def close(self) -> None:
        self._rounds.close()


__all__ = ["Rounds"]
