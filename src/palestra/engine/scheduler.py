# SPDX-License-Identifier: Apache-2.0
"""Which requests run in the next forward pass, and which slot each lives in. Policy only: no tensors.

Every request feeds its last known token through a decode row; what lies before it and is not cached is
prefilled without computing logits. A request takes over whatever prefix any slot already holds: the members of
a group fill their prompt once, all tasks fill a common system prompt once, and a follow-up turn only fills what
the environment added. Requests whose whole context is the same, token for token, are *twins*: one decode row serves
them until their noise parts them. Tokens that are guessed from what was written before (`drafts.py`) get rows of their
own, so that a pass may sample several tokens of one request.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from palestra.engine.base import Completion, SamplingParams
from palestra.engine.drafts import Drafts
from palestra.engine.stops import StopFinder
from palestra.types import IntArray

WORTH_WAITING = 8
"""Tokens that another slot must be about to hold for a request to wait one pass and copy them."""
DRAFT_ROWS = 128
"""Passes with fewer decode rows than this have room for guesses: a product with more rows takes longer in proportion,
so a wrong guess costs a token's time; with fewer, a row is cheaper than a pass of its own."""
HEAD = 32
"""Prompts that agree in their first tokens, this many, are looked at for a longer common prefix."""


def _head(tokens: IntArray) -> bytes:
    return tokens[:HEAD].tobytes()


@dataclass(slots=True, eq=False)
class Slot:
    """A place in the store. ``tokens[:cached]`` are the tokens whose keys it holds; ``stale``: some of them by
    older weights, for the generation under way only. ``origin`` still holds the first ``shared`` of these keys, which
    were copied from there."""

    number: int
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    session: str | None = None
    busy: bool = False
    stale: bool = False
    origin: Slot | None = None
    shared: int = 0

    def shared_prefix(self, tokens: IntArray) -> int:
        """How many leading tokens of ``tokens`` this slot already holds."""
        return min(self.cached, self.planned_prefix(tokens))

    def planned_prefix(self, tokens: IntArray) -> int:
        """How many leading tokens of ``tokens`` it holds or is about to be filled with."""
        n = min(len(self.tokens), len(tokens))
        if not n or self.tokens[0] != tokens[0]:
            return 0
        same = np.asarray(self.tokens[:n], np.int32) == tokens[:n]
        return n if same.all() else int(same.argmin())


@dataclass(slots=True, eq=False)
class Request:
    """One generation under way. ``sampled`` counts the tokens at the end of ``slot.tokens`` that are ours; requests
    with the same ``context`` have the same tokens in their slots."""

    prompt: IntArray
    params: SamplingParams
    session: str
    future: asyncio.Future[Completion]
    loop: asyncio.AbstractEventLoop
    stops: StopFinder | None
    slot: Slot = field(default_factory=lambda: Slot(-1))
    sampled: int = 0
    logprobs: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cancelled: bool = False
    context: int = -1

    @property
    def pending(self) -> int:
        """Tokens that are known but not cached; the last of them is fed through a decode row."""
        return len(self.slot.tokens) - self.slot.cached


@dataclass(slots=True)
class Decode:
    """Twins that get one token from the row of their last known one, and one more from the row of each token of
    ``draft`` that they turn out to sample."""

    twins: list[Request]
    draft: list[int] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return 1 + len(self.draft)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One forward pass: keys to copy first as (from, to, first position, end), prefill segments as (slot, first
    position, end), and what decodes."""

    fills: list[tuple[Slot, int, int]]
    decodes: list[Decode]
    copies: list[tuple[Slot, Slot, int, int]]

    @property
    def sampling(self) -> list[Request]:
        """The requests that get a token from this pass, in the order of their rows."""
        return [r for decode in self.decodes for r in decode.twins]

    @property
    def decode_rows(self) -> int:
        return sum(decode.rows for decode in self.decodes)


class Scheduler:
    """Admits requests into slots and picks the rows of each pass.

    max_rows: requests that run at once. max_slots: sessions whose keys are kept. prefill_tokens: at most this
    many prompt tokens per pass. max_draft: tokens that are guessed at most per request and pass.
    """

    def __init__(
        self, *, max_rows: int, max_slots: int, prefill_tokens: int, max_draft: int = 0, max_context: int = 1 << 31
    ) -> None:
        self.max_rows, self.max_slots, self.prefill_tokens = max_rows, max_slots, prefill_tokens
        self.max_draft, self.max_context = max_draft, max_context
        self.drafts = Drafts()
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        self.slots: list[Slot] = []
        self.sessions: OrderedDict[str, Slot] = OrderedDict()  # least recently used first
        self.places: dict[bytes, Slot] = {}  # tokens, or their head, → the slot that was last given them
        self._new_context = itertools.count()

    def __bool__(self) -> bool:
        return bool(self.waiting or self.active)

    def next(self) -> Schedule:
        """Admit what fits, then choose the rows of the next pass."""
        self._drop_cancelled()
        copies = list(self._admit())
        fills, budget = [], self.prefill_tokens
        for request in self.active:
            slot = request.slot
            if request.pending > 1 and budget > 0:
                end = min(len(slot.tokens) - 1, slot.cached + budget)
                fills.append((slot, slot.cached, end))
                budget -= end - slot.cached
        ready = sorted((r for r in self.active if r.pending == 1), key=lambda r: r.slot.number)
        twins: dict[int, list[Request]] = {}
        for request in ready:
            # Keys by older weights differ between slots that hold the same tokens.
            twins.setdefault(-1 - request.slot.number if request.slot.stale else request.context, []).append(request)
        decodes = [Decode(group) for group in twins.values()]
        if self.max_draft:
            self._guess(decodes)
        return Schedule(fills, decodes, copies)

    def append(self, sampled: Iterable[tuple[Request, Sequence[int]]]) -> None:
        """Give each request its tokens; twins that got the same ones stay twins."""
        following: dict[tuple[int, ...], int] = {}
        for request, tokens in sampled:
            way = (request.context, *tokens)
            if way not in following:
                following[way] = next(self._new_context)
            request.context = following[way]
            slot = request.slot
            slot.tokens += tokens
            slot.cached = len(slot.tokens) - 1  # the keys of all but the last were written by the pass
            request.sampled += len(tokens)
            if self.max_draft:
                self.drafts.learn(slot.tokens, len(tokens))

    def finish(self, request: Request) -> None:
        """The request is done; its session keeps the slot for the next turn."""
        self.active.remove(request)
        request.slot.busy = False
        del request.slot.tokens[request.slot.cached :]  # nobody fills these now: others must not wait for them
        if request.slot.session is None or request.slot.stale:
            self._forget(request.slot)

    def release(self, session: str) -> None:
        """The session is over. Its slot is free at once, or when the request in it ends."""
        slot = self.sessions.pop(session, None)
        if slot is not None:
            slot.session = None

    def invalidate(self) -> None:
        """The weights changed: nothing that is not being used right now may be reused."""
        self.places.clear()
        for slot in self.slots:
            if slot.busy:
                slot.stale = True
            else:
                self._forget(slot)

    def recompute(self) -> None:
        """Make the running requests fill their keys again under the new weights."""
        for request in self.active:
            self._keep(request.slot, 0)
            request.slot.stale = False

    def _guess(self, decodes: list[Decode]) -> None:
        """Add drafts while the pass stays within DRAFT_ROWS, every request's next token before anyone's second."""
        room = DRAFT_ROWS - len(decodes)
        if room <= 0:
            return
        guesses = []
        for decode in decodes:
            tokens = decode.twins[0].slot.tokens
            left = max(r.params.max_new_tokens - r.sampled for r in decode.twins) - 1
            most = min(self.max_draft, left, self.max_context - len(tokens) - 1)
            guesses.append(self.drafts.guess(tokens, most))
        for depth in range(self.max_draft):
            longer = [i for i, guess in enumerate(guesses) if len(guess) > depth][:room]
            for i in longer:
                decodes[i].draft.append(guesses[i][depth])
            room -= len(longer)

    def _admit(self) -> Iterator[tuple[Slot, Slot, int, int]]:
        later: deque[Request] = deque()
        unsampled = {r.prompt.tobytes(): r.context for r in self.active if not r.sampled}
        while self.waiting and len(self.active) < self.max_rows:
            request = self.waiting.popleft()
            last = len(request.prompt) - 1  # the last token always goes through a decode row
            source, ready, coming = self._best_prefix(request.prompt[:last], request.session)
            if coming - ready >= WORTH_WAITING:
                later.append(request)  # someone is filling what it needs: copy from there, next time
                continue
            slot = self._slot_for(request.session)
            if slot is None:
                later.append(request)
                break
            have = slot.shared_prefix(request.prompt[:last])
            self._keep(slot, have)
            slot.tokens, slot.busy = request.prompt.tolist(), True
            if source is not None and source is not slot and ready > have:
                slot.cached = ready
                if not have:
                    further = source.origin is not None and source.shared >= ready
                    slot.origin, slot.shared = source.origin if further else source, ready
                yield source, slot, have, ready
            self.places[request.prompt[:last].tobytes()] = self.places[_head(request.prompt)] = slot
            request.slot = slot
            request.context = unsampled.setdefault(request.prompt.tobytes(), next(self._new_context))
            self.active.append(request)
        self.waiting.extendleft(reversed(later))

    def _best_prefix(self, tokens: IntArray, session: str) -> tuple[Slot | None, int, int]:
        """The slot that holds the longest prefix of ``tokens``, how much it holds, and how much some slot will
        hold once it is filled. Looked for in the session's own slot, in the last one that was given the same
        tokens (a sibling), and in the last one that was given the same beginning (a common system prompt)."""
        best, ready, coming = None, 0, 0
        for slot in (self.sessions.get(session), self.places.get(tokens.tobytes()), self.places.get(_head(tokens))):
            if slot is None or slot.stale:
                continue
            planned = slot.planned_prefix(tokens)
            held = min(planned, slot.cached)
            coming = max(coming, planned)
            if held > ready:
                best, ready = slot, held
        return best, ready, coming

    def _slot_for(self, session: str) -> Slot | None:
        slot = self.sessions.get(session)
        if slot is None:
            slot = next((s for s in self.slots if s.session is None and not s.busy), None)
        if slot is None and len(self.slots) < self.max_slots:
            slot = Slot(len(self.slots) + 1)  # number 0 is the store's scratch slot
            self.slots.append(slot)
        if slot is None:
            oldest = next((name for name, s in self.sessions.items() if not s.busy), None)
            if oldest is None:
                return None
            slot = self.sessions.pop(oldest)
            self._forget(slot)
        if slot.busy:
            return None  # the session's previous request is still being wound up
        slot.session = session
        self.sessions[session] = slot
        self.sessions.move_to_end(session)
        return slot

    def _keep(self, slot: Slot, count: int) -> None:
        """Only the first ``count`` keys of the slot stay, for itself and for those that look at them here."""
        slot.cached, slot.shared = count, min(slot.shared, count)
        for other in self.slots:
            if other.origin is slot:
                other.shared = min(other.shared, count)

    def _forget(self, slot: Slot) -> None:
        self._keep(slot, 0)
        slot.tokens, slot.stale = [], False

    def _drop_cancelled(self) -> None:
        self.waiting = deque(r for r in self.waiting if not r.cancelled)
        for request in [r for r in self.active if r.cancelled]:
            self.finish(request)
