# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens: counter-based noise, inverse-CDF sampling, log-probs of the full distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from palestra.engine.base import SamplingParams
from palestra.model import kernels

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(keys: npt.NDArray[np.uint64], counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """float32[n] in [0, 1): a pure function of (request key, token index), so a run repeats whatever order
    requests arrive in. SplitMix64 (Steele, Lea, Flood 2014), upper 24 bits.

    >>> uniform(np.array([7, 7], np.uint64), np.array([0, 1], np.uint64)).tolist() == [
    ...     uniform(np.array([7], np.uint64), np.array([i], np.uint64)).item() for i in (0, 1)]
    True
    """
    z = keys + (counters + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    drawn: npt.NDArray[np.float32] = ((z >> np.uint64(40)).astype(np.float64) * 2.0**-24).astype(np.float32)
    return drawn


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    noise: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int64] | None = None,
) -> tuple[list[int], list[float], list[float] | None]:
    """One token per entry of ``noise`` [n] from the row of ``logits`` (N, V) that ``rows`` [n] names, or from its own:
    tokens, log-softmax(logits / T)[token] in nats, and the log of the mass kept by top-k/top-p/min-p (None when no row
    truncates). params: one per row; T = 0 is greedy, log-probs at T = 1.
    """
    at = torch.from_numpy(np.arange(len(noise)) if rows is None else rows).to(logits.device)
    wide = logits.float()
    drawn: tuple[Tensor, Tensor] | None = None
    if kernels.available(wide) and wide.is_contiguous():
        drawn = _drawn(wide, params, torch.from_numpy(noise), at)
        if not any(p.truncated for p in params):
            return drawn[0].tolist(), drawn[1].tolist(), None
    if any(p.temperature not in (0, 1) for p in params):
        wide = wide / torch.tensor([p.temperature or 1.0 for p in params], device=logits.device)[:, None]
    top = wide.amax(-1, keepdim=True)
    mass = torch.sub(wide, top).exp_()  # the largest is taken off before anything is rounded at the size of the logits
    blocks = _blocks(mass)
    block_sums = blocks.sum(-1)
    total = block_sums.sum(-1, keepdim=True)
    kept: Tensor | None = None
    if any(p.truncated for p in params):
        cut, kept = _truncate(mass / total, params)
        blocks = _blocks(cut)
        block_sums = blocks.sum(-1)
    picked = _invert_cdf(blocks, block_sums, torch.from_numpy(noise).to(logits.device), at)
    if any(p.temperature == 0 for p in params):
        greedy = torch.tensor([p.temperature == 0 for p in params], device=logits.device)
        picked = torch.where(greedy[at], wide.argmax(-1)[at], picked)
    logprobs = wide[at, picked] - top[at, 0] - total[at, 0].log()
    if drawn is not None:  # a row's bits do not depend on whether another one in the batch is truncated
        cut_off = torch.tensor([p.truncated for p in params])[at]
        picked, logprobs = torch.where(cut_off, picked, drawn[0]), torch.where(cut_off, logprobs, drawn[1])
    return picked.tolist(), logprobs.tolist(), None if kept is None else kept[at].tolist()


def _drawn(logits: Tensor, params: Sequence[SamplingParams], noise: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """The same for rows that are not truncated, by one pass over the logits: no tensor of their size is made."""
    factors = torch.tensor([1 / (p.temperature or 1.0) for p in params])
    greedy = torch.tensor([p.temperature == 0 for p in params])
    return kernels.draw(logits, factors, at, torch.where(greedy[at], -1.0, noise))


def _blocks(mass: Tensor) -> Tensor:
    """(N, V) → (N, blocks, width): a sum over many short blocks is quicker to search, and rounds less."""
    n, v = mass.shape
    width = next((w for w in (256, 128, 64) if v % w == 0), v)
    return mass.view(n, v // width, width)


def _invert_cdf(blocks: Tensor, block_sums: Tensor, u: Tensor, at: Tensor) -> Tensor:
    """The first token of row ``at`` at which the share of the mass so far exceeds u, in two levels: blocks of the
    vocabulary, then inside one block (torch.multinomial over 49k tokens costs twenty times as much on a CPU)."""
    count, width = blocks.shape[1:]
    block_cdf = block_sums.cumsum(-1)[at]
    target = u[:, None] * block_cdf[:, -1:]
    block = (block_cdf <= target).sum(-1, keepdim=True).clamp_(max=count - 1)
    before = block_cdf.gather(-1, block) - block_sums[at].gather(-1, block)
    inside = blocks[at, block[:, 0]]
    within = ((before + inside.cumsum(-1)) <= target).sum(-1, keepdim=True).clamp_(max=width - 1)
    # Rounding at a block's edge can point at a token without mass; the block's likeliest stands in.
    within = torch.where(inside.gather(-1, within) == 0, inside.argmax(-1, keepdim=True), within)
    return (block * width + within)[:, 0]


def _truncate(probs: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Zero what top-k, top-p and min-p leave out, row by row; also the log of the mass that stays."""
    ordered, order = probs.sort(-1, descending=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=probs.device)[:, None]

    keep = rank < column([float(p.top_k or probs.shape[-1]) for p in params])
    # A rounded sum may reach 1 before the last token; a row without top-p loses none of its tail by that.
    keep &= ordered.cumsum(-1) - ordered < column([p.top_p if p.top_p < 1 else float("inf") for p in params])
    keep &= ordered >= ordered[:, :1] * column([p.min_p for p in params])
    keep[:, 0] = True
    cut = torch.zeros_like(probs).scatter_(-1, order, ordered * keep)
    return cut, cut.sum(-1).log().clamp_(max=0.0)
