# SPDX-License-Identifier: Apache-2.0
"""Three rules of thumb for a reward, as far as a tool can check them on episodes.

Each part looks at its own thing; a penalty outweighs the bonuses that it could be traded for; steps on the way pay too.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from palestra.reward.inspection import FLAT, TOTAL, Inspection, Part
from palestra.reward.rubric import Rubric

OWN_THING, PENALTIES, DENSE = "one thing each", "penalties over bonuses", "dense signals"
SPARSE = 0.5
"""Share of groups without signal from which a reward is called sparse."""


@dataclass(frozen=True, slots=True)
class Advice:
    """principle: which rule is hurt. text: by what, and what to do."""

    principle: str
    text: str


def advise(found: Inspection, rubric: Rubric | None = None) -> list[Advice]:
    """What the rules have to say about a reward, given what it did on episodes. Nothing where they are kept.

    >>> from palestra.reward.inspection import inspect_groups
    >>> advise(inspect_groups([]))
    []
    """
    parts = [p for p in found.parts if p.name != TOTAL]
    kinds = ((OWN_THING, _overlaps(found, rubric)), (PENALTIES, _light(parts)), (DENSE, _sparse(found, parts)))
    return [Advice(principle, text) for principle, texts in kinds for text in texts]


def _overlaps(found: Inspection, rubric: Rubric | None) -> Iterator[str]:
    for pair in found.pairs:
        if pair.verdict == "same":
            yield f"{pair.a} and {pair.b} say the same within groups ({pair.correlation:+.2f}): keep one of them"
    for name, (function, _) in (rubric.functions if rubric is not None else {}).items():
        ours = (getattr(function, "__module__", None) or "").startswith("palestra.")
        if not ours and not inspect.getdoc(function):
            yield f"{name} has no docstring: say in one sentence what it looks at; where two sentences meet, split them"


def _light(parts: list[Part]) -> Iterator[str]:
    """Penalties (parts that only ever take) that cost less than a bonus pays. The part that pays most is the aim."""
    ranges = {p.name: sorted((p.weight * p.low, p.weight * p.high)) for p in parts if p.low is not None is not p.high}
    aim = max(ranges, key=lambda name: ranges[name][1], default=None)
    bonuses = {n: high for n, (low, high) in ranges.items() if n != aim and low >= 0 and high > FLAT}
    if not bonuses:
        return
    best = max(bonuses, key=lambda name: bonuses[name])
    for name, (low, high) in ranges.items():
        if high <= 0 and low < -FLAT and -low < bonuses[best]:
            yield (
                f"{name} costs at most {-low:.3g} where {best} pays up to {bonuses[best]:.3g}: what is to be avoided "
                "should cost more than what is nice to have pays"
            )


def _sparse(found: Inspection, parts: list[Part]) -> Iterator[str]:
    if found.no_signal is not None and found.no_signal > SPARSE:
        yield (
            f"{found.no_signal:.0%} of the groups have no signal: pay for steps on the way (partial_credit, step, what "
            "the environment pays each turn), take easier tasks, larger groups or a higher temperature"
        )
    for part in parts:
        if part.weight and part.flat_groups == 1.0:
            yield f"{part.name} varies in no group, so it teaches nothing here: it is kept always, or never met"
