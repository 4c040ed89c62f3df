# SPDX-License-Identifier: Apache-2.0
"""One step of learning: rows in, changed weights and honest numbers out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pydantic
import torch
from pydantic import Field
from torch import Tensor

from palestra.config import Config
from palestra.errors import ConfigError
from palestra.learn.advantage import ADVANTAGES, WITHOUT_SIBLINGS, AdvantageConfig
from palestra.learn.batch import Batch, PerToken, Reduction, Rows, micro_batches, pack, token_weights
from palestra.learn.kl import KL_ESTIMATORS, KLPlace, bounded_exp, check_kl, importance_corrected
from palestra.learn.loss import LOSSES, LossConfig, LossInputs, check_clip
from palestra.learn.offpolicy import Importance, check_importance, importance_weights
from palestra.learn.policy import Policy, WithEntropy
from palestra.learn.shaping import kl_penalties, with_penalties


class UpdateConfig(Config):
    """How a step's rows become gradients.

    dual_clip: where the advantage is negative, a token's loss counts up to this many times |A| (None = no such bound; 3
    is usual). kl_coef: weight of the per-token KL term (0 = none, and no reference in memory). kl_in: ``loss`` adds the
    KL term to the loss; ``reward`` takes it, summed over the episode, from the reward before advantages are computed
    (with ``kl: k1``), so beside ``group_zscore`` a group of equal rewards is ranked by its KL. kl_importance: weigh
    the KL term of the loss by π/π_old, so that k1 and k3 stay right for tokens of an older policy. entropy_coef:
    weight of the entropy bonus, from full distributions (0 = none). old_logprobs: ``recorded`` takes the sampler's
    log-probs, ``recompute`` a forward pass at the start of the step (needed when the engine samples in another
    precision). importance: with ``recompute``, weigh each token's surrogate by trainer/sampler, per token or per
    episode (``sequence``), truncated or masked above ``importance_cap``. importance_cap: the largest such ratio that
    counts in full. importance_floor: masks also drop ratios below. divisor_tokens: with ``reduction: constant``, the
    sum over tokens is divided by the step's episodes times this; ``palestra rl`` fills in what an episode may sample
    at most. updates_per_batch: passes over the same rows, each one optimiser step. micro_batch_tokens bounds the
    memory of one forward and backward pass.
    """

    advantage: str = "group_zscore"
    advantage_eps: float = 1e-4
    loss: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl: str = "k3"
    kl_coef: float = Field(default=0.05, ge=0)
    kl_in: KLPlace = "loss"
    kl_importance: bool = False
    entropy_coef: float = Field(default=0.0, ge=0)
    reduction: Reduction = "sequence_mean"
    divisor_tokens: float | None = Field(default=None, gt=0)
    old_logprobs: Literal["recorded", "recompute"] = "recorded"
    importance: Importance = "none"
    importance_cap: float = Field(default=3.0, gt=1)
    importance_floor: float = Field(default=0.0, ge=0, lt=1)
    updates_per_batch: int = Field(default=1, ge=1)
    micro_batch_tokens: int = Field(default=8192, ge=1)
    max_grad_norm: float = Field(default=1.0, gt=0)

    @pydantic.model_validator(mode="after")
    def _check_parts(self) -> UpdateConfig:
        for table, name in ((ADVANTAGES, self.advantage), (LOSSES, self.loss), (KL_ESTIMATORS, self.kl)):
            table[name]  # raises with the list of names
        check_clip(self.loss_config, self.loss)
        check_importance(self.importance, self.old_logprobs, self.importance_floor)
        if self.kl_coef:
            check_kl(self.kl, self.kl_in, importance=self.kl_importance)
        if self.loss == "reinforce" and self.updates_per_batch > 1:
            raise ConfigError(
                f"algorithm.loss=reinforce has no ratio, so it is wrong from the second of {self.updates_per_batch} "
                "updates on; set algorithm.updates_per_batch=1, or algorithm.loss=clip"
            )
        if self.divisor_tokens is not None and self.reduction != "constant":
            raise ConfigError(
                f"algorithm.divisor_tokens is read by reduction=constant only, and the reduction is {self.reduction}"
            )
        return self

    @property
    def loss_config(self) -> LossConfig:
        return LossConfig(clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip)

    @property
    def min_group(self) -> int:
        """How many usable episodes of a task the advantage needs."""
        return 1 if self.advantage in WITHOUT_SIBLINGS else 2

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "loss"

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "reward"


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

    def lowest(self, name: str, value: float) -> None:
        """Keep the smallest."""
        self.values[name] = (min(self.values.get(name, (math.inf, 1.0))[0], value), 1.0)

    def means(self) -> dict[str, float]:
        return {name: s / n for name, (s, n) in self.values.items() if n}


def annotate(policy: Policy, rows: Rows, config: UpdateConfig, *, temperature: float) -> Rows:
    """Rows with advantages and what the loss needs beside them: ``old``, and ``ref`` when there is a KL term."""
    # A penalty in the reward moves baselines, so rows that only serve those have it too.
    baseline = [i for i, s in enumerate(rows.samples) if s.loss_mask.any()]
    indices = baseline if config.kl_in_reward else trained_indices(rows)
    old, ref = tuple(s.logprobs for s in rows.samples), None
    if config.old_logprobs == "recompute":
        old = _scored(policy, rows, indices, config, temperature, ref=False)
    if config.kl_coef:
        ref = _scored(policy, rows, indices, config, temperature, ref=True)
    rows = rows.with_(old=old, ref=ref)
    seen, kl_coef = rows, 0.0
    if config.kl_in_reward:
        kl_coef = config.kl_coef
        seen = with_penalties(rows, kl_penalties(rows, config.kl, kl_coef))
    estimator = ADVANTAGES[config.advantage]
    return rows.with_(
        advantages=estimator(seen, AdvantageConfig(eps=config.advantage_eps, kl=config.kl, kl_coef=kl_coef))
    )


def _scored(
    policy: Policy, rows: Rows, indices: Sequence[int], config: UpdateConfig, temperature: float, *, ref: bool
) -> tuple[PerToken, ...]:
    """Per sample float64[T] log-probs under the reference or the current policy, forward only."""
    out = [np.zeros(len(s.tokens), np.float64) for s in rows.samples]
    score = policy.reference_logprobs if ref else policy.current_logprobs
    nothing = [np.zeros(len(s.tokens)) for s in rows.samples]
    for chosen in micro_batches(rows.samples, indices, config.micro_batch_tokens):
        batch = pack(rows, nothing, chosen, dtype=torch.float64, device=policy.device)
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

    Without any signal (all advantages zero, neither KL term nor entropy bonus in the loss) nothing is updated, and the
    metrics say so. A non-finite gradient is never applied.
    """
    rows, metrics = _weighted(rows, config)
    indices = _rows_with_gradient(rows, config)
    metrics |= {"train/updates": 0.0, "train/updates_skipped": 0.0, "train/tokens": float(sum_tokens(rows))}
    metrics["train/rows_without_signal"] = float(len(trained_indices(rows)) - len(indices))
    if not indices:
        return metrics | {"train/updates_skipped": 1.0}
    sums = Sums({})
    weights = token_weights(rows.samples, config.reduction, divisor=_divisor(rows, config))
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


def _weighted(rows: Rows, config: UpdateConfig) -> tuple[Rows, dict[str, float]]:
    """The rows as the surrogate sees them, and what is known before anything moves: trainer against sampler, and the
    KL that the rewards paid. Surrogates are multiples of the advantage, so it carries the importance weight."""
    metrics: dict[str, float] = {}
    if config.kl_in_reward and rows.ref is not None:
        trained, paid = trained_indices(rows), kl_penalties(rows, config.kl, 1.0)
        if trained:
            kl = sum(float(paid[i].sum()) for i in trained)
            metrics |= {"train/kl": kl / sum_tokens(rows), "train/kl_sum": kl / len(trained)}
    if config.old_logprobs == "recompute" and rows.advantages is not None:
        weights, seen = importance_weights(
            rows, config.importance, cap=config.importance_cap, floor=config.importance_floor
        )
        metrics |= seen
        rows = rows.with_(advantages=tuple(w * a for w, a in zip(weights, rows.advantages, strict=True)))
    return rows, metrics


def _divisor(rows: Rows, config: UpdateConfig) -> float | None:
    """Episodes of the step that train × ``divisor_tokens`` (Dr. GRPO, arXiv:2503.20783, with the token limit)."""
    if config.reduction != "constant":
        return None
    if config.divisor_tokens is None:
        raise ConfigError(
            "algorithm.reduction=constant needs algorithm.divisor_tokens, the tokens that an episode may sample at most"
        )
    return config.divisor_tokens * max(1, len({s.episode for s in rows.samples if s.trained_tokens}))


def _rows_with_gradient(rows: Rows, config: UpdateConfig) -> list[int]:
    """The rows worth a forward pass. Every surrogate is a multiple of the advantage, so where the loss has neither a KL
    term nor an entropy bonus a row whose advantages are all 0 adds exactly nothing to the gradient; it still counts in
    the divisors of the others."""
    trained = trained_indices(rows)
    if config.kl_in_loss or config.entropy_coef or rows.advantages is None:
        return trained
    return [i for i in trained if np.any(rows.advantages[i])]


def policy_loss(
    policy: Policy, batch: Batch, config: UpdateConfig, temperature: float, sums: Sums, *, first: bool
) -> Tensor:
    """The loss of one micro-batch: the surrogate plus the KL term less the entropy bonus, each Σ w·ℓ."""
    assert batch.old is not None and batch.advantages is not None
    policy.train_mode(dropout=False)
    wanted: WithEntropy = "gradient" if config.entropy_coef else "value" if first else False
    logprobs, entropy = policy.logprobs(batch, temperature=temperature, entropy=wanted)
    out = LOSSES[config.loss](
        LossInputs(logprobs, batch.old, batch.advantages, batch.weights, batch.sequence), config.loss_config
    )
    loss = out.loss
    for name, (total, count) in out.metrics.items():
        sums.add(name, total, count)
    if config.kl_in_loss and batch.ref is not None:
        loss = loss + config.kl_coef * _kl_term(logprobs, batch, config, sums)
    if config.entropy_coef and entropy is not None:
        loss = loss - config.entropy_coef * (batch.weights * entropy).sum()
    _add_ratios(sums, (logprobs - batch.old).detach(), first=first)
    if first and entropy is not None:  # before any weight has moved
        sums.total("train/loss", float(loss.detach()))
        sums.add("train/entropy", float(entropy.detach().sum()), len(entropy))
    return loss


def _kl_term(logprobs: Tensor, batch: Batch, config: UpdateConfig, sums: Sums) -> Tensor:
    """Σ w·KL, and the plain mean as a metric."""
    assert batch.old is not None and batch.ref is not None
    kl = KL_ESTIMATORS[config.kl](logprobs, batch.ref)
    total = float(kl.detach().sum())
    sums.add("train/kl", total, len(kl))
    sums.add("train/kl_sum", total, len(batch.indices))
    if config.kl_importance:
        kl = importance_corrected(kl, logprobs - batch.old)
    return (batch.weights * kl).sum()


def _add_ratios(sums: Sums, log_ratio: Tensor, *, first: bool) -> None:
    """π/π_old as it is, before any clip; whatever the loss makes of it."""
    if not len(log_ratio):
        return
    ratio = bounded_exp(log_ratio)
    sums.add("train/ratio_mean", float(ratio.sum()), len(ratio))
    sums.lowest("train/ratio_min", float(ratio.min()))
    sums.peak("train/ratio_max", float(ratio.max()))
    if first:
        sums.peak("train/ratio_first_step_max", float((ratio - 1).abs().max()))


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
