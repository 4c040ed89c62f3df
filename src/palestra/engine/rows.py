# SPDX-License-Identifier: Apache-2.0
"""From a schedule to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from palestra.engine.scheduler import Decode, Schedule, Slot
from palestra.engine.store import ROW_MULTIPLE, Block, key_length, round_up

NARROW = 3
"""Requests with at most this many rows in a pass attend together."""


class Rows:
    """The flat rows of one pass: prefill segments, decode rows, then filling up to a multiple of 8.

    What decodes has a row for the last known token and one for each token of the draft. tokens, positions (N,). Keys
    are written as ``written`` (W,) says, an index into the rows, at ``slots`` and ``places`` (W,): a row of twins is
    written to the slot of each; None where every row is written once.
    ``decoded``: the rows whose logits are wanted.
    """

    def __init__(self, schedule: Schedule, device: torch.device) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        writes: list[tuple[int, int, int]] = []  # row, slot, position
        for slot, start, end in schedule.fills:
            writes += [(len(tokens) + i, slot.number, start + i) for i in range(end - start)]
            tokens += slot.tokens[start:end]
            positions += range(start, end)
        first = len(tokens)
        for decode in schedule.decodes:
            known = decode.twins[0].slot.tokens
            for depth, token in enumerate([known[-1], *decode.draft]):
                position = len(known) - 1 + depth
                writes += [(len(tokens), r.slot.number, position) for r in decode.twins]
                tokens.append(token)
                positions.append(position)
        decoding = len(tokens) - first
        count = round_up(len(tokens), ROW_MULTIPLE)
        spare = count - len(tokens)
        writes += [(len(tokens) + i, 0, 0) for i in range(spare)]
        self.tokens = torch.tensor(tokens + [0] * spare, device=device)
        self.positions = torch.tensor(positions + [0] * spare, device=device)
        written, self.slots, self.places = torch.tensor(writes, device=device).unbind(1)
        self.written = written if len(writes) > count else None
        wanted = max(ROW_MULTIPLE, round_up(decoding, ROW_MULTIPLE))
        self.decoded = torch.tensor([*range(first, first + decoding)] + [0] * (wanted - decoding), device=device)
        self.blocks = [*_fill_blocks(schedule.fills, count, device)]
        if schedule.decodes:
            self.blocks += _decode_blocks(schedule.decodes, first, count, device)


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
