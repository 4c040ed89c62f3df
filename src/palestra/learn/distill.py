# SPDX-License-Identifier: Apache-2.0
"""Learning from whom or what is better: a teacher's opinion of each token, or the best of what was sampled oneself."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from palestra.errors import ConfigError
from palestra.learn.advantage import ADVANTAGES, SAME, AdvantageConfig, rewards_by_group, same
from palestra.learn.batch import PerToken, Rows

WITH_TEACHER = frozenset({"distill", "nothing"})
"""Advantages that no reward takes part in: with them a teacher alone says what is good."""


@ADVANTAGES.register("distill")
def distill(rows: Rows, config: AdvantageConfig) -> tuple[PerToken, ...]:
    """log π_ref(a_t) − log π_old(a_t) at each token, π_ref a teacher: on-policy distillation (arXiv:2306.13649, with
    the reverse KL of arXiv:2306.08543).

    Each token answers for itself alone (a discount of 0): over what the student samples, its mean times ∇log π is
    −∇KL(π‖π_ref) at every state that the student came to. Needs ``rows.old`` and ``rows.ref``. A token that the teacher
    bans counts 0, as in :mod:`palestra.learn.kl`.
    """
    assert rows.old is not None and rows.ref is not None
    values = []
    for sample, old, ref in zip(rows.samples, rows.old, rows.ref, strict=True):
        counts = sample.loss_mask & (ref != -np.inf)
        values.append(np.where(counts, np.where(counts, ref, 0.0) - np.asarray(old, np.float64), 0.0))
    return tuple(values)


@ADVANTAGES.register("nothing")
def nothing(rows: Rows, config: AdvantageConfig) -> tuple[PerToken, ...]:
    """0 everywhere: only the terms beside the surrogate have a gradient, such as the KL to a teacher."""
    return tuple(np.zeros(len(s.tokens)) for s in rows.samples)


@ADVANTAGES.register("best_of_group")
def best_of_group(rows: Rows, config: AdvantageConfig) -> tuple[PerToken, ...]:
    """1 for the best-scored episodes of a group and 0 for the others, times trained tokens / kept tokens of the step
    (RAFT, arXiv:2304.06767; rejection-sampling fine-tuning, arXiv:2308.01825).

    With the loss ``reinforce`` and ``reduction: token_mean`` this is supervised fine-tuning on the kept episodes: the
    factor makes the mean over all of a step's tokens the mean over those that are imitated. All that are best are kept;
    a group of equal rewards has no best, for imitating everything one says teaches nothing on average.
    """
    best: dict[tuple[str, str], bool] = {}
    for group, rewards in rewards_by_group(rows).items():
        top = np.inf if same(rewards.values()) else max(rewards.values()) - SAME
        best |= {(group, episode): reward >= top for episode, reward in rewards.items()}
    kept = sum(s.trained_tokens for s in rows.samples if best[s.group, s.episode])
    value = sum(s.trained_tokens for s in rows.samples) / kept if kept else 0.0
    return tuple(np.where(s.loss_mask & best[s.group, s.episode], value, 0.0) for s in rows.samples)


def check_distillation(advantage: str, kl_in: str, *, kl_coef: float, entropy_coef: float) -> None:
    """Refuse terms that would count a teacher twice, or not at all; raises ConfigError."""
    if advantage == "distill" and kl_coef:
        raise ConfigError(
            "algorithm.advantage=distill is the KL to the teacher already; set algorithm.kl_coef=0, or with "
            "algorithm.advantage=nothing take algorithm.kl=full, the exact KL in the loss"
        )
    if advantage == "nothing" and not (kl_coef and kl_in == "loss") and not entropy_coef:
        raise ConfigError(
            "algorithm.advantage=nothing leaves nothing to learn from; set algorithm.kl_coef with algorithm.kl_in=loss"
        )


def reverse_kl(logits: Tensor, ref_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(π‖π_ref) of whole distributions in nats, (U, V) and (U, V') → (U,), both softmax(logits / T) in float32 at
    least.

    What π_ref has logits for beyond V is padding of its vocabulary and left out. What cannot happen adds nothing, and
    neither does what π_ref bans, where the divergence has no finite value.

    >>> logits = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    >>> reverse_kl(logits, torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log())
    tensor([0.1438, 0.0000])
    """
    logp = _log_softmax(logits, temperature)
    ref = _log_softmax(ref_logits[:, : logits.shape[-1]], temperature)
    p = logp.exp()
    out = (p == 0) | (ref == -torch.inf)
    return (p * (logp.masked_fill(out, 0.0) - ref.masked_fill(out, 0.0))).sum(-1)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    return ((logits if logits.dtype == torch.float64 else logits.float()) / temperature).log_softmax(-1)
