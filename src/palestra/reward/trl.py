# SPDX-License-Identifier: Apache-2.0
"""What TRL's trainers hand a reward function beside the columns, so that a function written for them runs unchanged.

``trainer_state`` says where training stands; ``log_extra(column, values)`` and ``log_metric(name, value)`` write
something down beside the rewards (TRL 1.9, ``GRPOTrainer._calculate_rewards``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from palestra.errors import RewardError

EXTRAS = ("trainer_state", "log_extra", "log_metric")
"""Arguments that are one for the whole call; every other one is a list with a value per completion."""

NOTES = "reward_notes"
"""Under this key an ``Episode.info`` holds what reward functions logged about the episode, by name."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Where training stands, under the names of transformers' ``TrainerState``.

    global_step: steps that were finished before; max_steps: of the whole run; epoch: passes over the tasks. Outside
    training all are 0.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0


@dataclass(slots=True)
class Log:
    """What the functions of one call log about its completions.

    >>> log = Log(2)
    >>> log.extra("read", ["4", "5"])
    >>> log.metric("share", 0.5)
    >>> log.of(1)
    {'read': '5', 'share': 0.5}
    """

    count: int
    columns: dict[str, list[Any]] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """A value per completion. Raises RewardError where there are more or fewer."""
        if len(values) != self.count:
            raise RewardError(f"log_extra({column!r}, …) got {len(values)} values for {self.count} completions")
        self.columns[str(column)] = [_plain(v) for v in values]

    def metric(self, name: str, value: float) -> None:
        """One number for all completions. Raises RewardError unless it is finite."""
        if not math.isfinite(float(value)):
            raise RewardError(f"log_metric({name!r}, …) got {value!r}; give a finite number")
        self.numbers[str(name)] = float(value)

    def forget(self, columns: Mapping[str, list[Any]], numbers: Mapping[str, float]) -> None:
        """Back to what was logged before."""
        self.columns, self.numbers = dict(columns), dict(numbers)

    def of(self, index: int) -> Mapping[str, Any]:
        """What was logged about one completion."""
        return {name: values[index] for name, values in self.columns.items()} | self.numbers


def _plain(value: Any) -> Any:
    """As it can be written into a file of JSON: numbers, texts and None as they are, what is not finite as None, the
    rest as text."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)
