# SPDX-License-Identifier: Apache-2.0
"""The reward part ``soft_overlong`` in the config of a run: its limits are those of an episode."""

from __future__ import annotations

from typing import Any

OVERLONG = "soft_overlong"
Rewards = dict[str, float | dict[str, Any]]


def overlong_filled(rewards: Rewards | None, tokens: int, *, add: bool = False) -> Rewards | None:
    """The rewards of a config, whose ``soft_overlong`` parts have limits: ``max_len``, where it is left out, is
    ``tokens``, what an episode may sample; ``cache`` is a fifth of ``max_len``, 4096 of 20480 in DAPO
    (arXiv:2503.14476, section 4.1). add: give them such a part if they have none, and let what the environment pays
    count beside it where nothing else is named.

    >>> overlong_filled({"accuracy": 1.0, "soft_overlong": 0.5}, 100)
    {'accuracy': 1.0, 'soft_overlong': {'weight': 0.5, 'max_len': 100, 'cache': 20}}
    >>> overlong_filled(None, 100, add=True)
    {'env': 1.0, 'soft_overlong': {'weight': 1.0, 'max_len': 100, 'cache': 20}}
    """
    given: Rewards = dict(rewards or {})
    if add and not any(_is_overlong(name, entry) for name, entry in given.items()):
        beside: Rewards = given or {"env": 1.0}
        given = {**beside, OVERLONG: 1.0}
    filled: Rewards = {
        name: _with_limits(entry, tokens) if _is_overlong(name, entry) else entry for name, entry in given.items()
    }
    return filled or rewards


def _is_overlong(name: str, entry: float | dict[str, Any]) -> bool:
    return (entry.get("function", name) if isinstance(entry, dict) else name) == OVERLONG


def _with_limits(entry: float | dict[str, Any], tokens: int) -> dict[str, Any]:
    given: dict[str, Any] = dict(entry) if isinstance(entry, dict) else {"weight": entry}
    longest = given.setdefault("max_len", tokens)
    if isinstance(longest, int):  # anything else is refused by the function itself
        given.setdefault("cache", max(1, longest // 5))
    return given
