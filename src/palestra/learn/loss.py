# SPDX-License-Identifier: Apache-2.0
"""Losses. Everything arrives as (M,) tensors over the trained tokens only: what is masked is not here.

A step's loss is Σ w·ℓ with the weights of :func:`palestra.learn.batch.token_weights`, so a loss never
divides and the result does not depend on how the step is cut into micro-batches. Every ℓ here is a multiple of the
advantage. Ratios are exp of a bounded exponent, so no token makes them infinite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from palestra.config import Config
from palestra.errors import ConfigError
from palestra.learn.kl import bounded_exp
from palestra.registry import Registry


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """logprobs (M,) log π(a|s) with gradient; old (M,) the log-probs the ratio is taken against; advantages
    (M,); weights (M,); sequence (M,) which sample each token is of."""

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    weights: Tensor
    sequence: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LossOutputs:
    """loss: the scalar Σ w·ℓ. metrics: name → (sum, count), so they add up over micro-batches."""

    loss: Tensor
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)


class LossConfig(Config):
    """clip_low, clip_high: the ratio counts within [1 − clip_low, 1 + clip_high] only; clip_low 1 means no lower
    bound. dual_clip: where the advantage is negative, the loss counts up to dual_clip·|A| only; None = unbounded."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None


Loss = Callable[[LossInputs, LossConfig], LossOutputs]
LOSSES: Registry[Loss] = Registry("loss")

UNCLIPPED = frozenset({"reinforce", "cispo"})
"""Losses without a clipped surrogate: nothing for ``dual_clip`` to bound."""


@LOSSES.register("clip")
def clip(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """−min(ρ·A, clip(ρ, 1 − ε_low, 1 + ε_high)·A), ρ = π/π_old per token (PPO, arXiv:1707.06347, eq. 7).

    Different ε above and below: DAPO, arXiv:2503.14476, eq. 10.

    >>> new, A = torch.tensor([1.5, 0.5]).log(), torch.tensor([1.0, -1.0])
    >>> inputs = LossInputs(new, torch.zeros(2), A, torch.ones(2), torch.tensor([0, 0]))
    >>> clip(inputs, LossConfig()).loss  # −1.2 + 0.8: both tokens have moved far enough, and have no gradient
    tensor(-0.4000)
    """
    return _surrogate(bounded_exp(inputs.logprobs - inputs.old), inputs, config)


@LOSSES.register("reinforce")
def reinforce(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """−A·log π (Williams 1992): no ratio and no clip, so it is right for the policy that sampled and no other.

    >>> new, A = torch.tensor([0.5, 0.25]).log(), torch.tensor([1.0, -1.0])
    >>> reinforce(LossInputs(new, new, A, torch.ones(2), torch.tensor([0, 0])), LossConfig()).loss  # log 2 − log 4
    tensor(-0.6931)
    """
    return LossOutputs(-(inputs.weights * inputs.advantages * inputs.logprobs).sum())


@LOSSES.register("gspo")
def gspo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """The clipped surrogate of s = exp(mean of log π/π_old over the sequence) (GSPO, arXiv:2507.18071, eq. 5 and 7).

    A sequence is one sample; its own tokens alone take part. All of them move together: with advantages that differ
    within a sequence, ``gspo_token`` keeps them apart.

    >>> new, one = torch.tensor([1.5, 0.5]).log(), torch.ones(2)
    >>> gspo(LossInputs(new, torch.zeros(2), one, 0.5 * one, torch.tensor([0, 0])), LossConfig()).loss  # −√(1.5 · 0.5)
    tensor(-0.8660)
    """
    log_ratio = sequence_mean(inputs.logprobs - inputs.old, inputs.sequence)
    return _surrogate(bounded_exp(log_ratio), inputs, config)


@LOSSES.register("gspo_token")
def gspo_token(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """GSPO with one ratio per token, sg[s]·π/sg[π] (arXiv:2507.18071, eq. 13 and 14): its value is the sequence's,
    its gradient the token's. Equal advantages within a sequence give GSPO's loss and gradient."""
    log_ratio = sequence_mean((inputs.logprobs - inputs.old).detach(), inputs.sequence)
    own = inputs.logprobs - inputs.logprobs.detach()  # 0, with a gradient of 1
    return _surrogate(bounded_exp(log_ratio) * own.exp(), inputs, config)


@LOSSES.register("cispo")
def cispo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """−sg[clip(ρ, 1 − ε_low, 1 + ε_high)]·A·log π (CISPO, MiniMax-M1, arXiv:2506.13585, eq. 4 and 5): a large ratio
    is cut, but its token keeps a gradient.

    >>> new, A = torch.tensor([1.5, 0.5]).log(), torch.tensor([1.0, -1.0])
    >>> inputs = LossInputs(new, torch.zeros(2), A, torch.ones(2), torch.tensor([0, 0]))
    >>> cispo(inputs, LossConfig()).loss  # −1.2·log 1.5 + 0.8·log 0.5
    tensor(-1.0411)
    """
    with torch.no_grad():
        ratio = bounded_exp(inputs.logprobs - inputs.old)
        weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        cut = (weight != ratio).sum()
    loss = -(inputs.weights * weight * inputs.advantages * inputs.logprobs).sum()
    return LossOutputs(loss, {"train/clip_fraction": (float(cut), float(len(ratio)))})


def _surrogate(ratio: Tensor, inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Σ w·−min(ρ·A, clip(ρ)·A), where A < 0 at most dual_clip·|A| (dual clip, arXiv:1912.09729)."""
    gain = ratio * inputs.advantages
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * inputs.advantages
    kept = torch.minimum(gain, clipped)
    if config.dual_clip is not None:
        floor = config.dual_clip * inputs.advantages
        kept = torch.where(inputs.advantages < 0, torch.maximum(kept, floor), kept)
    with torch.no_grad():
        active = (kept != gain).sum()
    return LossOutputs(-(inputs.weights * kept).sum(), {"train/clip_fraction": (float(active), float(len(ratio)))})


def sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """(M,): at each token the mean of ``values`` over the tokens of its sequence.

    >>> sequence_mean(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 1])).tolist()
    [2.0, 2.0, 5.0]
    """
    size = int(sequence.max()) + 1 if len(sequence) else 0
    sums = values.new_zeros(size).index_add(0, sequence, values)
    counts = values.new_zeros(size).index_add(0, sequence, torch.ones_like(values))
    return (sums / counts)[sequence]


def value_loss(
    values: Tensor, old: Tensor, returns: Tensor, weights: Tensor, *, clip: float | None = None
) -> LossOutputs:
    """Σ w·(V − R)², or with ``clip`` Σ w·max((V − R)², (V_old + clamp(V − V_old, ±clip) − R)²).

    values (M,) with gradient, old (M,) the critic's values at the start of the step, returns (M,), weights (M,).
    The maximum is pessimistic: a value may move further than ``clip`` only where that makes the loss no smaller
    (PPO's reference implementation; not in the paper).

    >>> one = torch.ones(1)
    >>> value_loss(one * 0.5, one * 0.0, one, one, clip=0.2).loss.item()  # max(0.25, 0.64)
    0.64...
    """
    errors = (values - returns) ** 2
    if clip is None:
        return LossOutputs((weights * errors).sum())
    near = old + (values - old).clamp(-clip, clip)
    worst = torch.maximum(errors, (near - returns) ** 2)
    cut = float((worst.detach() > errors.detach()).sum())
    return LossOutputs((weights * worst).sum(), {"train/value_clip_fraction": (cut, float(len(values)))})


def cross_entropy(logprobs: Tensor, weights: Tensor) -> Tensor:
    """−Σ w·log π: supervised learning's loss over the same tensors."""
    return -(weights * logprobs).sum()


def check_clip(config: LossConfig, loss: str = "clip") -> None:
    """Refuse clip ranges that could never be active or always are; raises ConfigError."""
    if not 0 < config.clip_low <= 1 or config.clip_high <= 0:
        raise ConfigError("need 0 < clip_low <= 1 and clip_high > 0")
    if config.dual_clip is None:
        return
    if loss in UNCLIPPED:
        raise ConfigError(f"loss {loss} has no clipped surrogate for dual_clip to bound; leave dual_clip out")
    if config.dual_clip <= 1 + config.clip_high:
        raise ConfigError(
            f"dual_clip is {config.dual_clip:g}: it bounds ratios beyond 1 + clip_high = {1 + config.clip_high:g}, so "
            "it must be larger; 3 is usual"
        )
