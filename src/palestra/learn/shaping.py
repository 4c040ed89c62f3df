# SPDX-License-Identifier: Apache-2.0
"""What is added to rewards before advantages are taken: the KL penalty per token, the price of overlong episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from palestra.errors import ConfigError
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


def overlong_penalty(tokens: int, *, limit: int, buffer: int) -> float:
    """0 up to ``limit − buffer`` sampled tokens, then falling linearly to −1 at ``limit`` and beyond (soft overlong
    punishment, DAPO, arXiv:2503.14476, eq. 13).

    Raises ConfigError unless 0 < buffer <= limit.

    >>> [overlong_penalty(n, limit=100, buffer=20) for n in (80, 85, 100, 120)]
    [0.0, -0.25, -1.0, -1.0]
    """
    if not 0 < buffer <= limit:
        raise ConfigError(f"overlong buffer is {buffer}: it must lie between 1 and the limit of {limit} tokens")
    over = tokens - (limit - buffer)
    return -min(1.0, max(0.0, over / buffer)) + 0.0
