# SPDX-License-Identifier: Apache-2.0
"""Rewards: named, weighted functions over episodes, each part logged apart.

A reward function is called by keyword, as TRL calls it::

    def brevity(prompts, completions, **columns) -> list[float | None]:
        return [-0.001 * len(c) for c in completions]

``prompts`` and ``completions`` are strings for text environments and message lists for chat ones. ``columns``
are the task's columns (``answer``, ``task_id`` and everything in ``meta``), one value per completion, plus
``trajectories`` for functions that look at turns, tool calls or tokens. None abstains. An exception in a
completion's place says that scoring this one failed: it counts as one that was raised. A :class:`PerTurn` in its place
says which turn earned what.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from palestra.errors import RewardError
from palestra.registry import Registry


@dataclass(frozen=True, slots=True)
class PerTurn:
    """A process reward: one finite number for each turn of the trajectory that was scored.

    The part's value is their sum. Credit by turns (``turn_group_mean`` and its like, ``gae``) gives each turn its own;
    credit by episodes sees the sum.

    >>> PerTurn((0.25, 0.5)).total
    0.75
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(float(v) for v in self.values))
        if not all(math.isfinite(v) for v in self.values):
            raise RewardError(f"PerTurn{self.values}: what a turn is paid must be finite; return None to abstain")

    @property
    def total(self) -> float:
        """What the whole episode is paid."""
        return math.fsum(self.values)


Scores = Sequence[float | None] | Sequence[float | PerTurn | Exception | None]
RewardFunction = Callable[..., Scores | Awaitable[Scores]]


@runtime_checkable
class Stateful(Protocol):
    """A reward function that remembers: what it remembers is part of a checkpoint, as plain data."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


REWARDS: Registry[RewardFunction] = Registry("reward")
"""Reward functions ready to use, by name."""
FACTORIES: Registry[Callable[..., RewardFunction]] = Registry("reward with options")
"""Functions that take a part's options and return its reward function. One that has a parameter ``policy`` gets the
:class:`~palestra.model.loading.LoadedModel` in training there, None where there is none; it is no option."""
PENALTIES: set[str] = set()
"""Names of those whose value says how bad something is: their weight is negative, or 0."""
