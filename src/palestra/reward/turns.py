# SPDX-License-Identifier: Apache-2.0
"""Process rewards by function: what a function paid for each turn, written on the turns beside the environment's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from palestra.errors import RewardError
from palestra.reward.base import PerTurn
from palestra.types import Episode, Group, Trajectory, Turn

SCORED = "scored"
"""Key of a turn's info: the names among its rewards that functions paid. All others are the environment's."""

Paid = Mapping[int, Mapping[str, float]]
"""id of a turn → what functions paid for it, by name."""


def by_turn(name: str, trajectory: Trajectory, score: PerTurn) -> list[tuple[Turn, float]]:
    """The turns of a trajectory with what each is paid; RewardError where there are not as many.

    >>> from palestra.types import StopReason
    >>> one = Trajectory((Turn((), (), {"role": "assistant"}, "eos"),), StopReason.ENV_TERMINATED)
    >>> [paid for _, paid in by_turn("clue", one, PerTurn((0.5,)))]
    [0.5]
    """
    turns = trajectory.turns
    if len(score.values) != len(turns):
        raise RewardError(
            f"reward function {name!r} paid {len(score.values)} turns of an episode that has {len(turns)}; "
            "give PerTurn one number for each turn of trajectories[i]"
        )
    return list(zip(turns, score.values, strict=True))


def with_payments(trajectories: Sequence[Trajectory], paid: Paid) -> tuple[Trajectory, ...]:
    """The trajectories of one episode with payments on their turns; a turn that stands in two of them stays one."""
    if not paid:
        return tuple(trajectories)
    new: dict[int, Turn] = {}
    for turn in (t for trajectory in trajectories for t in trajectory.turns if id(t) in paid):
        terms = paid[id(turn)]
        info = {**turn.info, SCORED: sorted(terms)}
        new[id(turn)] = dataclasses.replace(turn, rewards={**turn.rewards, **terms}, info=info)
    return _replaced(trajectories, new)


def without_payments(group: Group) -> Group:
    """The group as the environment left it, for scoring recorded episodes again."""
    if not any(SCORED in t.info for e in group.episodes for view in e.trajectories for t in view.turns):
        return group
    episodes: list[Episode] = []
    for episode in group.episodes:
        scored = {id(t): t for view in episode.trajectories for t in view.turns if SCORED in t.info}
        new = {key: _as_played(turn) for key, turn in scored.items()}
        episodes.append(dataclasses.replace(episode, trajectories=_replaced(episode.trajectories, new)))
    return dataclasses.replace(group, episodes=tuple(episodes))


def _as_played(turn: Turn) -> Turn:
    rewards = {name: value for name, value in turn.rewards.items() if name not in turn.info[SCORED]}
    return dataclasses.replace(turn, rewards=rewards, info={k: v for k, v in turn.info.items() if k != SCORED})


def _replaced(trajectories: Sequence[Trajectory], new: Mapping[int, Turn]) -> tuple[Trajectory, ...]:
    return tuple(dataclasses.replace(v, turns=tuple(new.get(id(t), t) for t in v.turns)) for v in trajectories)
