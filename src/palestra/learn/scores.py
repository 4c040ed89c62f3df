# SPDX-License-Identifier: Apache-2.0
"""From logits to the log-probs of the tokens that were written, and the entropy beside them.

The logits are by far the largest tensor of a step, and torch goes through memory a dozen times for what is one sum per
row. The kernel goes through it once, and its backward pass turns the logits themselves into their gradient: nothing of
their size is made anew.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from palestra.learn.entropy import entropy as entropy_of
from palestra.model import kernels

WithEntropy = Literal[False, "value", "gradient"]


def log_probs(
    logits: Tensor, at: Tensor, targets: Tensor, temperature: float, entropy: WithEntropy
) -> tuple[Tensor, Tensor | None]:
    """As :func:`scores`; the entropy of each target's row with its gradient where that is wanted."""
    if entropy == "gradient":
        spread = entropy_of(logits, temperature)[at]
        return scores(logits, at, targets, temperature, entropy=False)[0], spread
    return scores(logits, at, targets, temperature, entropy=entropy == "value")


def scores(
    logits: Tensor, at: Tensor, targets: Tensor, temperature: float, *, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """log-softmax(logits / T) of ``targets`` (M,) in the rows ``at`` (M,) of logits (U, V), in float32 at least, and
    where asked for the entropy of those rows in nats, without a gradient; (M,) each.

    After a backward pass the logits hold their gradient.
    """
    if kernels.available(logits) and logits.is_contiguous():
        picked, spread = _Scores.apply(logits, at, targets, 1.0 / temperature, entropy)  # type: ignore[no-untyped-call]
        return picked, spread
    scaled = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    scaled -= scaled.detach().amax(-1, keepdim=True)  # before anything is rounded at the size of the logits
    log_z = scaled.logsumexp(-1)
    picked = scaled[at, targets] - log_z[at]
    if not entropy:
        return picked, None
    with torch.no_grad():
        probs = (scaled - log_z[:, None]).exp()
        # A banned token's logit is -inf, and 0 · -inf would be NaN; its share of the entropy is 0.
        spread = log_z - (probs * scaled).masked_fill_(probs == 0, 0.0).sum(-1)
    return picked, spread[at]


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, at: Tensor, targets: Tensor, factor: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        if len(targets) and int(targets.min()) < 0:
            raise IndexError(
                f"target {int(targets.min())} is no token"
            )  # C would write where torch counts from the end
        at, targets = at.long().contiguous(), targets.long().contiguous()
        top, total, spread = kernels.log_sums(logits, factor, entropy=entropy)
        ctx.save_for_backward(logits, at, targets, top, total)
        ctx.factor = factor
        out = (logits[at, targets] - top[at]) * factor - total[at]
        beside = None if spread is None else spread[at]
        if beside is not None:
            ctx.mark_non_differentiable(beside)
        return out, beside

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, at, targets, top, total = ctx.saved_tensors
        order = torch.argsort(at, stable=True)
        starts = torch.searchsorted(at[order], torch.arange(len(logits) + 1))
        kernels.log_sums_backward(logits, top, total, grads[0].contiguous(), targets, order, starts, ctx.factor)
        torch.autograd.graph.increment_version(logits)  # whoever else kept the logits for a gradient must be told
        return logits, None, None, None, None


__all__ = ["WithEntropy", "log_probs", "scores"]
