# SPDX-License-Identifier: Apache-2.0
"""``report.html`` of a sweep: every trial in a table, and how the result moves with each key. Nothing is fetched."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape

from palestra.run.charts import Frame, line_chart, ticks
from palestra.run.files import write_text
from palestra.run.report_page import STYLE

WIDTH, HEIGHT = 420, 240

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title><style>{{ style }}</style></head><body><main>
<h1>{{ title }}</h1>
<p class="soft">{{ trials | length }} trials by {{ method }}; {{ direction }} {{ metric }}.
Best: trial {{ best }}, {{ metric }} {{ best_value }}.</p>
<h2>Results in the order of trials</h2>
<div class="card">{{ course }}</div>
<h2>By key</h2>
<div class="charts">{% for name, chart in charts %}
<div class="card"><h3>{{ name }}</h3>{{ chart }}</div>{% endfor %}</div>
<h2>Trials</h2>
<div class="scroll"><table><thead><tr><th class="n">trial</th>{% for name in names %}<th class="n">{{ name }}</th>
{% endfor %}<th class="n">{{ metric }}</th><th></th><th class="n">seconds</th></tr></thead><tbody>
{% for row in trials %}<tr><td class="n num">{{ row.number }}</td>
{% for value in row.given %}<td class="n num">{{ value }}</td>{% endfor %}
<td class="n num{{ " up" if row.number == best else "" }}">{{ row.value }}</td>
<td>{{ row.status }}{{ ": " + row.error if row.error else "" }}</td><td class="n num">{{ row.seconds }}</td></tr>
{% endfor %}</tbody></table></div>
</main></body></html>
"""


def write_sweep_report(path: Path, summary: Mapping[str, Any]) -> None:
    """Write the page of a sweep's summary."""
    write_text(path, render_sweep(summary))


def render_sweep(summary: Mapping[str, Any]) -> str:
    """The page as text; whatever stands in a config is escaped.

    >>> trial = {"number": 0, "params": {"a<b": 1}, "status": "done", "value": 0.5, "seconds": 1.0, "error": None}
    >>> summary = {"method": "grid", "metric": "m", "direction": "maximize", "best": 0, "best_value": 0.5}
    >>> page = render_sweep(summary | {"trials": [trial]})
    >>> "a&lt;b" in page, "a<b" in page
    (True, False)
    """
    trials = summary["trials"]
    names = list(dict.fromkeys(name for trial in trials for name in trial["params"]))
    shown = [t for t in trials if t["value"] is not None]
    rows = [
        {
            "number": t["number"],
            "given": [_text(t["params"].get(name)) for name in names],
            "value": _text(t["value"]),
            "status": t["status"],
            "error": t["error"],
            "seconds": f"{t['seconds']:.0f}",
        }
        for t in trials
    ]
    return (
        Environment(autoescape=True)
        .from_string(PAGE)
        .render(
            **{key: summary[key] for key in ("method", "metric", "direction", "best")},
            title=f"Sweep over {', '.join(names)}",
            style=Markup(STYLE),
            best_value=_text(summary["best_value"]),
            trials=rows,
            names=names,
            course=_course(shown, summary["direction"] == "maximize"),
            charts=[(name, scatter(shown, name, summary["best"])) for name in names],
        )
    )


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _course(trials: Sequence[Mapping[str, Any]], larger: bool) -> Markup:
    """The result of each trial that came to its end, and the best so far."""
    points = [(float(t["number"]), float(t["value"])) for t in trials]
    best: list[tuple[float, float]] = []
    for trial in trials:
        before = [best[-1][1]] if best else []
        best.append((float(trial["number"]), (max if larger else min)([*before, float(trial["value"])])))
    return line_chart({"best so far": best, "trial": points}, title="results", height=240, dots=("trial",))


def scatter(trials: Sequence[Mapping[str, Any]], name: str, best: int) -> Markup:
    """One dot per trial: the key's value across, the result up. Numbers that span a decade or more are drawn on a
    logarithmic axis, text by its order of appearance."""
    values = [t["params"][name] for t in trials]
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    labels: list[Any] = sorted({*values}) if numeric else list(dict.fromkeys(map(str, values)))
    log = numeric and min(values) > 0 and max(values) / min(values) >= 10
    place: Callable[[Any], float] = (math.log10 if log else float) if numeric else lambda v: float(labels.index(str(v)))
    xs = [place(v) for v in values]
    ys = [float(t["value"]) for t in trials]
    pads = [0.05 * ((max(c) - min(c)) or 1.0) for c in (xs, ys)]
    x_range, y_range = ((min(c) - pad, max(c) + pad) for c, pad in zip((xs, ys), pads, strict=True))
    frame = Frame(WIDTH, HEIGHT, 14, x_range, y_range)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}" class="chart">']
    for y in ticks(*y_range, about=4):
        at = frame.py(y)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{WIDTH - 14}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{frame.left - 6}" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>')
    for label in _few(labels, log) if numeric else labels:
        at = frame.px(place(label))
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(_text(label))}</text>'
        )
    for trial, x, y in zip(trials, xs, ys, strict=True):
        radius = 6.5 if trial["number"] == best else 4
        told = f"trial {trial['number']}: {_text(trial['params'][name])} → {_text(trial['value'])}"
        parts.append(
            f'<circle class="dot c0" cx="{frame.px(x):.1f}" cy="{frame.py(y):.1f}" r="{radius}">'
            f"<title>{escape(told)}</title></circle>"
        )
    return Markup("\n".join([*parts, "</svg>"]))  # every text in it went through escape


def _few(values: Sequence[float], log: bool, most: int = 5) -> Sequence[float]:
    """The values themselves where there are few; else the ends and the middle of the axis, in two digits.

    >>> _few([8, 16, 32], log=True), _few([1e-6, 2e-6, 3e-6, 4e-6, 5e-6, 1e-4], log=True)
    ([8, 16, 32], [1e-06, 1e-05, 0.0001])
    """
    low, high = values[0], values[-1]
    middle = math.sqrt(low * high) if log else (low + high) / 2
    return values if len(values) <= most else [float(f"{value:.1e}") for value in (low, middle, high)]
