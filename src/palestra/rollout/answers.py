# SPDX-License-Identifier: Apache-2.0
"""What an environment hands over, looked at before it counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from palestra.types import Message


def rewards_of(paid: Any) -> dict[str, float]:
    """What the environment paid, by name: a number is filed under ``env``; None pays nothing, NaN counts as not scored.

    A number is whatever has a real one's value, a numpy scalar or a tensor of one element too. Raises TypeError for
    anything else, and ValueError for an infinite one.

    >>> rewards_of(1), rewards_of({"a": True, "b": math.nan}), rewards_of(None)
    ({'env': 1.0}, {'a': 1.0}, {})
    """
    named = paid if isinstance(paid, Mapping) else {} if paid is None else {"env": paid}
    numbers = {name: _number(name, value) for name, value in named.items()}
    return {name: value for name, value in numbers.items() if not math.isnan(value)}


def check_messages(messages: Iterable[Message]) -> None:
    """Raise TypeError where something is no message or its content no text. None and a missing one are empty text.

    >>> check_messages(({"role": "user", "content": 7},))
    Traceback (most recent call last):
    TypeError: Observation content must be text, got int
    """
    for message in messages:
        if not isinstance(message, Mapping):
            raise TypeError(f"an observation is made of messages, mappings of role and content; got {message!r}")
        content: object = message.get("content")
        if content is not None and not isinstance(content, str):
            raise TypeError(f"Observation content must be text, got {type(content).__name__}")


def _number(name: str, value: Any) -> float:
    item = getattr(value, "item", None)
    plain = item() if callable(item) else value
    if not isinstance(plain, Real):
        raise TypeError(f"the environment paid {value!r} as {name!r}; a reward is a number")
    if math.isinf(plain):
        raise ValueError(f"the environment paid {plain} as {name!r}; a reward must be finite")
    return float(plain)


__all__ = ["check_messages", "rewards_of"]
