# SPDX-License-Identifier: Apache-2.0
"""The in-process engine: any Hugging Face causal LM, on the trainer's own parameters.

Requests join and leave between forward passes (continuous batching); a session's keys stay for its next
turn; the members of a group fill their prompt once. One thread owns the engine; callers are coroutines.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from palestra.config import Config
from palestra.engine import graphs, outcome
from palestra.engine.attending import SlotPlan
from palestra.engine.base import Completion, SamplingParams
from palestra.engine.flat import flatten
from palestra.engine.packing import pack_linears
from palestra.engine.rows import Rows
from palestra.engine.sampling import sample, uniform
from palestra.engine.scheduler import Decode, Request, Schedule, Scheduler
from palestra.engine.skeleton import copy_weights, skeleton
from palestra.engine.stats import EngineStats
from palestra.engine.stops import StopFinder
from palestra.engine.store import ROW_MULTIPLE, SlotStore, round_up
from palestra.errors import ConfigError, EngineError
from palestra.model import attention
from palestra.types import IntArray


class EngineConfig(Config):
    """Options of the in-process engine.

    dtype: ``auto`` samples on the trainer's own parameters; another dtype keeps a converted copy (kernels on a CPU read
    bfloat16 weights at the speed of float32 or faster, and round nothing else).
    max_rows: generations that run at once. max_sessions: episodes whose keys are kept between turns.
    prefill_tokens: prompt tokens per forward pass. max_context: tokens per sequence (None = the model's).
    pack_weights: keep large weights once more in the layout that the CPU multiplies fastest (memory for speed; it does
    nothing elsewhere than on a CPU). max_draft: tokens guessed ahead at most, from what was written before; where a
    row's bits do not depend on its neighbours this changes the speed alone (None = 8 on a CPU, 0 elsewhere).
    on_update: what happens to generations in flight when weights change – finish first, recompute their keys
    and go on, or keep the old keys and go on (each new version opens a new span either way).
    """

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_rows: int = Field(default=256, ge=1)
    max_sessions: int = Field(default=256, ge=1)
    prefill_tokens: int = Field(default=4096, ge=1)
    max_context: int | None = Field(default=None, ge=2)
    pack_weights: bool = True
    max_draft: int | None = Field(default=None, ge=0, le=64)
    on_update: Literal["finish", "recompute", "keep"] = "finish"


@dataclass(slots=True)
class _Inbox:
    """What callers hand to the engine's thread."""

    requests: list[Request] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    guests: int = 0
    announced: bool = False
    closed: bool = False


class LocalEngine:
    """An :class:`~palestra.engine.base.Engine` on a Hugging Face causal LM in this process.

    model: the trainer's model (plain or with a PEFT adapter); the engine makes a skeleton over the *same*
    parameters with its own mode and attention function. decode: token ids → text, used for stop strings only. apart:
    copy the parameters that train, so that they stay as ``load_weights`` took them while the trainer changes its own.
    Raises ModelError for families whose layers do not all attend through transformers' interface.
    """

    def __init__(
        self,
        model: nn.Module,
        decode: Callable[[Sequence[int]], str],
        config: EngineConfig | None = None,
        *,
        version: int = 0,
        apart: bool = False,
    ) -> None:
        self.config = config or EngineConfig()
        self._decode, self._version = decode, version
        self._model = skeleton(model, self.config.dtype, apart=apart)
        self._flat = flatten(self._model) if self.config.pack_weights else None
        packs = self._flat is None and self.config.pack_weights
        self._packed = pack_linears(self._model) if packs else []
        self._device = next(self._model.parameters()).device
        text_config = attention.hf_model(self._model).config.get_text_config()
        self._max_context = self.config.max_context or int(text_config.max_position_embeddings)
        self._store = SlotStore()
        record = graphs.recorder(self._device)
        self._graphs = None if record is None else graphs.DecodeGraphs(self._model, self._store, record)
        drafts = self.config.max_draft
        self._scheduler = Scheduler(
            max_rows=self.config.max_rows,
            max_slots=max(self.config.max_sessions, self.config.max_rows),
            prefill_tokens=self.config.prefill_tokens,
            max_draft=drafts if drafts is not None else 8 if self._device.type == "cpu" else 0,
            max_context=self._max_context,
        )
        self._stats = EngineStats()
        self._inbox = _Inbox()
        self._wake = threading.Condition()
        self._stepping = threading.Lock()
        self._thread: threading.Thread | None = None

    # What callers see ------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_context(self) -> int:
        return self._max_context

    async def sample(self, prompt: IntArray, params: SamplingParams, *, session: str) -> Completion:
        """Sample one completion of ``prompt`` (int32[n], 1 ≤ n < max_context). Cancelling the task frees the row.

        Raises ConfigError for a prompt that does not fit, EngineError when the forward pass fails.
        """
        if not 0 < len(prompt) < self._max_context:
            raise ConfigError(f"a prompt of {len(prompt)} tokens does not fit a context of {self._max_context}")
        loop = asyncio.get_running_loop()
        finder = StopFinder(self._decode, params.stop) if params.stop else None
        request = Request(np.asarray(prompt, np.int32), params, session, loop.create_future(), loop, finder)
        with self._wake:
            if self._inbox.closed:
                raise EngineError("the engine is closed")
            self._inbox.requests.append(request)
            if not self._inbox.announced:
                # Wake the thread once this round of the event loop has submitted everything it has.
                self._inbox.announced = True
                loop.call_soon(self._announce)
        try:
            return await request.future
        except asyncio.CancelledError:
            request.cancelled = True
            raise

    def release(self, session: str) -> None:
        with self._wake:
            self._inbox.released.append(session)

    def load_weights(self, policy: Any, version: int) -> None:
        """Sample from ``policy``'s weights as ``version`` from now on; older keys are not used again.

        policy: the model, or what :meth:`weights` of it gave; None: the weights that are here already.
        """
        with self._between_steps():
            if self.config.on_update == "finish":
                self._take_inbox()
                while self._scheduler:
                    self._step()
            copy_weights(policy, self._model)
            for copies in self._packed if self._flat is None else [self._flat]:
                copies.forget()
            self._version = version
            self._scheduler.invalidate()
            if self.config.on_update == "recompute":
                self._scheduler.recompute()

    def weights(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Copies of the parameters of these names, as they are sampled from."""
        with self._between_steps():
            own = dict(self._model.named_parameters())
            return {name: own[name].detach().clone() for name in names}

    def take_stats(self) -> EngineStats:
        """Timings and counts since the last call."""
        with self._between_steps():
            stats, self._stats = self._stats, EngineStats()
        return stats

    def stop_guessing(self) -> None:
        """Decode one row per token from now on, so that passes do not depend on what was written before."""
        self._scheduler.max_draft = 0

    def close(self) -> None:
        """Stop the thread; generations in flight end with an EngineError."""
        with self._wake:
            self._inbox.closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    # The engine's own thread -----------------------------------------------------------------------------

    def _announce(self) -> None:
        with self._wake:
            self._inbox.announced = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="palestra-engine", daemon=True)
                self._thread.start()
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(self._has_work)
                if self._inbox.closed:
                    break
            with self._stepping:
                self._take_inbox()
                try:
                    self._step()
                except Exception as error:
                    self._fail(error)
        self._fail(EngineError("the engine was closed"))

    def _has_work(self) -> bool:
        inbox = self._inbox
        asked = bool(inbox.requests) and not inbox.announced  # an idle engine waits for the whole round of the loop
        return inbox.closed or (not inbox.guests and (asked or bool(self._scheduler)))

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Hold the engine still. Its thread makes way: a lock alone it would take again before anyone else could."""
        with self._wake:
            self._inbox.guests += 1
        try:
            with self._stepping:
                yield
        finally:
            with self._wake:
                self._inbox.guests -= 1
                self._wake.notify()

    def _take_inbox(self) -> None:
        with self._wake:
            requests, self._inbox.requests = self._inbox.requests, []
            released, self._inbox.released = self._inbox.released, []
        for session in released:
            self._scheduler.release(session)
        self._scheduler.waiting.extend(requests)

    def _step(self) -> None:
        """One tick: schedule, run, sample, collect."""
        with self._stats.timed("schedule_s"):
            schedule = self._scheduler.next()
        began = time.perf_counter()
        logits = self._forward(schedule)
        filled = sum(end - start for _, start, end in schedule.fills)
        self._stats.ran(time.perf_counter() - began, filled, schedule.decode_rows)
        if schedule.decodes:
            with self._stats.timed("sample_s"):
                picks = self._sample(schedule, logits)
            with self._stats.timed("collect_s"):
                self._collect(schedule.decodes, *picks)

    @torch.inference_mode()
    def _forward(self, schedule: Schedule) -> Tensor:
        """Run the rows of a schedule; returns the logits (N, V) of its decode rows."""
        slots = [*(s for s, _, _ in schedule.fills), *(r.slot for r in schedule.sampling)]
        # A slot may be given keys now and its own tokens in a later pass, when there is room for them.
        touched = [*slots, *(target for _, target, _, _ in schedule.copies)]
        if touched:
            ahead = max((len(d.draft) for d in schedule.decodes), default=0)
            self._store.reserve(1 + max(s.number for s in touched), 1 + ahead + max(len(s.tokens) for s in touched))
        for source, target, start, end in schedule.copies:
            self._store.copy(source.number, target.number, start, end)
        if not slots:
            return torch.empty(0)
        rows = Rows(schedule, self._device)
        logits = self._logits(schedule, rows)
        for slot, _, end in schedule.fills:
            slot.cached = end
        self._stats.passes += 1
        self._stats.prefill_tokens += sum(end - start for _, start, end in schedule.fills)
        self._stats.decode_rows += schedule.decode_rows
        self._stats.draft_rows += schedule.decode_rows - len(schedule.decodes)
        return logits

    def _logits(self, schedule: Schedule, rows: Rows) -> Tensor:
        """A forward pass, in the quickest way that there is for it."""
        if self._flat is not None:
            return self._flat(rows, self._store)
        replayed = None if self._graphs is None else self._graphs(schedule, rows)
        if replayed is not None:
            return replayed
        logits: Tensor = self._model(
            input_ids=rows.tokens[None],
            position_ids=rows.positions[None],
            use_cache=False,
            logits_to_keep=rows.decoded,
            plan=SlotPlan(self._store, rows),
        ).logits[0]
        return logits

    @torch.inference_mode()
    def _sample(self, schedule: Schedule, logits: Tensor) -> tuple[list[int], list[float], list[float] | None]:
        ways: dict[tuple[object, ...], int] = {}  # (row, how it is sampled) → row of what is worked out once
        rows: list[int] = []
        params: list[SamplingParams] = []
        picks: list[tuple[int, int, int]] = []  # row of those, seed, number of the token
        first = 0
        for decode in schedule.decodes:  # twins: the same logits, each with noise of its own
            for request in decode.twins:
                p = request.params
                for i in range(decode.rows):
                    at = ways.setdefault((first + i, p.temperature, p.top_k, p.top_p, p.min_p), len(rows))
                    if at == len(rows):
                        rows.append(first + i)
                        params.append(p)
                    picks.append((at, p.seed, request.sampled + i))
            first += decode.rows
        # Spare rows are sampled too and thrown away: with a single row torch splits the sum over the vocabulary
        # between threads, and the last bit would depend on who else is in the batch.
        spare = round_up(len(rows), ROW_MULTIPLE) - len(rows)
        rows, params = rows + rows[:1] * spare, params + params[:1] * spare
        if rows != list(range(len(logits))):
            logits = logits[torch.tensor(rows, device=logits.device)]
        of, seeds, counters = np.array(picks, np.uint64).T
        return sample(logits, params, uniform(seeds, counters), of.astype(np.int64))

    def _collect(
        self, decodes: list[Decode], tokens: list[int], logprobs: list[float], kept: list[float] | None
    ) -> None:
        """Append what was sampled, as far as the guesses before it hold, and end the requests that are complete."""
        given: list[tuple[Request, list[int], str | None]] = []
        first = 0
        for decode in decodes:
            for request in decode.twins:
                mine: list[int] = []
                reason = None
                for i, guess in enumerate([*decode.draft, None], start=first):
                    mine.append(tokens[i])
                    request.logprobs.append(logprobs[i])
                    request.versions.append(self._version)
                    if kept is not None:
                        request.kept.append(kept[i])
                    reason = self._finish_reason(request, mine)
                    if reason is not None or tokens[i] != guess:
                        break
                given.append((request, mine, reason))
                first += decode.rows
        self._scheduler.append((request, mine) for request, mine, _ in given)
        self._stats.decode_tokens += sum(len(mine) for _, mine, _ in given)
        self._stats.guessed_tokens += sum(len(mine) - 1 for _, mine, _ in given)
        for request, _, reason in given:
            if reason is not None:
                said = outcome.completion(request, reason, self._decode)  # first: finishing may empty the slot
                self._scheduler.finish(request)
                outcome.resolve(request, said)

    def _finish_reason(self, request: Request, fresh: list[int]) -> str | None:
        """Whether the last of the tokens that a pass gave a request ends it."""
        if fresh[-1] in request.params.stop_token_ids:
            return "eos"
        if request.stops is not None and request.stops.push(fresh[-1]):
            return "stop"
        full = len(request.slot.tokens) + len(fresh) >= self._max_context
        return "length" if full or request.sampled + len(fresh) >= request.params.max_new_tokens else None

    def _fail(self, error: Exception) -> None:
        """Nothing may wait for ever: every request learns of the failure, and caches are dropped."""
        self._take_inbox()
        scheduler = self._scheduler
        for request in [*scheduler.active, *scheduler.waiting]:
            failure = EngineError(f"generation failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            outcome.reject(request, failure)
        scheduler.waiting.clear()
        for request in list(scheduler.active):
            scheduler.finish(request)
        scheduler.invalidate()
