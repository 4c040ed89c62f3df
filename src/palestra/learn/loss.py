# SPDX-License-Identifier: Apache-2.0
"""Losses. Everything arrives as (M,) tensors over the trained tokens only: what is masked is not here.

A step's loss is Σ w·ℓ with the weights of :func:`palestra.learn.batch.token_weights`, so a loss never
divides and the result does not depend on how the step is cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from palestra.config import Config
from palestra.errors import ConfigError
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
    """clip_low, clip_high: the ratio counts within [1 − clip_low, 1 + clip_high] only."""

    clip_low: float = 0.2
    clip_high: float = 0.2


Loss = Callable[[LossInputs, LossConfig], LossOutputs]
LOSSES: Registry[Loss] = Registry("loss")


@LOSSES.register("clip")
def clip(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """−min(ρ·A, clip(ρ, 1 − ε_low, 1 + ε_high)·A), ρ = π/π_old per token (PPO, arXiv:1707.06347, eq. 7)."""
    log_ratio = inputs.logprobs - inputs.old
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    per_token = -torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
    with torch.no_grad():
        active = (clipped != ratio) & (clipped * inputs.advantages < ratio * inputs.advantages)
        metrics = {
            "train/clip_fraction": (float(active.sum()), float(len(ratio))),
            "train/ratio_mean": (float(ratio.sum()), float(len(ratio))),
        }
    return LossOutputs((inputs.weights * per_token).sum(), metrics)


def cross_entropy(logprobs: Tensor, weights: Tensor) -> Tensor:
    """−Σ w·log π: supervised learning's loss over the same tensors."""
    return -(weights * logprobs).sum()


def check_clip(config: LossConfig) -> None:
    """Refuse clip ranges that could never be active or always are."""
    if not 0 < config.clip_low < 1 or config.clip_high <= 0:
        raise ConfigError("need 0 < clip_low < 1 and clip_high > 0")
