# SPDX-License-Identifier: Apache-2.0
"""Losses on pairs of replies, or on labelled ones. Everything arrives as tensors with one number per reply.

A reply counts by log π(y|x), the sum of its trained tokens' log-probs. A loss gives one number per pair (or per
labelled reply) and never divides by how many there are; :mod:`palestra.learn.preference_step` takes the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from palestra.config import Config
from palestra.registry import Registry


@dataclass(frozen=True, slots=True, eq=False)
class PairScores:
    """P pairs. chosen, rejected (P,): log π(y|x) in nats, summed over the reply's trained tokens, with gradient.
    ref_chosen, ref_rejected (P,): the same under the reference, None for a loss that has none. chosen_tokens,
    rejected_tokens (P,): how many tokens each sum is over."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    ref_chosen: Tensor | None = None
    ref_rejected: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LabelScores:
    """N labelled replies. logprobs (N,): log π(y|x), summed, with gradient; ref (N,): the reference's; label bool(N,):
    True = desirable; baseline: KTO's z₀ in nats, without gradient."""

    logprobs: Tensor
    ref: Tensor
    label: Tensor
    baseline: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """loss (P,): one number per pair or labelled reply, with gradient. chosen, rejected: implicit rewards of the two
    sides (of pairs: (P,) each). gap (P,): how far a pair stands on the right side: above 0 is right, 0 is a tie.
    facts: further metrics as (sum, count)."""

    loss: Tensor
    chosen: Tensor
    rejected: Tensor
    gap: Tensor
    facts: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """A loss with its options. reference: it needs π_ref. paired: it takes pairs, otherwise labelled replies."""

    function: Callable[[Any, Any], Outcome]
    config: type[Config]
    reference: bool
    paired: bool = True


PREFERENCE_LOSSES: Registry[PreferenceLoss] = Registry("preference loss")
"""Losses by name, each with the config of its own options."""


class DPOConfig(Config):
    """beta: how strongly the policy is held to the reference; small lets it go further. label_smoothing: the share of
    labels believed to be the wrong way round (cDPO), below 0.5."""

    beta: float = Field(default=0.1, gt=0)
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)


def dpo(scores: PairScores, config: DPOConfig) -> Outcome:
    """−log σ(β·Δ), Δ = log π/π_ref of the chosen reply minus that of the rejected (Rafailov et al. 2023,
    arXiv:2305.18290, eq. 7). With label smoothing ε: −(1−ε)·log σ(β·Δ) − ε·log σ(−β·Δ) (Mitchell 2023, cDPO).

    >>> pair = PairScores(*(torch.tensor([x]) for x in (-10.0, -12.0, 5.0, 5.0, -11.0, -11.5)))
    >>> round(dpo(pair, DPOConfig()).loss.item(), 6), round(dpo(pair, DPOConfig(label_smoothing=0.1)).loss.item(), 6)
    (0.620957, 0.635957)
    """
    chosen, rejected = _ratios(scores)
    chosen, rejected = config.beta * chosen, config.beta * rejected
    gap = chosen - rejected
    loss = -(1 - config.label_smoothing) * F.logsigmoid(gap) - config.label_smoothing * F.logsigmoid(-gap)
    return Outcome(loss, chosen, rejected, gap)


class IPOConfig(Config):
    """beta: τ of the paper; the gap between the mean log-ratios is pulled to 1/(2·beta)."""

    beta: float = Field(default=0.1, gt=0)


def ipo(scores: PairScores, config: IPOConfig) -> Outcome:
    """(h − 1/(2β))², h = the log-ratio of the chosen reply *per token* minus that of the rejected (Azar et al. 2023,
    arXiv:2310.12036, eq. 17). The paper writes whole-sequence log-ratios; a fixed target then means less the longer the
    replies are, and its authors confirmed the mean over tokens (huggingface/trl#1265).

    >>> pair = PairScores(*(torch.tensor([x]) for x in (-10.0, -12.0, 5.0, 2.0, -11.0, -11.5)))
    >>> round(ipo(pair, IPOConfig()).loss.item(), 4)  # h = 1/5 + 0.5/2
    20.7025
    """
    chosen, rejected = _ratios(scores)
    chosen, rejected = chosen / scores.chosen_tokens, rejected / scores.rejected_tokens
    h = chosen - rejected
    return Outcome((h - 1 / (2 * config.beta)) ** 2, config.beta * chosen, config.beta * rejected, config.beta * h)


class SimPOConfig(Config):
    """beta: scale of the reward, a mean log-prob per token. gamma: by how much the chosen reward should lead."""

    beta: float = Field(default=2.0, gt=0)
    gamma: float = Field(default=1.0, ge=0)


def simpo(scores: PairScores, config: SimPOConfig) -> Outcome:
    """−log σ(β/|y_w|·log π(y_w) − β/|y_l|·log π(y_l) − γ), without a reference (Meng et al. 2024, arXiv:2405.14734,
    eq. 6)."""
    chosen = config.beta * scores.chosen / scores.chosen_tokens
    rejected = config.beta * scores.rejected / scores.rejected_tokens
    gap = chosen - rejected
    return Outcome(-F.logsigmoid(gap - config.gamma), chosen, rejected, gap)


class ORPOConfig(Config):
    """odds_weight: λ, the weight of the odds-ratio term beside the SFT term."""

    odds_weight: float = Field(default=0.1, gt=0)


def orpo(scores: PairScores, config: ORPOConfig) -> Outcome:
    """−log P(y_w) − λ·log σ(log odds(y_w)/odds(y_l)), odds = P/(1−P), log P the mean log-prob per token, without a
    reference (Hong et al. 2024, arXiv:2403.07691, eqs. 3–7). The SFT term is over the reply alone, per pair."""
    chosen, rejected = scores.chosen / scores.chosen_tokens, scores.rejected / scores.rejected_tokens
    log_odds = (chosen - _log1mexp(chosen)) - (rejected - _log1mexp(rejected))
    loss = -chosen - config.odds_weight * F.logsigmoid(log_odds)
    chosen, rejected = config.odds_weight * chosen, config.odds_weight * rejected
    return Outcome(loss, chosen, rejected, chosen - rejected)


class KTOConfig(Config):
    """beta: as in DPO. desirable_weight, undesirable_weight: λ_D and λ_U; when one kind of label is rarer, raise its
    weight until λ_D·n_D / (λ_U·n_U) lies in 1…4/3."""

    beta: float = Field(default=0.1, gt=0)
    desirable_weight: float = Field(default=1.0, gt=0)
    undesirable_weight: float = Field(default=1.0, gt=0)


def kto(scores: LabelScores, config: KTOConfig) -> Outcome:
    """λ_D·(1 − σ(β·(r − z₀))) where desirable, λ_U·(1 − σ(β·(z₀ − r))) where not, r = log π/π_ref (Ethayarajh et al.
    2024, arXiv:2402.01306). z₀ ≥ 0 estimates KL(π‖π_ref) on replies that belong to other prompts."""
    rewards = config.beta * (scores.logprobs - scores.ref)
    gap = torch.where(scores.label, 1.0, -1.0) * (rewards - config.beta * scores.baseline)
    weight = torch.where(scores.label, config.desirable_weight, config.undesirable_weight)
    return Outcome(weight * (1 - gap.sigmoid()), rewards[scores.label], rewards[~scores.label], gap)


PREFERENCE_LOSSES.register("dpo")(PreferenceLoss(dpo, DPOConfig, reference=True))
PREFERENCE_LOSSES.register("ipo")(PreferenceLoss(ipo, IPOConfig, reference=True))
PREFERENCE_LOSSES.register("kto")(PreferenceLoss(kto, KTOConfig, reference=True, paired=False))
PREFERENCE_LOSSES.register("orpo")(PreferenceLoss(orpo, ORPOConfig, reference=False))
PREFERENCE_LOSSES.register("simpo")(PreferenceLoss(simpo, SimPOConfig, reference=False))


def pairwise(chosen: Tensor, rejected: Tensor, center: float = 0.0) -> Outcome:
    """A reward model's −log σ(r_c − r_r) (Ouyang et al. 2022, arXiv:2203.02155, eq. 1), plus center·(r_c + r_r)²:
    pairs only fix differences, this term keeps the rewards around 0 (Eisenstein et al. 2023, arXiv:2312.09244, eq. 2).

    >>> outcome = pairwise(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.0, 1.0, 2.0]))
    >>> round(outcome.loss.mean().item(), 6), (outcome.gap > 0).tolist()
    (0.773224, [True, False, False])
    """
    gap = chosen - rejected
    return Outcome(-F.logsigmoid(gap) + center * (chosen + rejected) ** 2, chosen, rejected, gap)


def _ratios(scores: PairScores) -> tuple[Tensor, Tensor]:
    assert scores.ref_chosen is not None and scores.ref_rejected is not None
    return scores.chosen - scores.ref_chosen, scores.rejected - scores.ref_rejected


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 − eˣ) for x ≤ 0, exact at both ends; at x = 0 it stands still, where odds would be infinite."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    near = x > -math.log(2)
    # The branch that is not taken gets a harmless argument: its gradient would be NaN, and NaN · 0 is NaN.
    small, large = torch.where(near, x, -1.0), torch.where(near, -1.0, x)
    return torch.where(near, (-torch.expm1(small)).log(), torch.log1p(-large.exp()))
