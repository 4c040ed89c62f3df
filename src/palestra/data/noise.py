# SPDX-License-Identifier: Apache-2.0
"""Mistakes for demonstrations: in the choices (which operation, when to stop), never in the copying of digits.

A model that imitates such demonstrations learns the tool's form and is wrong, even greedily, on the problem
shapes where the mistake is the likelier choice: the part that reinforcement learning then has to find out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from palestra.errors import ConfigError, unknown

RIGHT = "right"


@dataclass(frozen=True, slots=True)
class Slips:
    """Probabilities of the mistakes in one demonstration; at most one happens, the rest is done right.

    wrong_first: the first call uses another operation. wrong_last: the last call does. stop_early: the result
    of the first call is given as the answer. operand: an operand is given as the answer, without any call.
    wrong_answer: every call is right, and an operand is given as the answer all the same.

    >>> Slips(stop_early=0.6, wrong_last=0.1).right
    0.3
    """

    wrong_first: float = 0.0
    wrong_last: float = 0.0
    stop_early: float = 0.0
    operand: float = 0.0
    wrong_answer: float = 0.0

    def __post_init__(self) -> None:
        values = [getattr(self, f.name) for f in fields(self)]
        if not all(0 <= value <= 1 for value in values) or math.fsum(values) > 1 + 1e-9:
            raise ConfigError(f"slip probabilities must be >= 0 and sum to at most 1, got {self}")

    @property
    def right(self) -> float:
        """Probability of a demonstration without a mistake."""
        return round(1.0 - math.fsum(getattr(self, f.name) for f in fields(self)), 12)

    def draw(self, rng: random.Random) -> str:
        """One of the field names, or ``"right"``; always exactly one number of ``rng`` is used."""
        at = rng.random()
        for f in fields(self):
            at -= getattr(self, f.name)
            if at < 0:
                return f.name
        return RIGHT


@dataclass(frozen=True, slots=True)
class Noise:
    """Which mistakes happen on which shape of problem (``task.meta["shape"]``); ``other`` is for shapes not listed.

    >>> Noise.clean().slips("left-add").right
    1.0
    >>> Noise.from_dict({"left-add": {"stop_early": 0.5}}).slips("left-add").right
    0.5
    """

    shapes: Mapping[str, Slips] = field(default_factory=dict)
    other: Slips = field(default_factory=Slips)

    def slips(self, shape: str) -> Slips:
        """The probabilities that hold for problems of this shape."""
        return self.shapes.get(shape, self.other)

    @classmethod
    def clean(cls) -> Noise:
        """No mistakes at all."""
        return cls()

    @classmethod
    def default(cls) -> Noise:
        """Half of the shapes go wrong more often than not (0.6), the others one time in ten.

        Arithmetic problems have the shapes ``{left,right}-{add,mul}``, word problems ``{1,2,3}-step``.
        """
        seldom = Slips(wrong_first=0.03, wrong_last=0.03, stop_early=0.02, operand=0.02)
        often = {
            "left-mul": Slips(stop_early=0.6),
            "right-add": Slips(wrong_last=0.6),
            "2-step": Slips(stop_early=0.6, operand=0.05),
            "3-step": Slips(stop_early=0.6, operand=0.05),
            "1-step": Slips(wrong_first=0.1, operand=0.05),
        }
        return cls(often, seldom)

    @classmethod
    def from_dict(cls, table: Mapping[str, Mapping[str, float]]) -> Noise:
        """From a config: shape → slip → probability; the key ``other`` stands for all shapes not listed."""
        known = [f.name for f in fields(Slips)]
        for shape, slips in table.items():
            for name in slips:
                if name not in known:
                    raise ConfigError(f"noise of shape {shape!r}: " + unknown("slip", name, known))
        made = {shape: Slips(**slips) for shape, slips in table.items()}
        return cls({k: v for k, v in made.items() if k != "other"}, made.get("other", Slips()))
