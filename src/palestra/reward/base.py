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

from collections.abc import Awaitable, Callable, Sequence

from palestra.registry import Registry

Scores = Sequence[float | None] | Sequence[float | Exception | None]
RewardFunction = Callable[..., Scores | Awaitable[Scores]]
REWARDS: Registry[RewardFunction] = Registry("reward")
"""Reward functions ready to use, by name."""
FACTORIES: Registry[Callable[..., RewardFunction]] = Registry("reward with options")
"""Functions that take a part's options and return its reward function."""
