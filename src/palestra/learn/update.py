# SPDX-License-Identifier: Apache-2.0
"""One step of learning: rows in, changed weights and honest numbers out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from palestra.config import Config
from palestra.learn.advantage import ADVANTAGES, AdvantageConfig
from palestra.learn.batch import Batch, PerToken, Reduction, Rows, micro_batches, pack, token_weights
from palestra.learn.kl import KL_ESTIMATORS
from palestra.learn.loss import LOSSES, LossConfig, LossInputs
from palestra.learn.policy import Policy


class UpdateConfig(Config):
    """How a step's rows become gradients.

    kl_coef: weight of the per-token KL term (0 = none, and no reference in memory). old_logprobs:
    ``recorded`` takes the sampler's log-probs, ``recompute`` a forward pass at the start of the step (needed
    when the engine samples in another precision). reduction_divisor: what the sum over tokens is divided by when
    ``reduction`` is ``constant`` (Dr. GRPO: episodes × token limit). updates_per_batch: passes over the same rows,
    each one optimiser step. micro_batch_tokens bounds the memory of one forward and backward pass.
    """

    advantage: str = "group_zscore"
    advantage_eps: float = 1e-4
    loss: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: str = "k3"
    kl_coef: float = Field(default=0.05, ge=0)
    reduction: Reduction = "sequence_mean"
    reduction_divisor: float | None = Field(default=None, gt=0)
    old_logprobs: Literal["recorded", "recompute"] = "recorded"
    updates_per_batch: int = Field(default=1, ge=1)
    micro_batch_tokens: int = Field(default=8192, ge=1)
    max_grad_norm: float = Field(default=1.0, gt=0)


@dataclass
class Sums:
    """Metrics as (sum, count), added over micro-batches and divided once at the end."""

    values: dict[str, tuple[float, float]]

    def add(self, name: str, total: float, count: float) -> None:
        have = self.values.get(name, (0.0, 0.0))
        self.values[name] = (have[0] + total, have[1] + count)

    def total(self, name: str, value: float) -> None:
        """Add up over micro-batches without dividing: the parts of one loss."""
        self.values[name] = (self.values.get(name, (0.0, 1.0))[0] + value, 1.0)

    def peak(self, name: str, value: float) -> None:
        """Keep the largest."""
        self.values[name] = (max(self.values.get(name, (0.0, 1.0))[0], value), 1.0)

    def means(self) -> dict[str, float]:
        return {name: s / n for name, (s, n) in self.values.items() if n}


def annotate(policy: Policy, rows: Rows, config: UpdateConfig, *, temperature: float) -> Rows:
    """Rows with advantages and what the loss needs beside them: ``old``, and ``ref`` when there is a KL term."""
    adv = ADVANTAGES[config.advantage](rows, AdvantageConfig(eps=config.advantage_eps))
    recorded = config.old_logprobs == "recorded"
    old = tuple(s.logprobs for s in rows.samples) if recorded else _scored(policy, rows, config, temperature, ref=False)
    ref = _scored(policy, rows, config, temperature, ref=True) if config.kl_coef else None
    return rows.with_(advantages=adv, old=old, ref=ref)


def _scored(policy: Policy, rows: Rows, config: UpdateConfig, temperature: float, *, ref: bool) -> tuple[PerToken, ...]:
    """Per sample float64[T] log-probs under the reference or the current policy, forward only."""
    out = [np.zeros(len(s.tokens), np.float64) for s in rows.samples]
    score = policy.reference_logprobs if ref else policy.current_logprobs
    nothing = [np.zeros(len(s.tokens)) for s in rows.samples]
    for indices in micro_batches(rows.samples, trained_indices(rows), config.micro_batch_tokens):
        batch = pack(rows, nothing, indices, dtype=torch.float64, device=policy.device)
        values = score(batch, temperature=temperature).double().cpu().numpy()
        sequence = batch.sequence.cpu().numpy()
        for at, i in enumerate(batch.indices):
            where = rows.samples[i].loss_mask & (np.arange(len(out[i])) > 0)
            out[i][where] = values[sequence == at]
    return tuple(out)


def trained_indices(rows: Rows) -> list[int]:
    """The samples that carry gradient."""
    return [i for i, s in enumerate(rows.samples) if s.trained_tokens]


def train_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    rows: Rows,
    config: UpdateConfig,
    *,
    temperature: float,
) -> dict[str, float]:
    """``updates_per_batch`` optimiser steps on one step's rows; returns the step's metrics.

    Without any signal (all advantages zero and no KL term) nothing is updated, and the metrics say so. A
    non-finite gradient is never applied.
    """
    indices = _rows_with_gradient(rows, config)
    metrics = {"train/updates": 0.0, "train/updates_skipped": 0.0, "train/tokens": float(sum_tokens(rows))}
    metrics["train/rows_without_signal"] = float(len(trained_indices(rows)) - len(indices))
    if not indices:
        return metrics | {"train/updates_skipped": 1.0}
    sums = Sums({})
    weights = token_weights(rows.samples, config.reduction, divisor=config.reduction_divisor)
    for update in range(config.updates_per_batch):
        optimizer.zero_grad(set_to_none=True)
        for chosen in micro_batches(rows.samples, indices, config.micro_batch_tokens):
            batch = pack(rows, weights, chosen, dtype=_dtype(policy), device=policy.device)
            policy_loss(policy, batch, config, temperature, sums, first=update == 0).backward()  # type: ignore[no-untyped-call]
        norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm))
        if not math.isfinite(norm):
            metrics["train/updates_skipped"] += 1.0
            continue
        optimizer.step()
        sums.add("train/grad_norm", norm, 1)
        metrics["train/updates"] += 1.0
    metrics["train/learning_rate"] = float(optimizer.param_groups[0]["lr"])
    if metrics["train/updates"]:  # the schedule counts steps that moved the weights
        scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return metrics | sums.means()


def _rows_with_gradient(rows: Rows, config: UpdateConfig) -> list[int]:
    """The rows worth a forward pass. Every surrogate is a multiple of the advantage, so without a KL term a row whose
    advantages are all 0 adds exactly nothing to the gradient; it still counts in the divisors of the others."""
    trained = trained_indices(rows)
    if config.kl_coef or rows.advantages is None:
        return trained
    return [i for i in trained if np.any(rows.advantages[i])]


def policy_loss(
    policy: Policy, batch: Batch, config: UpdateConfig, temperature: float, sums: Sums, *, first: bool
) -> Tensor:
    """The loss of one micro-batch: the surrogate plus the KL term, each Σ w·ℓ."""
    assert batch.old is not None and batch.advantages is not None
    policy.train_mode(dropout=False)
    logprobs, entropy = policy.logprobs(batch, temperature=temperature, entropy=first)
    out = LOSSES[config.loss](
        LossInputs(logprobs, batch.old, batch.advantages, batch.weights, batch.sequence),
        LossConfig(clip_low=config.clip_low, clip_high=config.clip_high),
    )
    loss = out.loss
    for name, (total, count) in out.metrics.items():
        sums.add(name, total, count)
    if batch.ref is not None:
        kl = KL_ESTIMATORS[config.kl](logprobs, batch.ref)
        loss = loss + config.kl_coef * (batch.weights * kl).sum()
        total = float(kl.detach().sum())
        sums.add("train/kl", total, len(kl))
        sums.add("train/kl_sum", total, len(batch.indices))
    if entropy is not None:  # once per step, before any weight has moved
        sums.total("train/loss", float(loss.detach()))
        sums.add("train/entropy", float(entropy.sum()), len(entropy))
        sums.peak("train/ratio_first_step_max", float(((logprobs.detach() - batch.old).exp() - 1).abs().max()))
    return loss


def sum_tokens(rows: Rows) -> int:
    """Trained tokens of a step."""
    return sum(s.trained_tokens for s in rows.samples)


def _dtype(policy: Policy) -> torch.dtype:
    dtypes = {p.dtype for p in policy.parameters()}
    return torch.float64 if torch.float64 in dtypes else torch.float32


def make_optimizer(
    parameters: Sequence[torch.nn.Parameter], *, learning_rate: float, weight_decay: float, betas: tuple[float, float]
) -> torch.optim.AdamW:
    """AdamW; matrices decay, norms and biases do not."""
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=learning_rate, betas=betas)


def linear_schedule(
    optimizer: torch.optim.Optimizer, *, steps: int, warmup_ratio: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up over ``warmup_ratio`` of the steps, then linear to 0 after the last.

    With 10 steps and a ratio of 0.2 the factors are 0.5, 1, 1, 7/8, …, 1/8.
    """
    warm = round(steps * warmup_ratio)

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return max(0.0, (steps - step) / max(1, steps - warm))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
