# SPDX-License-Identifier: Apache-2.0
"""Decode passes on a GPU, recorded once per shape and replayed.

A pass over a few dozen rows is hundreds of small operations, and launching each from Python takes longer than it runs.
A CUDA graph launches them all at once, but it always reads and writes the same memory: rows are copied into tensors of
a few fixed sizes, and what fills them up writes to the store's scratch slot and is thrown away.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from palestra.engine.attending import SlotPlan
from palestra.engine.rows import Block, Rows
from palestra.engine.scheduler import Schedule
from palestra.engine.store import SlotStore, round_up

KEYS, MAX_SHAPES = 128, 64
Replay = Callable[[], Tensor]
"""Does the recorded work again, on what its tensors hold by now; what it returns is overwritten by the next time."""
Recorder = Callable[[Callable[[], Tensor]], Replay]


class Shape(NamedTuple):
    """What a recorded pass is made for: rows, how often keys are written, and how many keys are looked at."""

    rows: int
    writes: int
    keys: int


class DecodeGraphs:
    """The passes of ``model`` over ``store`` in which nothing is filled and nothing is guessed."""

    def __init__(self, model: nn.Module, store: SlotStore, record: Recorder) -> None:
        self._model, self._store, self._record = model, store, record
        self._made: dict[Shape, tuple[_Fixed, Replay]] = {}
        self._room = (store.slots, store.capacity)
        self._works = True

    def __call__(self, schedule: Schedule, rows: Rows) -> Tensor | None:
        """The logits of the decode rows, or None for a pass that is not recorded."""
        if not self._works or schedule.fills or any(decode.draft for decode in schedule.decodes):
            return None
        if self._room != (self._store.slots, self._store.capacity) or len(self._made) >= MAX_SHAPES:
            self._made.clear()  # the keys that they read lie elsewhere by now
            self._room = (self._store.slots, self._store.capacity)
        shape = self._shape(schedule, rows)
        if shape not in self._made and not self._make(shape, rows):
            return None
        fixed, replay = self._made[shape]
        fixed.take(rows)
        return replay()[: len(rows.decoded)]

    def _shape(self, schedule: Schedule, rows: Rows) -> Shape:
        longest = max(len(request.slot.tokens) for request in schedule.sampling)
        keys = min(round_up(longest, KEYS), self._store.capacity)
        return Shape(_size(len(rows.tokens)), _size(len(rows.slots)), keys)

    def _make(self, shape: Shape, rows: Rows) -> bool:
        fixed = _Fixed(shape, rows.tokens.device)
        fixed.take(rows)
        try:
            self._made[shape] = fixed, self._record(lambda: self._pass(fixed))
        except RuntimeError as error:  # a model that asks the GPU something on the way, as mixtures of experts may
            self._works = False
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            warnings.warn(
                f"decode passes are launched one operation at a time, since no graph takes them: {why}", stacklevel=2
            )
        return self._works

    def _pass(self, fixed: _Fixed) -> Tensor:
        model: Any = self._model
        plan: Any = SlotPlan(self._store, fixed.rows())
        logits: Tensor = model(
            input_ids=fixed.tokens[None],
            position_ids=fixed.positions[None],
            use_cache=False,
            logits_to_keep=fixed.each,
            plan=plan,
        ).logits[0]
        return logits


@dataclass(frozen=True, slots=True)
class _FixedRows:
    """What an attention plan reads of a pass, made from tensors that stay where they are."""

    written: Tensor
    slots: Tensor
    places: Tensor
    blocks: list[Block]


class _Fixed:
    """Tensors of one shape. What no row fills is row 0 of the scratch slot."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        def zeros(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.long, device=device)

        self._keys = shape.keys
        self.tokens, self.positions, self._slot = zeros(shape.rows), zeros(shape.rows), zeros(shape.rows)
        self._written, self._slots, self._places = zeros(shape.writes), zeros(shape.writes), zeros(shape.writes)
        self.each = torch.arange(shape.rows, device=device)

    def take(self, rows: Rows) -> None:
        """Copy a pass in."""
        written = self.each[: len(rows.slots)] if rows.written is None else rows.written
        own = (self.tokens, self.positions, self._slot, self._written, self._slots, self._places)
        given = (rows.tokens, rows.positions, rows.slot, written, rows.slots, rows.places)
        for mine, new in zip(own, given, strict=True):
            mine[: len(new)].copy_(new)
            mine[len(new) :].zero_()

    def rows(self) -> Any:
        """The rows for a plan; masks are worked out anew in every pass."""
        block = Block(self._slot, self.each[:, None], self.positions[:, None], self._keys)
        return _FixedRows(self._written, self._slots, self._places, [block])


def _size(count: int) -> int:
    """The next of few sizes: eights up to 32, then thirty-twos."""
    return round_up(count, 8 if count <= 32 else 32)


def recorder(device: torch.device) -> Recorder | None:
    """How passes are recorded on ``device``; None where they are not."""
    return _CudaRecorder() if device.type == "cuda" else None


class _CudaRecorder:
    """Written after torch's documentation of CUDA graphs; not run so far."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, work: Callable[[], Tensor]) -> Replay:
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries set themselves up in the first passes, which cannot be recorded
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph: Any = torch.cuda.CUDAGraph()
        # The trainer's thread may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = work()
        self._pool = graph.pool()  # graphs are replayed one after the other, so that they can share their memory

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


__all__ = ["DecodeGraphs", "Recorder", "Replay", "Shape", "recorder"]
