# SPDX-License-Identifier: Apache-2.0
"""One step of learning: rows in, changed weights and honest numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pydantic
import torch
from pydantic import Field
from torch import Tensor

from palestra.config import Config
from palestra.errors import ConfigError
from palestra.learn.advantage import ADVANTAGES, WITH_CRITIC, WITHOUT_SIBLINGS, TurnKey, check_credit
from palestra.learn.annotate import annotate as annotate
from palestra.learn.annotate import trained_indices as trained_indices
from palestra.learn.batch import Batch, PerToken, Reduction, Rows, Sample, micro_batches, pack, token_weights
from palestra.learn.distill import WITH_TEACHER, check_distillation
from palestra.learn.kl import FULL, KL_ESTIMATORS, KLPlace, bounded_exp, check_kl, importance_corrected
from palestra.learn.loss import LOSSES, LossConfig, LossInputs, check_clip
from palestra.learn.offpolicy import Importance, check_importance, importance_weights
from palestra.learn.optim import linear_schedule as linear_schedule
from palestra.learn.optim import make_optimizer as make_optimizer
from palestra.learn.policy import Policy
from palestra.learn.robust import Guard, Update
from palestra.learn.scores import WithEntropy
from palestra.learn.shaping import kl_penalties
from palestra.learn.sums import Clock
from palestra.learn.sums import Sums as Sums
from palestra.learn.value import critic_loss, value_metrics


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
    at most. updates_per_batch: passes over the same rows, each one optimiser step per minibatch. minibatches: parts to
    which a pass deals the groups, whose members share most of their tokens (the episodes, where groups are fewer).
    micro_batch_tokens bounds the memory of one forward and backward pass.

    whiten_advantages: subtract the mean and divide by the deviation of the step's trained tokens. gamma: discount per
    token (``gae``) or per turn (``gae_turns``, ``turn_group_…``). gae_lambda: λ of ``gae``, ``gae_turns``. turn_key:
    ``turn_group_…`` compares turns of the same index, or those before which the model was shown the same (``state``).
    critic: the value head of ``gae`` and ``gae_turns`` sits on the policy's backbone (``shared``) or on a copy of it
    that trains apart (``separate``). vf_coef: weight of the value loss, ½·(V − R)² per token. value_clip: how far a
    value may move in a step before its error counts in full (None = as far as it likes).
    """

    advantage: str = "group_zscore"
    advantage_eps: float = Field(default=1e-4, ge=0)
    whiten_advantages: bool = False
    gamma: float = Field(default=1.0, gt=0, le=1)
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    turn_key: TurnKey = "index"
    critic: Literal["shared", "separate"] = "shared"
    vf_coef: float = Field(default=0.5, gt=0)
    value_clip: float | None = Field(default=0.2, gt=0)
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
    minibatches: int = Field(default=1, ge=1)
    micro_batch_tokens: int = Field(default=8192, ge=1)
    max_grad_norm: float = Field(default=1.0, gt=0)

    @pydantic.model_validator(mode="after")
    def _check_parts(self) -> UpdateConfig:
        for table, name in ((ADVANTAGES, self.advantage), (LOSSES, self.loss)):
            table[name]  # raises with the list of names
        if self.kl != FULL:
            KL_ESTIMATORS[self.kl]
        check_clip(self.loss_config, self.loss)
        check_importance(self.importance, self.old_logprobs, self.importance_floor)
        if self.kl_coef:
            check_kl(self.kl, self.kl_in, importance=self.kl_importance)
        check_credit(self, self.advantage)
        check_distillation(self.advantage, self.kl_in, kl_coef=self.kl_coef, entropy_coef=self.entropy_coef)
        if self.loss == "reinforce" and (updates := self.updates_per_batch * self.minibatches) > 1:
            raise ConfigError(
                f"algorithm.loss=reinforce has no ratio, so it is wrong from the second of {updates} updates on; set "
                "algorithm.updates_per_batch=1 and minibatches=1, or algorithm.loss=clip"
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
    def needs_critic(self) -> bool:
        """Whether the advantage compares with a critic's values."""
        return self.advantage in WITH_CRITIC

    @property
    def needs_reference(self) -> bool:
        """Whether there is anything that compares the policy with a reference."""
        return self.kl_coef > 0 or self.advantage == "distill"

    @property
    def needs_ref(self) -> bool:
        """Whether rows need the reference's log-probs of what was sampled."""
        return (self.kl_coef > 0 and self.kl != FULL) or self.advantage == "distill"

    @property
    def unscored(self) -> bool:
        """Whether episodes without a reward are learned from as well."""
        return self.advantage in WITH_TEACHER

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "loss"

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "reward"


def train_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    rows: Rows,
    config: UpdateConfig,
    *,
    temperature: float,
    guard: Guard | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """``updates_per_batch`` passes over one step's rows, each of ``minibatches`` optimiser steps; returns the metrics.

    seed: deals the groups of each pass to its minibatches. Without any signal (all advantages zero, neither KL term
    nor entropy bonus nor value loss) nothing is updated, and the metrics say so. A loss or gradient that is not finite
    is never applied, and ends the step; ``guard``, the run's own, hears of it, and knows what fits into memory.
    """
    guard = guard or Guard(config.micro_batch_tokens)
    rows, metrics = _weighted(rows, config)
    indices = _rows_with_gradient(rows, config)
    metrics |= {"train/updates": 0.0, "train/updates_skipped": 0.0, "train/tokens": float(sum_tokens(rows))}
    metrics["train/updates_not_finite"] = 0.0
    metrics["train/rows_without_signal"] = float(len(trained_indices(rows)) - len(indices))
    if not indices:
        return metrics | {"train/updates_skipped": 1.0}
    sums = Sums({})
    parts = [part for number in range(config.updates_per_batch) for part in _minibatches(rows, config, [seed, number])]
    for update, part in enumerate(parts):
        result = _update(policy, optimizer, *part, config, temperature, guard, sums, first=update == 0)
        if not result.taken:  # another pass over these rows would most likely end the same
            metrics["train/updates_not_finite"] = 1.0
            metrics["train/updates_skipped"] = float(len(parts) - update)
            break
        sums.add("train/grad_norm", result.norm, 1)
        metrics["train/updates"] += 1.0
    metrics["train/learning_rate"] = float(optimizer.param_groups[0]["lr"])
    if metrics["train/updates"]:  # the schedule counts steps that moved the weights
        scheduler.step()
    return metrics | sums.means()


def _update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    rows: Rows,
    weights: Sequence[PerToken],
    indices: Sequence[int],
    config: UpdateConfig,
    temperature: float,
    guard: Guard,
    sums: Sums,
    *,
    first: bool,
) -> Update:
    """One optimiser step; ``sums`` has its metrics once, however often it was begun."""
    before, clock = dict(sums.values), Clock(sums)

    def begin() -> None:
        sums.values = dict(before)

    def backward(chosen: Sequence[int]) -> float:
        batch = pack(rows, weights, chosen, dtype=_dtype(policy), device=policy.device)
        loss = policy_loss(policy, batch, config, temperature, sums, first=first)
        value = float(loss.detach())  # waits for the device, so that the next part's time is its own
        clock.lap("time/forward_s")
        loss.backward()  # type: ignore[no-untyped-call]
        clock.lap("time/backward_s")
        return value

    result = guard.update(
        optimizer,
        policy.parameters(),
        lambda tokens: micro_batches(rows.samples, indices, tokens),
        backward,
        rows=rows,
        max_grad_norm=config.max_grad_norm,
        begin=begin,
    )
    clock.lap("time/optimizer_s")
    return result


def _minibatches(rows: Rows, config: UpdateConfig, seed: Sequence[int]) -> list[tuple[Rows, list[PerToken], list[int]]]:
    """One pass over the rows, dealt by groups, or by episodes where there are fewer groups than parts: each part's
    rows, token weights (its loss is a mean over itself) and rows with a gradient. Parts without any are left out."""
    dealt = [rows]
    if config.minibatches > 1:
        whole = len({s.group for s in rows.samples if s.trained_tokens}) >= config.minibatches

        def card(sample: Sample) -> tuple[str, ...]:
            return (sample.group,) if whole else (sample.group, sample.episode)

        cards = list(dict.fromkeys(card(s) for s in rows.samples if s.trained_tokens))
        order = np.random.default_rng(seed).permutation(len(cards))
        hands = [{cards[i] for i in hand} for hand in np.array_split(order, config.minibatches)]
        dealt = [rows.only([i for i, s in enumerate(rows.samples) if card(s) in hand]) for hand in hands]
    parts = []
    for part in dealt:
        if indices := _rows_with_gradient(part, config):
            weights = token_weights(part.samples, config.reduction, divisor=_divisor(part, config))
            parts.append((part, weights, indices))
    return parts


def _weighted(rows: Rows, config: UpdateConfig) -> tuple[Rows, dict[str, float]]:
    """The rows as the surrogate sees them, and what is known before anything moves: trainer against sampler, and the
    KL that the rewards paid. Surrogates are multiples of the advantage, so it carries the importance weight."""
    metrics = value_metrics(rows)
    distilled = config.advantage == "distill"  # the KL to the teacher is what its advantages are made of
    if (config.kl_in_reward or distilled) and rows.ref is not None:
        trained, paid = trained_indices(rows), kl_penalties(rows, "k1" if distilled else config.kl, 1.0)
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
    term nor an entropy bonus nor a critic, a row whose advantages are all 0 adds exactly nothing to the gradient; it
    still counts in the divisors of the others."""
    trained = trained_indices(rows)
    if config.kl_in_loss or config.entropy_coef or config.needs_critic or rows.advantages is None:
        return trained
    return [i for i in trained if np.any(rows.advantages[i])]


def policy_loss(
    policy: Policy, batch: Batch, config: UpdateConfig, temperature: float, sums: Sums, *, first: bool
) -> Tensor:
    """The loss of one micro-batch: the surrogate plus KL term and value loss less the entropy bonus, each Σ w·ℓ."""
    assert batch.old is not None and batch.advantages is not None
    policy.train_mode(dropout=False)
    wanted: WithEntropy = "gradient" if config.entropy_coef else "value" if first else False
    exact = config.kl_in_loss and config.kl == FULL
    seen = policy.outputs(batch, temperature=temperature, entropy=wanted, kl=exact)
    logprobs, entropy = seen.logprobs, seen.entropy
    out = LOSSES[config.loss](
        LossInputs(logprobs, batch.old, batch.advantages, batch.weights, batch.sequence), config.loss_config
    )
    loss = out.loss
    for name, (total, count) in out.metrics.items():
        sums.add(name, total, count)
    if config.kl_in_loss:
        loss = loss + config.kl_coef * _kl_term(logprobs, seen.kl, batch, config, sums)
    if config.entropy_coef and entropy is not None:
        loss = loss - config.entropy_coef * (batch.weights * entropy).sum()
    if config.needs_critic:
        loss = loss + config.vf_coef * _value_term(seen.values, batch, config, sums, first=first)
    _add_ratios(sums, (logprobs - batch.old).detach(), first=first)
    if first and entropy is not None:  # before any weight has moved
        sums.total("train/loss", float(loss.detach()))
        sums.add("train/entropy", float(entropy.detach().sum()), len(entropy))
    return loss


def _kl_term(logprobs: Tensor, exact: Tensor | None, batch: Batch, config: UpdateConfig, sums: Sums) -> Tensor:
    """Σ w·KL, and the plain mean as a metric. exact: the KL of whole distributions, where it is not estimated."""
    kl = exact
    if kl is None:
        assert batch.ref is not None
        kl = KL_ESTIMATORS[config.kl](logprobs, batch.ref)
    total = float(kl.detach().sum())
    sums.add("train/kl", total, len(kl))
    sums.add("train/kl_sum", total, len(batch.indices))
    if config.kl_importance:
        assert batch.old is not None
        kl = importance_corrected(kl, logprobs - batch.old)
    return (batch.weights * kl).sum()


def _value_term(values: Tensor | None, batch: Batch, config: UpdateConfig, sums: Sums, *, first: bool) -> Tensor:
    if values is None:
        raise ValueError(f"advantage {config.advantage} needs a policy with a critic: Policy(…, critic=Critic(model))")
    out = critic_loss(values, batch, clip=config.value_clip)
    for name, (total, count) in out.metrics.items():
        sums.add(name, total, count)
    if first:
        sums.total("train/value_loss", float(out.loss.detach()))
    return out.loss


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
