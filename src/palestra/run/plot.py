# SPDX-License-Identifier: Apache-2.0
"""Curves in a terminal, from block characters (or plain ASCII where the encoding has none)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII = " .:-=+*#@"


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """The last shape of ``values`` in one line of at most ``width`` characters, lowest to highest value.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8)
    '▁▂▃▄▅▆▇█'
    >>> sparkline([2.0, 2.0], 8)
    '▁▁'
    """
    bins = resample(values, width)
    low, high = min(bins), max(bins)
    marks = _ASCII if ascii_only else _BLOCKS
    flat = high - low <= 1e-6 * abs(high)  # rounding noise of a constant is no curve
    return "".join(marks[1 if flat else 1 + round(7 * (v - low) / (high - low))] for v in bins)


def plot(
    points: Sequence[tuple[int, float]], *, width: int, height: int, end: int | None = None, ascii_only: bool = False
) -> list[str]:
    """An area plot of (step, value) points, steps from 1 to ``end``: ``height`` lines and one with the axis.

    Values that share a column are averaged. The value axis is 0 to 1 for values in [0, 1], so that a share reads
    as one.

    >>> for line in plot([(1, 0.0), (2, 0.5), (3, 1.0)], width=20, height=2, end=4):
    ...     print(line.rstrip())
      1.00 ┤      ███
      0.00 ┤   ██████
            1          4
    """
    end = max(end or 0, points[-1][0], 1)
    values = [v for _, v in points]
    low, high = min(values), max(values)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    span = (high - low) or 1.0
    columns = max(width - 8, 1)
    filled = [(v - low) / span * height * 8 for v in _columns(points, columns, end)]  # in eighths of a line
    marks, edge = (_ASCII, "|") if ascii_only else (_BLOCKS, "┤")
    lines = []
    for row in range(height - 1, -1, -1):
        at = {height - 1: f"{high:6.4g}", 0: f"{low:6.4g}"}.get(row, "")
        if span < 100:
            at = {height - 1: f"{high:6.2f}", 0: f"{low:6.2f}"}.get(row, "")
        lines.append(f"{at:>6} {edge}" + "".join(marks[min(8, max(0, round(f - 8 * row)))] for f in filled))
    lines.append(" " * 8 + "1" + str(end).rjust(columns - 1))
    return lines


def _columns(points: Sequence[tuple[int, float]], columns: int, end: int) -> list[float]:
    """The mean value of each column up to the last point's; a column without a point shows the next one's."""
    found: list[list[float]] = [[] for _ in range(columns)]
    ends = [min(columns, max(1, math.ceil(step * columns / end))) for step, _ in points]
    for stop, (_, value) in zip(ends, points, strict=True):
        found[stop - 1].append(value)
    heights: list[float] = []
    for inside in reversed(found[: max(ends)]):
        heights.append(math.fsum(inside) / len(inside) if inside else heights[-1])
    return heights[::-1]


def resample(values: Sequence[float], width: int) -> list[float]:
    """At most ``width`` values: the means of consecutive, nearly equal pieces.

    >>> resample([1, 3, 5, 7], 2)
    [2.0, 6.0]
    """
    n = min(len(values), width)
    cuts = [round(i * len(values) / n) for i in range(n + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
