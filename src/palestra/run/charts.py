# SPDX-License-Identifier: Apache-2.0
"""Line charts as inline SVG, for a report that needs nothing but itself. Colours come from the page's CSS."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

Points = Sequence[tuple[float, float]]
Stretch = tuple[str, float, float]
"""A named part of the x axis: name, first, last."""

_COLOURS = 6
_MAX_POINTS = 160


@dataclass(frozen=True, slots=True)
class Frame:
    """The box of a chart in SVG units and the data range it shows."""

    width: int
    height: int
    right: int
    x: tuple[float, float]
    y: tuple[float, float]

    left: int = 44
    top: int = 22
    bottom: int = 24

    def px(self, x: float) -> float:
        low, high = self.x
        return self.left + (x - low) / ((high - low) or 1.0) * (self.width - self.left - self.right)

    def py(self, y: float) -> float:
        low, high = self.y
        return self.height - self.bottom - (y - low) / ((high - low) or 1.0) * (self.height - self.top - self.bottom)


def line_chart(
    series: Mapping[str, Points],
    *,
    title: str,
    width: int = 900,
    height: int = 300,
    phases: Sequence[Stretch] = (),
    dots: Sequence[str] = (),
) -> Markup:
    """An SVG with one line per series, named at its end, dashed apart as well as coloured apart.

    phases: named stretches of the axis, drawn in place of its numbers. dots: series of few, exact points,
    whose points are marked. Each point says its value on hover.

    >>> "eval accuracy" in line_chart({"eval accuracy": [(1, 0.2), (2, 0.9)]}, title="learning curve")
    True
    """
    kept = {name: _thin(points) for name, points in series.items()}
    xs = [x for points in kept.values() for x, _ in points] + [x for _, a, b in phases for x in (a, b)]
    ys = [y for points in kept.values() for _, y in points]
    several = len(kept) > 1
    frame = Frame(width, height, 170 if several else 14, (min(xs), max(xs)), _range(ys))
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" class="chart">',
        *_axes(frame, phases),
    ]
    for i, (name, points) in enumerate(kept.items()):
        parts.append(_series(frame, name, points, i % _COLOURS, marked=name in dots or len(points) == 1))
    if several:
        parts += _names(frame, kept)
    return Markup("\n".join([*parts, "</svg>"]))  # every text in it went through escape


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that divide a range.

    >>> ticks(0, 1)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> ticks(0, 0.03, about=3)
    [0.0, 0.01, 0.02, 0.03]
    """
    span = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(m * power for m in (1, 2, 5, 10) if span / (m * power) <= about + 1e-9)
    first = math.ceil(low / step - 1e-9)
    return [round((first + i) * step, 10) for i in range(int((high / step) - first + 1 + 1e-9))]


def _range(ys: Sequence[float]) -> tuple[float, float]:
    """The axis: from 0 where the values come near it, to 1 where they are shares, else to the largest value."""
    low, high = min(ys), max(ys)
    if low >= 0 and (high <= 1 and high > 0.3):
        return 0.0, 1.0
    if low >= 0 and low < 0.6 * high:
        low = 0.0
    pad = 0.06 * ((high - low) or abs(high) or 1.0)
    return (low if low == 0 else low - pad), high + pad


def _thin(points: Points) -> list[tuple[float, float]]:
    """At most about 160 points: the means of consecutive ones."""
    size = math.ceil(len(points) / _MAX_POINTS)
    pieces = [points[i : i + size] for i in range(0, len(points), size)] if size > 1 else [[p] for p in points]
    return [(piece[-1][0], math.fsum(y for _, y in piece) / len(piece)) for piece in pieces]


def _axes(frame: Frame, phases: Sequence[Stretch]) -> list[str]:
    right, bottom = frame.width - frame.right, frame.height - frame.bottom
    parts = []
    for y in ticks(*frame.y, about=5 if frame.height > 200 else 3):
        at = frame.py(y)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{frame.left - 6}" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>')
    for name, first, _ in phases:
        a = frame.px(first)
        parts.append(f'<line class="phase" x1="{a:.1f}" x2="{a:.1f}" y1="{frame.top - 8}" y2="{bottom}"/>')
        parts.append(f'<text class="name" x="{a + 5:.1f}" y="{frame.top - 8}">{escape(name)}</text>')
    if not phases:
        for x in ticks(*frame.x, about=4):
            at = frame.px(x)
            parts.append(f'<text class="tick" x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{x:g}</text>')
    return parts


def _series(frame: Frame, name: str, points: Points, colour: int, *, marked: bool) -> str:
    path = " ".join(f"{frame.px(x):.1f},{frame.py(y):.1f}" for x, y in points)
    line = f'<polyline class="line c{colour}" points="{path}"/>'
    radius, kind = (3.5, "dot") if marked else (5, "hover")
    spots = [
        f'<circle class="{kind} c{colour}" cx="{frame.px(x):.1f}" cy="{frame.py(y):.1f}" r="{radius}">'
        f"<title>{escape(name)} {y:.4g}</title></circle>"
        for x, y in points
    ]
    return line + "".join(spots)


def _names(frame: Frame, series: Mapping[str, Points]) -> list[str]:
    """The names at the ends of the lines, pushed apart where they would overlap."""
    ends = sorted((frame.py(points[-1][1]), i, name) for i, (name, points) in enumerate(series.items()))
    parts, free, x = [], 0.0, frame.width - frame.right + 8
    excess = max(0.0, 15.0 * len(ends) - (frame.height - frame.top - frame.bottom))
    for left, (wanted, i, name) in zip(range(len(ends) - 1, -1, -1), ends, strict=True):
        at = max(min(wanted, frame.height - frame.bottom + excess - 15 * left), free)
        free = at + 15
        last = series[name][-1][1]
        parts.append(f'<line class="line c{i % _COLOURS}" x1="{x}" x2="{x + 18}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="label" x="{x + 23}" y="{at + 4:.1f}">{escape(name)} {last:.3g}</text>')
    return parts
