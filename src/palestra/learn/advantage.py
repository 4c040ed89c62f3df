# SPDX-License-Identifier: Apache-2.0
"""How good was what was sampled, compared with what? One function and one frozen config per estimator.

An estimator sees the whole step (:class:`~palestra.learn.batch.Rows`) and returns one float64[T] array per
sample, zero where the model did not write the token. Groups are found by name, so their sizes may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from palestra.config import Config
from palestra.learn.batch import PerToken, Rows, Sample
from palestra.registry import Registry

Estimator = Callable[[Rows, "AdvantageConfig"], tuple[PerToken, ...]]
ADVANTAGES: Registry[Estimator] = Registry("advantage")

SAME = 1e-6
"""Rewards closer than this are the same reward: 0.1 + 0.2 and 0.3 must not become +0.7 and −0.7."""


class AdvantageConfig(Config):
    """eps: added to the deviation, TRL's 1e-4."""

    eps: float = 1e-4


@ADVANTAGES.register("group_zscore")
def group_zscore(rows: Rows, config: AdvantageConfig) -> tuple[PerToken, ...]:
    """(r − mean) / (std + eps) within the group, sample deviation (GRPO, arXiv:2402.03300, eq. 3 ff.).

    Equal rewards give exactly 0.
    """
    return _spread(rows, {g: _zscore(r, config.eps) for g, r in rewards_by_group(rows).items()})


@ADVANTAGES.register("group_mean")
def group_mean(rows: Rows, config: AdvantageConfig) -> tuple[PerToken, ...]:
    """r − mean of the group, not divided (Dr. GRPO, arXiv:2503.20783: the deviation favours easy and hard tasks)."""
    return _spread(rows, {g: _centred(r) for g, r in rewards_by_group(rows).items()})


def rewards_by_group(rows: Rows) -> dict[str, dict[str, float]]:
    """group → episode → reward. An episode that trains as several rows counts once."""
    groups: dict[str, dict[str, float]] = {}
    for s in rows.samples:
        groups.setdefault(s.group, {})[s.episode] = s.reward
    return groups


def zero_variance(rows: Rows) -> int:
    """How many groups carry no signal because all their rewards are the same."""
    return sum(np.ptp(list(r.values())) <= SAME for r in rewards_by_group(rows).values())


def _centred(rewards: Mapping[str, float]) -> dict[str, float]:
    values = np.array(list(rewards.values()), np.float64)
    centred = np.zeros_like(values) if np.ptp(values) <= SAME else values - values.mean()
    return dict(zip(rewards, centred.tolist(), strict=True))


def _zscore(rewards: Mapping[str, float], eps: float) -> dict[str, float]:
    """
    >>> scores = _zscore({"a": 1.0, "b": 0.5, "c": 0.0, "d": 0.0, "e": 0.25}, 1e-4)
    >>> [round(v, 6) for v in scores.values()]
    [1.553426, 0.358483, -0.83646, -0.83646, -0.238989]
    """
    centred = _centred(rewards)
    if len(rewards) < 2 or not any(centred.values()):
        return centred
    std = float(np.std(list(rewards.values()), ddof=1))
    return {name: value / (std + eps) for name, value in centred.items()}


def _spread(rows: Rows, values: Mapping[str, Mapping[str, float]]) -> tuple[PerToken, ...]:
    """The episode's value on every token the model wrote."""

    def one(s: Sample) -> PerToken:
        return np.where(s.loss_mask, values[s.group][s.episode], 0.0)

    return tuple(one(s) for s in rows.samples)
