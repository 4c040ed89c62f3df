# SPDX-License-Identifier: Apache-2.0
"""How the rows of one forward pass attend to the slots of the store.

A kernel does it where there is one for the device and the model; elsewhere matmul and softmax do. Both keep a row's
bits independent of its neighbours on the CPU. The kernel has one order of arithmetic per row; the plain way needs fixed
shapes: a number of rows that is a multiple of 8, key lengths that are a multiple of 16, and enough keys and queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.engine.rows import Rows
from palestra.engine.store import SlotStore
from palestra.model import kernels
from palestra.model.attention import masked_softmax

SUMMED_KEYS = 128
MIN_QUERIES = 4  # with fewer rows torch.bmm sums in another order, so a token's bits would depend on how it came


@dataclass(slots=True)
class SlotPlan:
    """How one flat forward pass of the engine attends (an ``AttentionPlan``): the rows are stored where they belong,
    then each looks at its slot."""

    store: SlotStore
    rows: Rows

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
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, heads, D)
        keys, values = self.store.tables(layer, k, v)
        rows = self.rows
        if softcap is None and sinks is None and kernels.takes(q, k, v):
            return kernels.attend(q, k, v, keys, values, rows.as_pass, scale=scale, window=window)[None]
        at = slice(None) if rows.written is None else rows.written
        keys[rows.slots, :, rows.places] = k[at]
        values[rows.slots, :, rows.places] = v[at]
        out = q.new_zeros(q.shape[0] + 1, q.shape[1], v.shape[-1])  # the last is where padding goes
        for block in rows.blocks:
            seen = keys[block.slots, :, : block.length], values[block.slots, :, : block.length]  # (S, Hkv, L, D)
            out[block.rows] = _grouped(q[block.queries], *seen, block.hidden(window), scale, softcap, sinks)
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
