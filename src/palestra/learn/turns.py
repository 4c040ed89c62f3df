# SPDX-License-Identifier: Apache-2.0
"""Credit by turns: each turn has its return and is compared with its siblings' turns, not with whole episodes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from palestra.learn.advantage import Scale, score
from palestra.learn.batch import PerToken
from palestra.types import BoolArray


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
