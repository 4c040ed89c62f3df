# SPDX-License-Identifier: Apache-2.0
"""Which turn of an episode earned what."""

from __future__ import annotations

import math
from collections.abc import Mapping

from palestra.types import Episode, RewardTerm, Turn


def turn_rewards(episode: Episode) -> tuple[tuple[float, ...], ...]:
    """Per trajectory, one number for each turn that sampled; together they are the episode's reward.

    A turn gets what the environment paid for it, times the weight of that part in the rubric (0 behind a closed gate).
    All the rest of the episode's reward (reward functions, payments of turns that sampled nothing) is due at the end,
    on the last turn. A turn that stands in two trajectories is paid in the first.

    >>> import numpy as np
    >>> from palestra.types import Author, Span, StopReason, Task, Trajectory
    >>> said = Span(np.array([9]), Author.MODEL, "assistant", logprobs=np.array([-0.5]), version=0)
    >>> turns = tuple(Turn((said,), (), {"role": "assistant"}, "eos", {"clue": paid}) for paid in (1.0, 2.0))
    >>> terms = {"clue": RewardTerm(3.0, 0.1), "accuracy": RewardTerm(1.0)}
    >>> episode = Episode(Task("t", "?"), (Trajectory(turns, StopReason.ENV_TERMINATED, rewards=terms),))
    >>> [[round(r, 9) for r in row] for row in turn_rewards(episode)]
    [[0.1, 1.2]]
    """
    paid: list[list[float]] = []
    seen: set[int] = set()
    for trajectory in episode.trajectories:
        turns = [t for t in trajectory.turns if t.sampled_tokens]
        paid.append([0.0 if id(t) in seen else _payment(t, trajectory.rewards) for t in turns])
        seen.update(id(t) for t in turns)
    due = (episode.reward or 0.0) - math.fsum(r for row in paid for r in row)
    last = next((row for row in reversed(paid) if row), None)
    if last is not None:
        last[-1] += due
    return tuple(map(tuple, paid))


def _payment(turn: Turn, terms: Mapping[str, RewardTerm]) -> float:
    """What the environment paid for a turn, as far as it counts in the reward."""
    counted = {name: term.weight for name, term in terms.items() if term.value is not None}
    return math.fsum(counted.get(name, 0.0) * value for name, value in turn.rewards.items())
