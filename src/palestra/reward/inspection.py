# SPDX-License-Identifier: Apache-2.0
"""What the parts of a reward do on recorded episodes: their distributions, how much signal groups carry, and which
parts pull together or apart.

Everything about two parts is measured within groups (values less their group's mean), because that is all that an
advantage sees.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from palestra.reward.rubric import Rubric
from palestra.types import Group, RewardTerm

CONFLICT, SAME = -0.3, 0.95
BINS = 10
FLAT = 1e-9
TOTAL = "reward"

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Part:
    """One part over all episodes; ``reward`` is their weighted sum.

    scored, missing: episodes with and without a value. counted: share of the scored ones whose weight is not 0 (a
    gate may close). flat_groups: share of the groups in which it does not vary. pull: its share of the reward's
    variance within groups, negative where it works against the rest; None when the reward does not vary.
    histogram: episodes in ten equal bins from low to high.
    """

    name: str
    weight: float
    scored: int
    missing: int
    counted: float
    mean: float | None
    std: float | None
    low: float | None
    high: float | None
    flat_groups: float | None
    pull: float | None
    histogram: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Correlation of two parts within groups, each with the sign of its weight: −1 pull apart, 1 say the same."""

    a: str
    b: str
    correlation: float
    episodes: int

    @property
    def verdict(self) -> str:
        """``conflict``, ``same`` or nothing.

        >>> Pair("right", "brief", -0.6, 80).verdict
        'conflict'
        """
        return "conflict" if self.correlation < CONFLICT else "same" if self.correlation > SAME else ""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found. failed: episodes that ended with an error, in no other number. no_signal: share of the groups
    whose members all got the same reward, and teach nothing."""

    groups: int
    episodes: int
    failed: int
    no_signal: float | None
    parts: tuple[Part, ...]
    pairs: tuple[Pair, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = asdict(self)
        for pair, found in zip(plain["pairs"], self.pairs, strict=True):
            pair["verdict"] = found.verdict
        return plain


def score_again(rubric: Rubric, groups: Iterable[Group]) -> list[Group]:
    """The groups with the terms of this rubric in the place of the recorded ones."""

    async def scored() -> list[Group]:
        return [await rubric.score(group) for group in groups]

    return asyncio.run(scored())


def inspect_groups(groups: Sequence[Group]) -> Inspection:
    """The parts of recorded (or rescored) groups.

    >>> inspect_groups([]).episodes
    0
    """
    rows = [_terms(group) for group in groups]
    names = list(dict.fromkeys(name for group in rows for terms in group for name in terms))
    totals = [[_total(terms) for terms in group] for group in rows]
    centred_total = _centred(totals)
    weights = {n: max((t[n].weight for g in rows for t in g if n in t), key=abs, default=0.0) for n in names}
    paid = {n: _centred([[_paid(t, n) for t in g] for g in rows]) for n in names}
    parts = [_part(n, weights[n], [[t.get(n) for t in g] for g in rows], _pull(paid[n], centred_total)) for n in names]
    total = _part(TOTAL, 1.0, [[None if v is None else RewardTerm(v) for v in g] for g in totals], None)
    signed = {n: math.copysign(1.0, weights[n]) * _centred([[_value(t, n) for t in g] for g in rows]) for n in names}
    pairs = [_pair(a, b, signed) for i, a in enumerate(names) for b in names[i + 1 :]]
    return Inspection(
        groups=len(groups),
        episodes=sum(map(len, rows)),
        failed=sum(e.error is not None for g in groups for e in g.episodes),
        no_signal=total.flat_groups,
        parts=(*parts, total),
        pairs=tuple(sorted((p for p in pairs if p is not None), key=lambda p: p.correlation)),
    )


def _terms(group: Group) -> list[Mapping[str, RewardTerm]]:
    good = (e for e in group.episodes if e.error is None and e.trajectories)
    return [e.trajectories[-1].rewards for e in good]


def _value(terms: Mapping[str, RewardTerm], name: str) -> float | None:
    return terms[name].value if name in terms else None


def _paid(terms: Mapping[str, RewardTerm], name: str) -> float | None:
    value = _value(terms, name)
    return None if value is None else value * terms[name].weight


def _total(terms: Mapping[str, RewardTerm]) -> float | None:
    scored = [t.weight * t.value for t in terms.values() if t.value is not None]
    return math.fsum(scored) if scored else None


def _centred(groups: Sequence[Sequence[float | None]]) -> Floats:
    """float64[episodes]: each value less its group's mean, NaN where there is none."""
    out: list[float] = []
    for group in groups:
        scored = [v for v in group if v is not None]
        mean = math.fsum(scored) / len(scored) if scored else math.nan
        out += [math.nan if v is None else v - mean for v in group]
    return np.array(out, np.float64)


def _pull(part: Floats, total: Floats) -> float | None:
    both = ~np.isnan(part) & ~np.isnan(total)
    variance = float(np.sum(total[both] ** 2))
    return float(np.sum(part[both] * total[both]) / variance) if variance > FLAT else None


def _pair(a: str, b: str, centred: Mapping[str, Floats]) -> Pair | None:
    x, y = centred[a], centred[b]
    both = ~np.isnan(x) & ~np.isnan(y)
    x, y = x[both], y[both]
    size = math.sqrt(float(np.sum(x**2)) * float(np.sum(y**2)))
    return Pair(a, b, float(np.sum(x * y) / size), int(both.sum())) if size > FLAT else None


def _part(name: str, weight: float, groups: Sequence[Sequence[RewardTerm | None]], pull: float | None) -> Part:
    values = [[t.value for t in g if t is not None and t.value is not None] for g in groups]
    every = np.array([v for g in values for v in g], np.float64)
    counted = [t.weight != 0 for g in groups for t in g if t is not None and t.value is not None]
    varied = [max(g) - min(g) > FLAT for g in values if len(g) > 1]
    empty = len(every) == 0
    return Part(
        name=name,
        weight=weight,
        scored=len(every),
        missing=sum(map(len, groups)) - len(every),
        counted=0.0 if empty else sum(counted) / len(counted),
        mean=None if empty else float(every.mean()),
        std=None if empty else float(every.std()),
        low=None if empty else float(every.min()),
        high=None if empty else float(every.max()),
        flat_groups=1.0 - sum(varied) / len(varied) if varied else None,
        pull=pull,
        histogram=() if empty else tuple(int(n) for n in np.histogram(every, BINS)[0]),
    )
