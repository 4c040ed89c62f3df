# SPDX-License-Identifier: Apache-2.0
"""Bars as inline SVG, for the page of an evaluation. Colours come from the page's CSS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from palestra.run.charts import ticks


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar. value: its length; text: written behind it; interval: drawn as a whisker."""

    name: str
    value: float
    text: str
    interval: tuple[float, float] | None = None


def bar_chart(bars: Sequence[Bar], *, title: str, top: float | None = None, width: int = 430) -> Markup:
    """An SVG of horizontal bars from 0 to ``top`` (the largest value where there is none), each with its number.

    >>> "calculation" in bar_chart([Bar("calculation", 3, "3")], title="mistakes")
    True
    """
    left, right, row, head = 104, 78, 30, 6
    limit = top or max((v for b in bars for v in (b.value, *(b.interval or ()))), default=1.0) or 1.0
    scale = (width - left - right) / limit
    height = head + row * len(bars) + 22
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" class="chart">']
    for at in ticks(0, limit, about=4):
        x = left + at * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{head}" y2="{height - 18}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{height - 4}" text-anchor="middle">{at:g}</text>')
    for i, bar in enumerate(bars):
        y = head + i * row + 5
        end = left + bar.value * scale
        parts.append(f'<text class="label" x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(bar.name)}</text>')
        parts.append(f'<rect class="c0" x="{left}" y="{y}" width="{max(end - left, 0.5):.1f}" height="20" rx="2"/>')
        if bar.interval is not None:
            parts += _whisker(left + bar.interval[0] * scale, left + bar.interval[1] * scale, y + 10)
            end = max(end, left + bar.interval[1] * scale)
        parts.append(f'<text class="label" x="{end + 6:.1f}" y="{y + 14}">{escape(bar.text)}</text>')
    return Markup("\n".join([*parts, "</svg>"]))  # every text in it went through escape


def histogram(values: Sequence[float], *, title: str, bins: int = 20, width: int = 430, height: int = 150) -> Markup:
    """An SVG of how often values fall into ``bins`` equal stretches; whole numbers of a short range each get a bar.

    >>> histogram([1, 1, 2], title="turns").count("<rect")
    2
    """
    low, high = min(values), max(values)
    whole = all(float(v).is_integer() for v in values)
    if whole and high - low < bins:
        low, high, bins = low - 0.5, high + 0.5, int(high - low) + 1
    span = (high - low) or 1.0
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int((value - low) / span * bins))] += 1
    left, bottom, most = 40, height - 22, max(counts)
    step = (width - left - 8) / bins
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" class="chart">']
    for count in ticks(0, most, about=3):
        y = bottom - count / most * (bottom - 8)
        parts.append(f'<line class="grid" x1="{left}" x2="{width - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{count:g}</text>')
    for i, count in enumerate(counts):
        if count:
            tall = count / most * (bottom - 8)
            about = f"{low + (i + 0.5) * span / bins:g}" if whole and bins == span else f"{low + i * span / bins:.3g} …"
            parts.append(
                f'<rect class="c0" x="{left + i * step + 1:.1f}" y="{bottom - tall:.1f}" width="{step - 2:.1f}" '
                f'height="{tall:.1f}"><title>{about}: {count}</title></rect>'
            )
    for at in ticks(low, high, about=5):
        if not whole or float(at).is_integer():
            x = left + (at - low) / span * (width - left - 8)
            parts.append(f'<text class="tick" x="{x:.1f}" y="{height - 6}" text-anchor="middle">{at:g}</text>')
    return Markup("\n".join([*parts, "</svg>"]))


def _whisker(a: float, b: float, y: float) -> list[str]:
    return [
        f'<line class="whisker" x1="{a:.1f}" x2="{b:.1f}" y1="{y}" y2="{y}"/>',
        *(f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 4}" y2="{y + 4}"/>' for x in (a, b)),
    ]
