# SPDX-License-Identifier: Apache-2.0
"""Where the engine keeps keys and values: one slot per session.

Every forward pass is a flat list of rows, one row per token. A row knows its slot and its position; its key
and value are written first, then it attends to everything in its slot up to itself. Rows come as *segments*
(several new tokens of one slot: a prompt, a tool's result) and as *decode rows* (one token each).
"""

from __future__ import annotations

from torch import Tensor

ROW_MULTIPLE = 8
KEY_MULTIPLE = 16  # capacities are such: kernels read keys in whole blocks of eight
MIN_KEYS = 64  # below 400 multiply-adds torch.bmm takes another kernel, so the choice would depend on neighbours


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

    def tables(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer whose rows look like key, value (…, Hkv, D)."""
        if layer not in self.keys:
            for table, rows in ((self.keys, key), (self.values, value)):
                table[layer] = rows.new_zeros(self.slots, rows.shape[-2], self.capacity, rows.shape[-1])
        return self.keys[layer], self.values[layer]

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Give the keys and values of the positions from ``start`` to ``end`` of one slot to another."""
        for table in (self.keys, self.values):
            for rows in table.values():
                rows[target, :, start:end] = rows[source, :, start:end]


def _grown(have: int, need: int) -> int:
    return have if have >= need else max(need, have + have // 2)
