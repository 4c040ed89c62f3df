# SPDX-License-Identifier: Apache-2.0
"""What is added to rewards before advantages are taken: the KL penalty per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from palestra.learn.batch import PerToken, Rows
from palestra.learn.kl import KL_ESTIMATORS
from palestra.types import BoolArray


def kl_penalties(rows: Rows, kl: str, coef: float) -> tuple[PerToken, ...]:
    """coef·KL(π‖π_ref) of every token the model wrote, float64[T] per sample, 0 elsewhere.

    Estimated from ``rows.old`` and ``rows.ref``, which must be there: the policy that sampled pays, not the one that
    is being trained, so the penalty is a number without a gradient.
    """
    assert rows.old is not None and rows.ref is not None
    estimate = KL_ESTIMATORS[kl]
    penalties = []
    for sample, old, ref in zip(rows.samples, rows.old, rows.ref, strict=True):
        value = estimate(torch.from_numpy(np.asarray(old, np.float64)), torch.from_numpy(np.asarray(ref, np.float64)))
        penalties.append(np.where(sample.loss_mask, coef * value.numpy(), 0.0))
    return tuple(penalties)


def with_penalties(rows: Rows, penalties: Sequence[PerToken]) -> Rows:
    """Every episode's reward less what all its tokens, in all its rows, have to pay: R − Σ penalty."""
    due: dict[tuple[str, str], float] = {}
    for s, penalty in zip(rows.samples, penalties, strict=True):
        due[s.group, s.episode] = due.get((s.group, s.episode), 0.0) + float(penalty.sum())
    return rows.with_(samples=tuple(replace(s, reward=s.reward - due[s.group, s.episode]) for s in rows.samples))


def paid_before(rows: Rows, penalties: Sequence[PerToken]) -> tuple[PerToken, ...]:
    """What an episode has paid before each token. An action is not to blame for it: the reward of
    :func:`with_penalties` plus this is the return from the token on, R − Σ_{i ≥ t} penalty_i."""
    so_far: dict[tuple[str, str], float] = {}
    before = []
    for s, penalty in zip(rows.samples, penalties, strict=True):
        start = so_far.get((s.group, s.episode), 0.0)
        before.append(start + np.cumsum(penalty) - penalty)
        so_far[s.group, s.episode] = start + float(penalty.sum())
    return tuple(before)


def token_rewards(
    loss_mask: BoolArray, turn_ends: Sequence[int], rewards: Sequence[float], penalties: PerToken | None = None
) -> PerToken:
    """float64[T]: each turn's reward on its last sampled token, less the penalty of every token the model wrote.

    turn_ends: index of the last sampled token of each turn, as in :class:`~palestra.learn.batch.Sample`; rewards: one
    per turn. An episode's one reward goes to its last turn. Raises ValueError where the two do not fit.

    >>> mask = np.array([True, True, False, True])
    >>> token_rewards(mask, [3], [1.0], np.array([0.01, 0.02, 0.5, 0.03])).round(12).tolist()
    [-0.01, -0.02, 0.0, 0.97]
    """
    if not all(loss_mask[end] for end in turn_ends):
        raise ValueError("a turn ends on a token that the model did not write")
    paid = np.zeros(len(loss_mask))
    for end, reward in zip(turn_ends, rewards, strict=True):
        paid[end] += reward
    return paid if penalties is None else np.where(loss_mask, paid - penalties, 0.0)


def paid_tokens(rows: Rows, kl: str, kl_coef: float) -> tuple[PerToken, ...]:
    """float64[T] per sample: what each token earned, that of a turn on its last one, less its KL penalty when
    ``kl_coef`` is not 0. Over an episode they sum to its reward, the penalties taken off.

    Raises ValueError for samples that do not say what their turns earned.
    """
    due: Sequence[PerToken | None] = kl_penalties(rows, kl, kl_coef) if kl_coef else [None] * len(rows)
    for s in rows.samples:
        if len(s.turn_rewards) != len(s.turn_ends) or not s.turn_ends:
            raise ValueError(f"{s.episode}: {len(s.turn_rewards)} rewards for {len(s.turn_ends)} turns")
    return tuple(
        token_rewards(s.loss_mask, s.turn_ends, s.turn_rewards, penalty)
        for s, penalty in zip(rows.samples, due, strict=True)
    )
