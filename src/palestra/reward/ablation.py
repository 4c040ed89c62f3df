# SPDX-License-Identifier: Apache-2.0
"""Does a part of a reward change what is learned? Runs with the part off against runs with all parts, seed by seed.

Two runs of one recipe never end alike, so a difference counts only against how much it varies from seed to seed: a
paired t-interval for each measure. Where many measures are compared, one in twenty leaves its 95 % interval by chance;
``moved`` is only what also stands after Holm's correction (1979) over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

LEVEL = 0.05
ALL = "all parts"
MOVED, PERHAPS, STILL, UNKNOWN = "moved", "perhaps", "", "unknown"

Measures = Mapping[str, float | None]
"""What one run was measured by, at its end."""


@dataclass(frozen=True, slots=True)
class Movement:
    """One measure without a part (``value``) against with all parts (``base``), both as means over seeds.

    difference: value − base. low, high: its 95 % interval; p: how often chance alone would differ as much (two-sided);
    None with one seed. verdict: ``moved``; ``perhaps`` (alone it would, among so many it may be chance); nothing (the
    interval says how much could have hidden); ``unknown`` (one seed).
    """

    measure: str
    base: float
    value: float
    difference: float
    low: float | None
    high: float | None
    p: float | None
    verdict: str = STILL


@dataclass(frozen=True, slots=True)
class Ablation:
    """What was found. parts: name → its movements when it is off. training: the runs with all parts, from before their
    first step (``base``) to their end: where training itself moved nothing, no part could."""

    seeds: int
    parts: Mapping[str, tuple[Movement, ...]]
    training: tuple[Movement, ...]

    def moved(self, part: str) -> tuple[str, ...]:
        """The measures that moved when the part was off."""
        return tuple(m.measure for m in self.parts[part] if m.verdict == MOVED)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"seeds": self.seeds, **{k: v for k, v in asdict(self).items() if k != "seeds"}}


def compare(
    runs: Mapping[str, Sequence[Measures]], before: Sequence[Measures], *, tasks: int, all_parts: str = ALL
) -> Ablation:
    """The movements of every part that was switched off.

    runs: variant → one run's measures per seed, in the same order of seeds for all; one is called ``all_parts``, the
    others by the part that was off. before: the same of the policy before its first step. tasks: held-out tasks behind
    each measure. A measure that some run lacks, or that no run differs in, is left out.

    >>> rows = [(0.50, 40.0), (0.54, 43.0), (0.52, 41.0)], [(0.51, 90.0), (0.53, 95.0), (0.53, 92.0)]
    >>> every, brief = [[{"accuracy": a, "length": n} for a, n in row] for row in rows]
    >>> found = compare({ALL: every, "brevity": brief}, every, tasks=200)
    >>> [(m.measure, round(m.difference, 3), m.verdict) for m in found.parts["brevity"]]
    [('accuracy', 0.003, ''), ('length', 51.0, 'moved')]
    """
    base = runs[all_parts]
    others = {part: found for part, found in runs.items() if part != all_parts}
    moves = {part: _movements(base, found, tasks) for part, found in others.items()}
    return Ablation(len(base), _judged(moves), _judged({ALL: _movements(before, base, tasks)})[ALL])


def _movements(base: Sequence[Measures], found: Sequence[Measures], tasks: int) -> tuple[Movement, ...]:
    pairs = list(zip(base, found, strict=True))
    names = dict.fromkeys(name for run in (*base, *found) for name in run)
    made = (_movement(name, [(a.get(name), b.get(name)) for a, b in pairs], tasks) for name in names)
    return tuple(m for m in made if m is not None)


def _movement(name: str, pairs: Sequence[tuple[float | None, float | None]], tasks: int) -> Movement | None:
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if len(known) < len(pairs) or all(a == b for a, b in known):
        return None
    n = len(known)
    before, after = (math.fsum(side) / n for side in zip(*known, strict=True))
    difference = after - before
    if n == 1:
        return Movement(name, before, after, difference, None, None, None, UNKNOWN)
    variance = math.fsum((b - a - difference) ** 2 for a, b in known) / (n - 1)
    # Few seeds may agree by luck: a mean over `tasks` is never known better than one task that turns.
    unit = max(1.0, *(abs(v) for pair in known for v in pair)) / tasks
    error = max(math.sqrt(variance), unit) / math.sqrt(n)
    half = t_quantile(n - 1) * error
    p = two_sided_p(difference / error, n - 1)
    return Movement(name, before, after, difference, difference - half, difference + half, p)


def _judged(moves: Mapping[str, Sequence[Movement]]) -> dict[str, tuple[Movement, ...]]:
    """Holm's step-down over all movements together."""
    places = [(part, i) for part, found in moves.items() for i, m in enumerate(found) if m.p is not None]
    ranked = sorted(places, key=lambda at: moves[at[0]][at[1]].p or 0.0)
    verdicts: dict[tuple[str, int], str] = {}
    standing = True
    for rank, (part, i) in enumerate(ranked):
        p = moves[part][i].p or 0.0
        standing = standing and p * (len(ranked) - rank) <= LEVEL
        verdicts[part, i] = MOVED if standing else PERHAPS if p <= LEVEL else STILL
    return {
        part: tuple(replace(m, verdict=verdicts.get((part, i), m.verdict)) for i, m in enumerate(found))
        for part, found in moves.items()
    }


def two_sided_p(t: float, df: int) -> float:
    """P(|T| ≥ |t|) of Student's t with ``df`` ≥ 1 degrees of freedom (Abramowitz & Stegun 26.7.3 and 26.7.4).

    >>> [round(two_sided_p(t, df), 4) for t, df in ((12.706, 1), (4.303, 2), (2.776, 4), (0.0, 3))]
    [0.05, 0.05, 0.05, 1.0]
    """
    angle = math.atan2(abs(t), math.sqrt(df))
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (cosine, cosine) if df % 2 else (1.0, 1.0)
    for k in range(3 if df % 2 else 2, df - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    if df == 1:
        inside = 2 * angle / math.pi
    elif df % 2:
        inside = 2 / math.pi * (angle + sine * total)
    else:
        inside = sine * total
    return max(0.0, 1.0 - inside)


def t_quantile(df: int, level: float = LEVEL) -> float:
    """The t whose :func:`two_sided_p` is ``level``: the half width of an interval, in standard errors.

    >>> [round(t_quantile(df), 3) for df in (1, 2, 9)]
    [12.706, 4.303, 2.262]
    """
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, df) > level else (low, middle)
    return high
