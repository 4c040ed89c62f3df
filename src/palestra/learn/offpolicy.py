# SPDX-License-Identifier: Apache-2.0
"""Importance weights between who sampled and who trains.

The surrogate corrects for π/π_old. Where π_old is the trainer's own forward pass (``old_logprobs: recompute``), the
sampler μ may still be another function: lower precision, other kernels, an older version. π_old/μ corrects for that,
cut so that no token or episode counts for many (truncated: Yao et al. 2025, "Your efficient RL framework secretly
brings you off-policy RL training"; masked: IcePop, arXiv:2510.18855).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from palestra.errors import ConfigError
from palestra.learn.batch import PerToken, Rows, Sample
from palestra.learn.kl import MAX_EXPONENT
from palestra.types import BoolArray

Floats = npt.NDArray[np.float64]
Importance = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
"""Level and cut: the ratio of each token, or the product over an episode's own tokens; above the cap it counts as the
cap (truncate) or not at all (mask)."""


def importance_weights(
    rows: Rows, importance: Importance, *, cap: float = 3.0, floor: float = 0.0
) -> tuple[tuple[PerToken, ...], dict[str, float]]:
    """The weight of every trained token, float64[T] per sample and 0 elsewhere, and the metrics about them.

    rows: with ``old`` recomputed by the trainer; the samples hold what the sampler recorded. cap: the largest ratio
    that counts in full. floor: masks also drop ratios below. The metrics are of the raw ratio before any cut, of
    tokens or of episodes: ``train/sampler_ratio_min``, ``_mean``, ``_max``, and ``train/sampler_ratio_cut``, the share
    that was cut. With ``none`` the weights are 1 and the metrics those of tokens.
    """
    assert rows.old is not None
    masks = [_trained(s) for s in rows.samples]
    gaps = [
        np.asarray(old, np.float64)[mask] - s.logprobs[mask]
        for s, old, mask in zip(rows.samples, rows.old, masks, strict=True)
    ]
    gap = np.concatenate(gaps) if gaps else np.zeros(0)
    unit = _episode_of_token(rows, masks) if importance.startswith("sequence") else np.arange(len(gap))
    ratios = np.exp(np.clip(np.bincount(unit, weights=gap), -MAX_EXPONENT, MAX_EXPONENT))
    kept = _kept(ratios, importance, cap, floor)
    per_token = np.split(kept[unit], np.cumsum([len(g) for g in gaps])[:-1]) if gaps else []
    weights = [np.zeros(len(mask)) for mask in masks]
    for weight, mask, values in zip(weights, masks, per_token, strict=True):
        weight[mask] = values
    if not len(ratios):
        return tuple(weights), {}
    return tuple(weights), {
        "train/sampler_ratio_min": float(ratios.min()),
        "train/sampler_ratio_mean": float(ratios.mean()),
        "train/sampler_ratio_max": float(ratios.max()),
        "train/sampler_ratio_cut": float(np.mean(kept != ratios)) if importance != "none" else 0.0,
    }


def _kept(ratios: Floats, importance: Importance, cap: float, floor: float) -> Floats:
    """What of each ratio counts."""
    if importance == "none":
        return np.ones_like(ratios)
    if importance.endswith("truncate"):
        return np.minimum(ratios, cap)
    return np.where((ratios >= floor) & (ratios <= cap), ratios, 0.0)


def _trained(sample: Sample) -> BoolArray:
    """The tokens that train; nothing predicts a sequence's first token."""
    return sample.loss_mask & (np.arange(len(sample.tokens)) > 0) & sample.trained


def _episode_of_token(rows: Rows, masks: list[BoolArray]) -> npt.NDArray[np.int64]:
    """For each trained token the number of its episode, counted from 0 over the episodes that have any."""
    numbers: dict[tuple[str, str], int] = {}
    found = []
    for sample, mask in zip(rows.samples, masks, strict=True):
        if count := int(mask.sum()):
            number = numbers.setdefault((sample.group, sample.episode), len(numbers))
            found.append(np.full(count, number, np.int64))
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def check_importance(importance: Importance, old_logprobs: str, floor: float) -> None:
    """Refuse weights that nothing could be computed from, and a floor that nothing reads; raises ConfigError."""
    if importance != "none" and old_logprobs == "recorded":
        raise ConfigError(
            f"algorithm.importance={importance} compares the sampler's log-probs with the trainer's own; set "
            "algorithm.old_logprobs=recompute"
        )
    if floor and not importance.endswith("mask"):
        raise ConfigError(
            f"algorithm.importance_floor drops ratios below it, which only a mask does; algorithm.importance is "
            f"{importance}: set token_mask or sequence_mask, or leave the floor out"
        )
