# SPDX-License-Identifier: Apache-2.0
"""From a schedule to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from palestra.engine.scheduler import Decode, Schedule, Slot
from palestra.engine.store import ROW_MULTIPLE, key_length, round_up
from palestra.model.kernels import Pass

NARROW = 3
"""Requests with at most this many rows in a pass attend together."""


@dataclass(slots=True)
class Block:
    """Rows that attend together: S slots (by number, or a range), up to Lq rows each. ``rows`` (S, Lq) indexes the flat
    rows, their number where padded; ``positions`` (S, Lq) are their positions, -1 where padded; ``length``: how many
    keys to look at. ``queries`` (S, Lq): ``rows``, with some row where padded."""

    slots: Tensor | slice
    rows: Tensor
    positions: Tensor
    length: int
    queries: Tensor = field(init=False)
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queries = self.rows.masked_fill(self.positions < 0, 0)

    def hidden(self, window: int | None) -> Tensor:
        """bool (S, 1, 1, Lq, length), True where a row may not look; made once per pass and window."""
        if window not in self.masks:
            keys = torch.arange(self.length, device=self.positions.device)
            query = self.positions[..., None]
            seen = keys <= query
            if window is not None:
                seen &= keys > query - window
            seen[..., 0] |= self.positions < 0  # a padded row looks at key 0, so that its softmax is finite
            self.masks[window] = ~seen[:, None, None]
        return self.masks[window]


class Rows:
    """The flat rows of one pass: prefill segments, decode rows, then filling up to a multiple of 8.

    What decodes has a row for the last known token and one for each token of the draft. tokens, positions (N,). Keys
    are written as ``written`` (W,) says, an index into the rows, at ``slots`` and ``places`` (W,): a row of twins is
    written to the slot of each; None where every row is written once.
    ``slot`` (N,): the one that each row attends in, whose first ``prefix`` keys ``prefix_slot`` holds as well;
    ``decoded``: the rows whose logits are wanted.
    """

    def __init__(self, schedule: Schedule, device: torch.device) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        looking: list[tuple[int, int, int]] = []  # slot, where its first keys are as well, how many of them
        writes: list[tuple[int, int, int]] = []  # row, slot, position
        for slot, start, end in schedule.fills:
            writes += [(len(tokens) + i, slot.number, start + i) for i in range(end - start)]
            tokens += slot.tokens[start:end]
            positions += range(start, end)
            looking += [_looks(slot)] * (end - start)
        first = len(tokens)
        for decode in schedule.decodes:
            known = decode.twins[0].slot.tokens
            for depth, token in enumerate([known[-1], *decode.draft]):
                position = len(known) - 1 + depth
                writes += [(len(tokens), r.slot.number, position) for r in decode.twins]
                tokens.append(token)
                positions.append(position)
                looking.append(_looks(decode.twins[0].slot))
        decoding = len(tokens) - first
        count = round_up(len(tokens), ROW_MULTIPLE)
        spare = count - len(tokens)
        writes += [(len(tokens) + i, 0, 0) for i in range(spare)]
        self.tokens = torch.tensor(tokens + [0] * spare, device=device)
        self.positions = torch.tensor(positions + [0] * spare, device=device)
        looking += [(0, 0, 0)] * spare
        self.slot, self.prefix_slot, self.prefix = torch.tensor(looking, device=device).T.contiguous()
        written, self.slots, self.places = torch.tensor(writes, device=device).T.contiguous()
        self.written = written if len(writes) > count else None
        wanted = max(ROW_MULTIPLE, round_up(decoding, ROW_MULTIPLE))
        self.decoded = torch.tensor([*range(first, first + decoding)] + [0] * (wanted - decoding), device=device)
        self._schedule, self._first, self._device = schedule, first, device

    @cached_property
    def as_pass(self) -> Pass:
        """The same for kernels."""
        return Pass(self.written, self.slots, self.places, self.slot, self.positions, self.prefix_slot, self.prefix)

    @cached_property
    def blocks(self) -> list[Block]:
        """The rows as padded blocks that attend together, for where no kernel takes them one by one."""
        beyond = len(self.tokens)
        blocks = [*_fill_blocks(self._schedule.fills, beyond, self._device)]
        if self._schedule.decodes:
            blocks += _decode_blocks(self._schedule.decodes, self._first, beyond, self._device)
        return blocks


def _looks(slot: Slot) -> tuple[int, int, int]:
    return slot.number, slot.origin.number if slot.origin is not None else 0, slot.shared


def _decode_blocks(decodes: list[Decode], first: int, beyond: int, device: torch.device) -> Iterator[Block]:
    """Those with long drafts apart, so that the others' rows are not padded to theirs."""
    begins = np.cumsum([first, *(d.rows for d in decodes)]).tolist()
    for wide in (False, True):
        members = [(d, b) for d, b in zip(decodes, begins, strict=False) if (d.rows > NARROW) == wide]
        if members:
            yield _decode_block(members, beyond, device)


def _decode_block(decodes: list[tuple[Decode, int]], beyond: int, device: torch.device) -> Block:
    """One slot for all twins, and their rows from ``begin`` on. Where the slots lie close together, the block spans all
    slots from the first to the last, idle ones included: a view of the store, whereas picking slots one by one copies
    their keys, which costs more than all of attention."""
    numbers = np.array([d.twins[0].slot.number for d, _ in decodes])
    low, high = int(numbers.min()), int(numbers.max()) + 1
    dense = high - low <= 2 * len(decodes)
    shape = high - low if dense else len(decodes), max(d.rows for d, _ in decodes)
    rows, positions = np.full(shape, beyond, np.int64), np.full(shape, -1, np.int64)
    for where, (decode, begin) in zip(numbers - low if dense else range(len(decodes)), decodes, strict=True):
        last = len(decode.twins[0].slot.tokens) - 1
        rows[where, : decode.rows] = np.arange(begin, begin + decode.rows)
        positions[where, : decode.rows] = np.arange(last, last + decode.rows)
    return Block(
        slice(low, high) if dense else torch.from_numpy(numbers).to(device),
        torch.from_numpy(rows).to(device),
        torch.from_numpy(positions).to(device),
        key_length(int(positions.max()) + 1),
    )


def _fill_blocks(fills: list[tuple[Slot, int, int]], beyond: int, device: torch.device) -> Iterator[Block]:
    """Prefill segments as padded blocks, segments of like length together."""
    first = 0
    spans: list[tuple[int, int, int, int]] = []  # (rows rounded up, first row, first position, slot)
    for slot, start, end in fills:
        spans.append((round_up(end - start, ROW_MULTIPLE), first, start, slot.number))
        first += end - start
    lengths = [end - start for _, start, end in fills]
    for width in sorted({w for w, *_ in spans}):
        members = [(s, n) for s, n in zip(spans, lengths, strict=True) if s[0] == width]
        rows = np.full((len(members), width), beyond, np.int64)
        positions = np.full((len(members), width), -1, np.int64)
        for i, ((_, row, position, _), n) in enumerate(members):
            rows[i, :n] = np.arange(row, row + n)
            positions[i, :n] = np.arange(position, position + n)
        yield Block(
            torch.tensor([s[3] for s, _ in members], device=device),
            torch.from_numpy(rows).to(device),
            torch.from_numpy(positions).to(device),
            key_length(int(positions.max()) + 1),
        )
