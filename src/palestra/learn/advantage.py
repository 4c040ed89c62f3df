# SPDX-License-Identifier: Apache-2.0
"""How good was what was sampled, compared with what? One function and one frozen config per estimator.

An estimator sees the whole step (:class:`~palestra.learn.batch.Rows`) and returns one float64[T] array per
sample, zero where the model did not write the token. Groups are found by name, so their sizes may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from palestra.config import Config
from palestra.errors import ConfigError
from palestra.learn.batch import PerToken, Rows, Sample
from palestra.learn.shaping import kl_penalties, paid_before
from palestra.registry import Registry
from palestra.types import BoolArray

Floats = npt.NDArray[np.float64]
Estimator = Callable[[Rows, "AdvantageConfig"], tuple[PerToken, ...]]
ADVANTAGES: Registry[Estimator] = Registry("advantage")

SAME = 1e-6
"""Rewards closer than this are the same reward: 0.1 + 0.2 and 0.3 must not become +0.7 and −0.7."""

Name = tuple[str, str]
"""A group and one of its episodes."""

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["none", "std", "leave_one_out_std"]

WITHOUT_SIBLINGS = frozenset(
    {"distill", "gae", "gae_turns", "nothing", "reinforce", "reinforce_baseline", "reinforce_pp"}
)
"""Estimators that do not compare an episode with others of its task: a group of one is enough for them."""
WITH_CRITIC = frozenset({"gae", "gae_turns"})
"""Estimators that read ``rows.values``."""
BY_TURNS = frozenset({"turn_group_mean", "turn_group_zscore"})
"""Estimators that compare turns. With those that have a critic, they are the ones that discount."""
TurnKey = Literal["index", "state"]


class AdvantageConfig(Config):
    """eps: added to the deviation, TRL's 1e-4. kl, kl_coef: estimator and weight of the KL penalty that the rewards
    already hold (``kl_in: reward``), 0 for none. gamma: discount per token (``gae``) or per turn. gae_lambda: λ of GAE.
    turn_key: what makes turns comparable, their index or what the model was shown last."""

    eps: float = 1e-4
    kl: str = "k1"
    kl_coef: float = 0.0
    gamma: float = 1.0
    gae_lambda: float = 0.95
    turn_key: TurnKey = "index"


READERS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("critic", "critic_learning_rate", "vf_coef", "value_clip", "gae_lambda"), WITH_CRITIC),
    "gamma": WITH_CRITIC | BY_TURNS,
    "turn_key": BY_TURNS,
}
"""Options of an algorithm that only some estimators read."""


def check_credit(config: Config, advantage: str) -> None:
    """Refuse an option that the advantage would not read; raises ConfigError. One's own estimator may read any."""
    if not ADVANTAGES[advantage].__module__.startswith("palestra."):
        return
    for key, readers in READERS.items():
        field = type(config).model_fields.get(key)
        given = None if field is None else getattr(config, key)
        if field is not None and given is not None and given != field.default and advantage not in readers:
            raise ConfigError(
                f"algorithm.{key}={given} is read by advantage={' or '.join(sorted(readers))} only, and the advantage "
                f"is {advantage}; leave {key} out"
            )


# Within a group --------------------------------------------------------------------------------------------


@ADVANTAGES.register("group_zscore")
def group_zscore(rows: Rows, config: AdvantageConfig) -> tuple[PerToken, ...]:
    """(r − mean) / (std + eps) within the group, sample deviation (GRPO, arXiv:2402.03300, eq. 3 ff.).

    Equal rewards give exactly 0.
    """
    return _spread(rows, _by_group(rows, "mean", "std", config.eps))


@ADVANTAGES.register("group_mean")
def group_mean(rows: Rows, config: AdvantageConfig) -> tuple[PerToken, ...]:
    """r − mean of the group, not divided (Dr. GRPO, arXiv:2503.20783: the deviation favours easy and hard tasks)."""
    return _spread(rows, _by_group(rows, "mean"))


@ADVANTAGES.register("group_mean_batch_std")
def group_mean_batch_std(rows: Rows, config: AdvantageConfig) -> tuple[PerToken, ...]:
    """r − mean of the group, divided by the deviation of all the step's rewards + eps (arXiv:2508.08221): one scale
    for easy and hard tasks."""
    rewards = [r for group in rewards_by_group(rows).values() for r in group.values()]
    centred = _by_group(rows, "mean")
    if same(rewards):  # then every group is flat
        return _spread(rows, centred)
    deviation = float(np.std(rewards, ddof=1)) + config.eps
    return _spread(rows, {name: value / deviation for name, value in centred.items()})


@ADVANTAGES.register("rloo")
def rloo(rows: Rows, config: AdvantageConfig) -> tuple[PerToken, ...]:
    """r − mean of the *other* members: (r − mean)·G/(G − 1) (RLOO, arXiv:2402.14740). An episode's own reward
    is not in its baseline, which keeps the gradient unbiased."""
    return _spread(rows, _by_group(rows, "leave_one_out"))


@ADVANTAGES.register("rloo_zscore")
def rloo_zscore(rows: Rows, config: AdvantageConfig) -> tuple[PerToken, ...]:
    """As ``rloo``, divided by the deviation of the other members + eps; not divided where those are all the same."""
    return _spread(rows, _by_group(rows, "leave_one_out", "leave_one_out_std", config.eps))


# Over the whole step ---------------------------------------------------------------------------------------


@ADVANTAGES.register("reinforce")
def reinforce(rows: Rows, config: AdvantageConfig) -> tuple[PerToken, ...]:
    """The return from the token on, compared with nothing (Williams 1992). The one estimator for which equal rewards
    are not 0."""
    return _to_go(rows, _rewards(rows), config)


@ADVANTAGES.register("reinforce_baseline")
def reinforce_baseline(rows: Rows, config: AdvantageConfig) -> tuple[PerToken, ...]:
    """The return from the token on, less the mean reward of all the step's episodes (Williams 1992, section 4)."""
    return _to_go(rows, _scored(_rewards(rows), "mean"), config)


@ADVANTAGES.register("reinforce_pp")
def reinforce_pp(rows: Rows, config: AdvantageConfig) -> tuple[PerToken, ...]:
    """The return from the token on, r − β·Σ_{i ≥ t} KL_i, whitened over all tokens of the step (REINFORCE++,
    arXiv:2501.03262)."""
    return whiten(reinforce(rows, config), [s.loss_mask for s in rows.samples])


@ADVANTAGES.register("reinforce_pp_baseline")
def reinforce_pp_baseline(rows: Rows, config: AdvantageConfig) -> tuple[PerToken, ...]:
    """r − mean of the group, then whitened over all tokens of the step (REINFORCE++-baseline, arXiv:2501.03262): the
    scale is the step's, not the group's, so a group of nearly equal rewards is not blown up."""
    return whiten(group_mean(rows, config), [s.loss_mask for s in rows.samples])


# Numbers ---------------------------------------------------------------------------------------------------


def same(rewards: Collection[float]) -> bool:
    """Whether all rewards are the same, rounding aside: then there is nothing to learn from comparing them.

    >>> same([0.1 + 0.2, 0.3]), same([1.0, 0.0]), same([])
    (True, False, True)
    """
    return not len(rewards) or bool(np.ptp(list(rewards)) <= SAME)


def score(
    rewards: Sequence[float], baseline: Baseline, scale: Scale = "none", *, eps: float = 0.0, ddof: int = 1
) -> Floats:
    """One group's rewards, float64[G], less a baseline and divided by a deviation + eps.

    baseline: the mean of all, or of the others. scale: not at all, the deviation of all, or of the others; a deviation
    of rewards that are all the :func:`same`, or of a single one, does not divide. ddof: 1 = sample deviation, the
    default everywhere here; 0 = of the population. Equal rewards give exactly 0, and so does a single one.

    >>> score([1.0, 0.0, 0.0, 1.0], "leave_one_out").round(6).tolist()
    [0.666667, -0.666667, -0.666667, 0.666667]
    >>> score([1.0, 0.0, 0.0, 1.0], "mean", "std", eps=1e-4, ddof=0).round(4).tolist()
    [0.9998, -0.9998, -0.9998, 0.9998]
    """
    r: Floats = np.asarray(rewards, np.float64)
    if same(r):
        return np.zeros_like(r)
    centred: Floats = r - r.mean()
    if baseline == "leave_one_out":
        centred *= len(r) / (len(r) - 1)
    if scale == "none":
        return centred
    if scale == "std":
        return centred / (float(r.std(ddof=ddof)) + eps)
    others = [np.delete(r, i) for i in range(len(r))]
    deviations: Floats = np.array([1.0 if same(o) else float(o.std(ddof=ddof)) + eps for o in others])
    return centred / deviations


def score_parts(parts: Mapping[str, Sequence[float | None]], *, eps: float = 1e-4) -> Floats:
    """Each part of the reward z-scored within the group by itself, then summed (GDPO, arXiv:2601.05242): a part with a
    small range is not drowned. A part that abstains (None) for a member adds 0 there and is left out of the others'
    mean and deviation.

    >>> score_parts({"a": [1.0, 0.0, 1.0, 0.0], "b": [0.2, 0.2, 0.4, None]}).round(6).tolist()
    [0.289025, -1.442726, 2.019577, -0.865875]
    """
    columns = [np.array([np.nan if v is None else v for v in values], np.float64) for values in parts.values()]
    total = np.zeros(len(columns[0]) if columns else 0)
    for column in columns:
        given = np.isfinite(column)
        total[given] += score(column[given].tolist(), "mean", "std", eps=eps)
    return total


def whiten(
    values: Sequence[PerToken], masks: Sequence[BoolArray], *, eps: float = 1e-8, centre: bool = True, ddof: int = 0
) -> tuple[PerToken, ...]:
    """(x − mean) / √(variance + eps) over the tokens where the masks are True, 0 elsewhere.

    ddof: 0 = the population's variance, 1 = the sample's. ``centre=False`` scales and leaves the mean. Values that are
    all the :func:`same` become exactly 0 (their mean, if not centred).

    >>> [w.round(6).tolist() for w in whiten([np.array([1.0, 2.0, 9.0]), np.array([3.0, 9.0])],
    ...                                      [np.array([True, True, False]), np.array([True, False])])]
    [[-1.224745, 0.0, 0.0], [1.224745, 0.0]]
    """
    own = np.concatenate([v[m] for v, m in zip(values, masks, strict=True)]) if len(values) else np.zeros(0)
    if same(own):
        mean, deviation = (own.mean() if len(own) else 0.0), 1.0
        return tuple(np.where(m, 0.0 if centre else mean, 0.0) for m in masks)
    mean, deviation = own.mean(), np.sqrt(own.var(ddof=ddof) + eps)
    shift = 0.0 if centre else mean
    return tuple(np.where(m, (v - mean) / deviation + shift, 0.0) for v, m in zip(values, masks, strict=True))


# Rows ------------------------------------------------------------------------------------------------------


def rewards_by_group(rows: Rows) -> dict[str, dict[str, float]]:
    """group → episode → reward. An episode that trains as several rows counts once."""
    groups: dict[str, dict[str, float]] = {}
    for s in rows.samples:
        groups.setdefault(s.group, {})[s.episode] = s.reward
    return groups


def episodes_of(rows: Rows) -> dict[Name, list[int]]:
    """Each episode's samples, in the order in which they were played."""
    found: dict[Name, list[int]] = {}
    for i, s in enumerate(rows.samples):
        found.setdefault((s.group, s.episode), []).append(i)
    return found


def zero_variance(rows: Rows) -> int:
    """How many groups carry no signal because all their rewards are the same."""
    return sum(same(r.values()) for r in rewards_by_group(rows).values())


def _rewards(rows: Rows) -> dict[Name, float]:
    return {(s.group, s.episode): s.reward for s in rows.samples}


def _by_group(rows: Rows, baseline: Baseline, scale: Scale = "none", eps: float = 0.0) -> dict[Name, float]:
    """Each group's episodes scored among themselves."""
    scored: dict[Name, float] = {}
    for group, rewards in rewards_by_group(rows).items():
        scored |= _scored({(group, episode): r for episode, r in rewards.items()}, baseline, scale, eps)
    return scored


def _scored(
    rewards: Mapping[Name, float], baseline: Baseline, scale: Scale = "none", eps: float = 0.0
) -> dict[Name, float]:
    return dict(zip(rewards, score(list(rewards.values()), baseline, scale, eps=eps).tolist(), strict=True))


def _spread(rows: Rows, values: Mapping[Name, float]) -> tuple[PerToken, ...]:
    """The episode's value on every token the model wrote."""

    def one(s: Sample) -> PerToken:
        return np.where(s.loss_mask, values[s.group, s.episode], 0.0)

    return tuple(one(s) for s in rows.samples)


def _to_go(rows: Rows, values: Mapping[Name, float], config: AdvantageConfig) -> tuple[PerToken, ...]:
    """As :func:`_spread`; a KL penalty in the rewards counts from the token on only."""
    whole = _spread(rows, values)
    if not config.kl_coef:
        return whole
    before = paid_before(rows, kl_penalties(rows, config.kl, config.kl_coef))
    return tuple(np.where(s.loss_mask, v + b, 0.0) for s, v, b in zip(rows.samples, whole, before, strict=True))
