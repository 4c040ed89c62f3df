# SPDX-License-Identifier: Apache-2.0
"""Rewards: named, weighted functions over episodes, each part logged apart.

A reward function is called by keyword, as TRL calls it::

    def brevity(prompts, completions, **columns) -> list[float | None]:
        return [-0.001 * len(c) for c in completions]

``prompts`` and ``completions`` are strings for text environments and message lists for chat ones. ``columns``
are the task's columns (``answer``, ``task_id`` and everything in ``meta``), one value per completion, plus
``trajectories`` for functions that look at turns, tool calls or tokens. None abstains. An exception in a
completion's place says that scoring this one failed: it counts as one that was raised.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from palestra.registry import Registry

Scores = Sequence[float | None] | Sequence[float | Exception | None]
RewardFunction = Callable[..., Scores | Awaitable[Scores]]


@runtime_checkable
class Stateful(Protocol):
    """A reward function that remembers: what it remembers is part of a checkpoint, as plain data."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


REWARDS: Registry[RewardFunction] = Registry("reward")
"""Reward functions ready to use, by name."""
FACTORIES: Registry[Callable[..., RewardFunction]] = Registry("reward with options")
"""Functions that take a part's options and return its reward function."""
PENALTIES: set[str] = set()
"""Names of those whose value says how bad something is: their weight is negative, or 0."""
