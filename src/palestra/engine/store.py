# SPDX-License-Identifier: Apache-2.0
"""Where the engine keeps keys and values: one slot per session, and the plan by which a forward pass uses them.

Every forward pass is a flat list of rows, one row per token. A row knows its slot and its position; its key
and value are written first, then it attends to everything in its slot up to itself. Rows come as *segments*
(several new tokens of one slot: a prompt, a tool's result) and as *decode rows* (one token each).

What makes a row's bits independent of its neighbours on the CPU: the number of rows is a multiple of 8, key
lengths are a multiple of 16, and attention is matmul + softmax in fixed shapes per entry.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.model.attention import masked_softmax

ROW_MULTIPLE = 8
KEY_MULTIPLE = 16
MIN_KEYS = 64  # below 400 multiply-adds torch.bmm takes another kernel, so the choice would depend on neighbours
SUMMED_KEYS = 128
MIN_QUERIES = 4  # with fewer rows torch.bmm sums in another order, so a token's bits would depend on how it came


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


def key_length(longest: int) -> int:
    """How many keys a pass looks at when the longest row sees ``longest``."""
    return max(MIN_KEYS, round_up(longest, KEY_MULTIPLE))


class SlotStore:
    """Keys and values of ``slots`` sessions, each up to ``capacity`` tokens; grows by half at least.

    Per layer: keys (slots, Hkv, capacity, D), values (slots, Hkv, capacity, Dv); layers appear when they
    first write, so families whose layers differ in shape need no special case. Slot 0 is scratch: rows that
    only fill up the batch write there.
    """

    def __init__(self, slots: int = 8, capacity: int = MIN_KEYS) -> None:
        self.slots, self.capacity = slots, capacity
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def reserve(self, slots: int, capacity: int) -> None:
        """Make room for slot numbers below ``slots`` and positions below ``capacity``, keeping what is stored."""
        wanted = _grown(self.slots, slots), round_up(_grown(self.capacity, key_length(capacity)), KEY_MULTIPLE)
        if wanted == (self.slots, self.capacity):
            return
        for table in (self.keys, self.values):
            for layer, old in table.items():
                new = old.new_zeros(wanted[0], old.shape[1], wanted[1], old.shape[3])
                new[: old.shape[0], :, : old.shape[2]] = old
                table[layer] = new
        self.slots, self.capacity = wanted

    def write(self, layer: int, slots: Tensor, positions: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key, value (N, Hkv, D) of N rows at their slots and positions."""
        if layer not in self.keys:
            for table, rows in ((self.keys, key), (self.values, value)):
                table[layer] = rows.new_zeros(self.slots, rows.shape[1], self.capacity, rows.shape[2])
        self.keys[layer][slots, :, positions] = key
        self.values[layer][slots, :, positions] = value

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Give the keys and values of the positions from ``start`` to ``end`` of one slot to another."""
        for table in (self.keys, self.values):
            for rows in table.values():
                rows[target, :, start:end] = rows[source, :, start:end]


def _grown(have: int, need: int) -> int:
    return have if have >= need else max(need, have + have // 2)


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


@dataclass(slots=True)
class SlotPlan:
    """How one flat forward pass of the engine attends (an ``AttentionPlan``): rows ``written`` (W,) are stored in
    ``slots`` at ``places`` (None: each row once), then each block attends."""

    store: SlotStore
    written: Tensor | None
    slots: Tensor
    places: Tensor
    blocks: list[Block]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        dropout: float,
    ) -> Tensor:
        rows = (key[0].transpose(0, 1), value[0].transpose(0, 1))
        if self.written is not None:
            rows = (rows[0][self.written], rows[1][self.written])
        self.store.write(layer, self.slots, self.places, *rows)
        flat = query[0].transpose(0, 1)  # (N, H, D)
        out = flat.new_zeros(flat.shape[0] + 1, flat.shape[1], value.shape[-1])  # the last is where padding goes
        for block in self.blocks:
            keys = self.store.keys[layer][block.slots, :, : block.length]  # (S, Hkv, L, D)
            values = self.store.values[layer][block.slots, :, : block.length]
            out[block.rows] = _grouped(flat[block.queries], keys, values, block.hidden(window), scale, softcap, sinks)
        return out[None, :-1]


def _grouped(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    hidden: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """query (S, Lq, H, D) against keys (S, Hkv, L, D) → (S, Lq, H, Dv); ``hidden`` (S, 1, 1, Lq, L): may not look.

    The query heads that share a key head become rows of one matrix product, so keys are never repeated.
    """
    s, lq, h, d = query.shape
    hkv = keys.shape[1]
    spare = max(0, -(-MIN_QUERIES // lq) - h // hkv)  # heads of zeros that make the product high enough
    g = h // hkv + spare
    q = (query * scale).transpose(1, 2).reshape(s, hkv, -1, lq, d)
    q = F.pad(q, (0, 0, 0, 0, 0, spare)) if spare else q  # padding by nothing is a copy all the same
    scores = (q.flatten(2, 3) @ keys.transpose(-1, -2)).view(s, hkv, g, lq, -1)
    if softcap is None and sinks is None and scores.dtype == torch.float32:
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
    else:
        sinks = F.pad(sinks.view(hkv, -1), (0, spare)).flatten() if sinks is not None else None
        seen = ~hidden[:, 0]
        weights = masked_softmax(scores.flatten(1, 2), seen, softcap=softcap, sinks=sinks).view_as(scores)
    mixed = _weighted(weights.flatten(2, 3).flatten(0, 1), values.flatten(0, 1))
    return mixed.view(s, hkv, g, lq, -1)[:, :, : g - spare].reshape(s, h, lq, -1).transpose(1, 2)


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """weights (B, M, L) @ values (B, L, D). On a CPU the sum over keys is cut at fixed places: torch.bmm cuts a
    long one in halves, at a place that depends on L and so on who else is in the batch."""
    step = SUMMED_KEYS if values.device.type == "cpu" else values.shape[1]
    mixed = torch.bmm(weights[..., :step], values[:, :step])
    for at in range(step, values.shape[1], step):
        mixed.baddbmm_(weights[..., at : at + step], values[:, at : at + step])
    return mixed
