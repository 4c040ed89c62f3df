# SPDX-License-Identifier: Apache-2.0
"""Credit by turns: each turn has its return and is compared with its siblings' turns, not with whole episodes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from palestra.learn.advantage import ADVANTAGES, AdvantageConfig, Scale, episodes_of, score
from palestra.learn.batch import PerToken, Rows, Sample
from palestra.learn.gae import returns_to_go
from palestra.learn.shaping import paid_tokens
from palestra.types import BoolArray


@ADVANTAGES.register("turn_group_mean")
def turn_group_mean(rows: Rows, config: AdvantageConfig) -> tuple[PerToken, ...]:
    """A turn's return Σ γ^k r_{turn+k} less the mean of its siblings' turns, on every token of the turn."""
    return _by_turns(rows, config, "none")


@ADVANTAGES.register("turn_group_zscore")
def turn_group_zscore(rows: Rows, config: AdvantageConfig) -> tuple[PerToken, ...]:
    """As ``turn_group_mean``, divided by the deviation of those turns + eps; with ``turn_key: state`` the step level
    of GiGPO (arXiv:2505.10978)."""
    return _by_turns(rows, config, "std")


def _by_turns(rows: Rows, config: AdvantageConfig, scale: Scale) -> tuple[PerToken, ...]:
    paid = paid_turns(rows, config)
    groups: dict[str, list[list[int]]] = {}
    for (group, _), members in episodes_of(rows).items():
        groups.setdefault(group, []).append(members)
    out: dict[int, PerToken] = {}
    for episodes in groups.values():
        returns = [returns_to_go(np.concatenate([paid[i] for i in m]), gamma=config.gamma) for m in episodes]
        keys = None
        if config.turn_key == "state":
            keys = [[key for i in m for key in turn_states(rows.samples[i])] for m in episodes]
        advantages = turn_advantages([r.tolist() for r in returns], keys, scale=scale, eps=config.eps)
        for members, of_turns in zip(episodes, advantages, strict=True):
            for i, values in zip(members, split_turns(of_turns, rows, members), strict=True):
                out[i] = spread_turns(values.tolist(), rows.samples[i].loss_mask, rows.samples[i].turn_ends)
    return tuple(out[i] for i in range(len(rows)))


def paid_turns(rows: Rows, config: AdvantageConfig) -> list[PerToken]:
    """Per sample float64[turns]: what each turn earned, less the KL penalties of its tokens."""
    paid = paid_tokens(rows, config.kl, config.kl_coef)
    return [
        np.bincount(turn_of_token(s)[s.loss_mask], p[s.loss_mask], len(s.turn_ends)).astype(np.float64)
        for s, p in zip(rows.samples, paid, strict=True)
    ]


def split_turns(values: PerToken, rows: Rows, members: Sequence[int]) -> list[PerToken]:
    """An episode's values by turn, (turns,), as one array for each of its samples."""
    return np.split(values, np.cumsum([len(rows.samples[i].turn_ends) for i in members])[:-1])


def turn_of_token(sample: Sample) -> npt.NDArray[np.int64]:
    """int64[T]: which of the sample's turns a token belongs to, what was shown before it included."""
    return np.searchsorted(np.asarray(sample.turn_ends, np.int64), np.arange(len(sample.tokens)))


def turn_starts(sample: Sample) -> npt.NDArray[np.int64]:
    """int64[turns]: index of the first token that the model wrote in each turn."""
    own = np.flatnonzero(sample.loss_mask)
    return own[np.searchsorted(turn_of_token(sample)[own], np.arange(len(sample.turn_ends)))]


def turn_states(sample: Sample) -> list[bytes]:
    """What the model was shown just before each turn, as bytes of its tokens: the state to compare turns by."""
    begins = [0, *(end + 1 for end in sample.turn_ends[:-1])]
    return [sample.tokens[a:b].tobytes() for a, b in zip(begins, turn_starts(sample), strict=True)]


def turn_advantages(
    returns: Sequence[Sequence[float]],
    keys: Sequence[Sequence[Hashable]] | None = None,
    *,
    scale: Scale = "none",
    eps: float = 1e-4,
) -> list[PerToken]:
    """For each episode of one group, float64[turns]: a turn's return less the mean of the turns it is compared with.

    returns: per episode, each turn's return (:func:`~palestra.learn.gae.returns_to_go` of its rewards). keys: per
    episode and turn what makes turns comparable, such as the state the model was in (GiGPO, arXiv:2505.10978);
    without, the turn's index. A turn that has no sibling of its key, or whose siblings all have the same return, has
    advantage exactly 0.

    >>> [a.tolist() for a in turn_advantages([[1.0, 0.0], [0.0, 0.0], [0.5]])]
    [[0.5, 0.0], [-0.5, 0.0], [0.0]]
    """
    if keys is None:
        keys = [range(len(episode)) for episode in returns]
    members: dict[Hashable, list[tuple[int, int]]] = {}
    for e, (episode, of) in enumerate(zip(returns, keys, strict=True)):
        for t, (_, key) in enumerate(zip(episode, of, strict=True)):
            members.setdefault(key, []).append((e, t))
    advantages: list[PerToken] = [np.zeros(len(episode)) for episode in returns]
    for places in members.values():
        scored = score([returns[e][t] for e, t in places], "mean", scale, eps=eps)
        for (e, t), value in zip(places, scored, strict=True):
            advantages[e][t] = value
    return advantages


def spread_turns(values: Sequence[float], loss_mask: BoolArray, turn_ends: Sequence[int]) -> PerToken:
    """float64[T]: each turn's value on every token that the model wrote in it, 0 elsewhere.

    turn_ends: index of the last sampled token of each turn, rising. Raises ValueError where values and turns do not
    fit or a sampled token follows the last turn.

    >>> spread_turns([0.5, -1.0], np.array([False, True, True, False, True]), [2, 4]).tolist()
    [0.0, 0.5, 0.5, 0.0, -1.0]
    """
    if len(values) != len(turn_ends):
        raise ValueError(f"{len(values)} values for {len(turn_ends)} turns")
    turn = np.searchsorted(np.asarray(turn_ends, np.int64), np.arange(len(loss_mask)))
    if np.any(loss_mask & (turn == len(turn_ends))):
        raise ValueError("the model wrote tokens after its last turn")
    return np.where(loss_mask, np.append(np.asarray(values, np.float64), 0.0)[turn], 0.0)
