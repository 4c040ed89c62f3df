# SPDX-License-Identifier: Apache-2.0
"""A case's input, read key by key: what is data, what is a description, and what nobody read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
"""One number per token, turn or episode."""
Bools = npt.NDArray[np.bool_]


class NotData(Exception):
    """The input describes a behaviour in words, so there is nothing to compute from; the message says where."""


class Given:
    """The input of one case. Every key that is looked at is remembered, so that a key nobody read can be told.

    >>> given = Given({"rewards": [1, 0], "note": "any"})
    >>> given.numbers("rewards").tolist(), given.number("eps", 1e-4), given.unread
    ([1.0, 0.0], 0.0001, ['note'])
    >>> Given({"rewards": "all equal"}).numbers("rewards")
    Traceback (most recent call last):
    palestra.selfcheck.given.NotData: rewards is "all equal", which is a description and no number
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.seen: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands."""
        self.seen.add(key)
        return self.data.get(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """One number; text such as ``"-inf (a banned token)"`` counts as the number it begins with."""
        value = self.get(key, default)
        if value is None:
            raise NotData(f"{key} is not given")
        return to_float(value, key)

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))

    def numbers(self, key: str) -> Floats:
        """float64[n]; one number counts as a list of one."""
        value = self.get(key)
        if isinstance(value, Mapping):
            raise NotData(f"{key} is a mapping, not a list of numbers")
        listed = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        return np.array([to_float(v, key) for v in listed], np.float64)

    def table(self, key: str) -> list[Floats]:
        """Rows of numbers, which may differ in length."""
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
            raise NotData(f"{key} is not a list of lists of numbers")
        return [np.array([to_float(v, key) for v in row], np.float64) for row in value]

    def mask(self, key: str, size: int) -> Bools:
        """bool[size]; all True where the key is not given."""
        if self.get(key) is None:
            return np.ones(size, np.bool_)
        return np.atleast_1d(self.numbers(key)).astype(np.bool_)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool | int):
            raise NotData(f"{key} is neither true nor false")
        return bool(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise NotData(f"{key} is not a text")
        return value

    def is_list(self, key: str) -> bool:
        """Whether the value is a list, so that the answer is one too."""
        return isinstance(self.data.get(key), list)

    @property
    def unread(self) -> list[str]:
        """The keys that nothing looked at."""
        return [key for key in self.data if key not in self.seen]


def to_float(value: Any, key: str) -> float:
    """A JSON number, or a text that begins with inf, -inf or nan."""
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        word = value.split(" ")[0].lower()
        if word in ("inf", "-inf", "nan"):
            return float(word)
        raise NotData(f'{key} is "{value}", which is a description and no number')
    raise NotData(f"{key} holds a {type(value).__name__} where a number is needed")


def nested(value: Any) -> Any:
    """Arrays, tensors and NumPy scalars as plain lists and numbers, at any depth."""
    if isinstance(value, Mapping):
        return {k: nested(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [nested(v) for v in value]
    return value.tolist() if hasattr(value, "tolist") else value


def one_or_all(values: Any, listed: bool) -> Any:
    """The list, or its only element where the input was a single number."""
    plain = nested(values)
    return plain if listed else plain[0]
