# SPDX-License-Identifier: Apache-2.0
"""An evaluation as one HTML page that needs nothing but itself, and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from palestra.eval.charts import Bar, bar_chart, histogram
from palestra.eval.compare import Comparison
from palestra.eval.examples import Example
from palestra.eval.mistakes import KINDS
from palestra.eval.page import PAGE, STYLE
from palestra.eval.summary import SPREADS
from palestra.run.charts import line_chart
from palestra.run.files import write_text
from palestra.run.progress import clock
from palestra.run.report_page import STYLE as RUN_STYLE
from palestra.run.text import visible

SHOWN = 40
"""Examples of a section, and changes of a comparison, on the page."""
EACH_KIND = 12


def write_pages(
    folder: str | Path,
    title: str,
    summary: Mapping[str, Any],
    examples: Sequence[Example],
    comparison: Comparison | None = None,
) -> Path:
    """Write ``report.html`` and ``report.md`` into ``folder``; returns the page's path. summary: what ``summary.json``
    holds."""
    folder = Path(folder)
    write_text(folder / "report.html", render_page(title, summary, examples, comparison))
    write_text(folder / "report.md", render_markdown(title, summary, examples, comparison))
    return folder / "report.html"


def render_page(
    title: str, summary: Mapping[str, Any], examples: Sequence[Example], comparison: Comparison | None = None
) -> str:
    """The page as text."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(PAGE).render(
        title=visible(title),
        style=Markup(RUN_STYLE + STYLE),
        facts=_facts(summary),
        tiles=_tiles(summary),
        charts=_charts(summary, examples),
        tables=_tables(summary),
        comparison=_shown_comparison(comparison),
        shown_changes=SHOWN,
        sections=_sections(examples),
    )


def render_comparison(comparison: Comparison) -> str:
    """The page of a comparison alone."""
    a, b = comparison.names
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    parts = [[name, f"{x:.3f}", f"{y:.3f}", f"{y - x:+.3f}"] for name, (x, y) in comparison.parts.items()]
    both = [comparison.metric, f"{comparison.before:.3f}", f"{comparison.after:.3f}", f"{comparison.difference:+.3f}"]
    return environment.from_string(PAGE).render(
        title=visible(f"{a} and {b}"),
        style=Markup(RUN_STYLE + STYLE),
        facts=[f"compared by {comparison.metric}"],
        tiles=[],
        charts=[],
        tables=[{"label": "Parts", "columns": ["part", "before", "after", "change"], "rows": [both, *parts]}],
        comparison=_shown_comparison(comparison),
        shown_changes=SHOWN,
        sections=[],
    )


def render_markdown(
    title: str, summary: Mapping[str, Any], examples: Sequence[Example], comparison: Comparison | None = None
) -> str:
    """The same numbers as Markdown, with up to three examples of each kind of mistake."""
    lines = [f"# {visible(title)}", "", " · ".join(_facts(summary)), "", "| | | |", "|---|---|---|"]
    lines += [f"| {t['label']} | {t['value']} | {t['note']} |" for t in _tiles(summary)]
    for table in _tables(summary):
        columns = table["columns"]
        lines += ["", f"## {table['label']}", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in table["rows"]]
    if comparison is not None:
        lines += ["", *comparison_markdown(comparison)]
    chosen = [e for kind in KINDS for e in [x for x in examples if x.kind == kind][:3]]
    if chosen:
        lines += [
            "",
            "## Mistakes",
            "",
            "| kind | task | question | read | expected | rule |",
            "|---|---|---|---|---|---|",
        ]
        shown = [[e.kind, e.task, _short(e.question), e.prediction, e.gold, e.rule] for e in chosen]
        lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in shown]
    return "\n".join(lines) + "\n"


def comparison_markdown(comparison: Comparison) -> list[str]:
    """The lines of a comparison: verdict, then what was fixed and broken."""
    lines = [f"## {comparison.names[0]} → {comparison.names[1]}", "", f"{comparison.verdict}.", ""]
    for label, changes in (("fixed", comparison.fixed), ("broken", comparison.broken)):
        lines += [
            f"- {label}: {_cell(c.task)} ({c.before:.3g} → {c.after:.3g}) {_cell(_short(c.question))}"
            for c in changes[:SHOWN]
        ]
    return lines


def _facts(summary: Mapping[str, Any]) -> list[str]:
    samples = f" × {summary['samples']} samples" if summary["samples"] > 1 else ""
    facts = [f"model {summary['model']}"] if "model" in summary else []
    facts += [f"{summary['examples']} tasks{samples}", f"accuracy by {summary['metric']!r}"]
    facts += [f"temperature {summary['temperature']:g}"] if "temperature" in summary else []
    if summary["errors"]:
        facts.append(f"{summary['errors']} episodes failed and do not count")
    return [visible(str(f)) for f in [*facts, f"took {clock(summary['seconds'])}"]]


def _tiles(summary: Mapping[str, Any]) -> list[dict[str, str]]:
    interval = summary.get("wilson95") or summary.get("ci95")
    tiles = [_tile("accuracy", _share(summary["accuracy"]), _between(interval))]
    pass_at, pass_hat = summary["pass_at_k"], summary["pass_hat_k"]
    for sign, found in (("@", pass_at), ("^", pass_hat)):
        most = next((k for k in reversed(found) if found[k]["value"] is not None), None)
        if most is not None and int(most) > 1:
            tiles.append(_tile(f"pass{sign}{most}", _share(found[most]["value"]), _between(found[most]["interval"])))
    numeric = summary["numeric_error"]
    if numeric["read"]:
        within = ", ".join(f"{name}: {_share(share)}" for name, share in numeric["within"].items())
        tiles.append(_tile("numeric error, median", f"{numeric['median']:.4g}", f"within {within}"))
    if summary.get("format_rate") is not None:
        tiles.append(_tile("format", _share(summary["format_rate"]), ""))
    for name, label in (("tokens", "tokens"), ("turns", "turns"), ("tool_calls", "tool calls"), ("seconds", "seconds")):
        found = summary["per_episode"][name]
        if found["mean"] is not None:
            tiles.append(_tile(f"{label}, mean", f"{found['mean']:.3g}", f"95 % below {found['p95']:.3g}"))
    if summary.get("truncated_share") is not None:
        tiles.append(_tile("cut off by a limit", _share(summary["truncated_share"]), ""))
    return tiles


def _tile(label: str, value: str, note: str) -> dict[str, str]:
    return {"label": label, "value": value, "note": note}


def _charts(summary: Mapping[str, Any], examples: Sequence[Example]) -> list[dict[str, Any]]:
    charts: list[dict[str, Any]] = []
    curves = {
        name: [(int(k), found["value"]) for k, found in summary[key].items() if found["value"] is not None]
        for name, key in (("pass@k", "pass_at_k"), ("pass^k", "pass_hat_k"))
    }
    if len(curves["pass@k"]) > 1:
        svg = line_chart(curves, title="pass@k and pass^k", width=430, height=190, dots=list(curves))
        note = "pass@k: at least one of k tries is right; pass^k: all k are. Unbiased; the axis is k."
        charts.append({"label": "Tries", "svg": svg, "note": note})
    rows = summary["difficulty"]
    if rows and [r["steps"] for r in rows] != ["unknown"]:
        bars = [Bar(f"{r['steps']} steps", r["accuracy"], _share(r["accuracy"]), r["interval"]) for r in rows]
        note = ", ".join(f"{r['steps']} steps: {r['tasks']} tasks" for r in rows)
        charts.append({"label": "By difficulty", "svg": bar_chart(bars, title="by difficulty", top=1.0), "note": note})
    mistakes = summary["mistakes"]
    if mistakes:
        bars = [Bar(k, m["count"], f"{m['count']} ({m['share']:.0%})") for k, m in mistakes.items() if m["count"]]
        note = "Of the episodes with a wrong answer; the rule that decided stands beside each example."
        charts.append({"label": "Mistakes", "svg": bar_chart(bars, title="mistakes"), "note": note})
    good = [e for e in examples if e.error is None]
    if good:
        svg = histogram([float(e.tokens) for e in good], title="tokens per episode")
        charts.append({"label": "Length", "svg": svg, "note": "Tokens that the model wrote, episodes by length."})
    return charts


def _tables(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    parts = [[name, _three(value)] for name, value in summary["rewards"].items()]
    stops = [[name.replace("_", " "), _share(value)] for name, value in summary["stops"].items()]
    counts = [[name.replace("_", " "), *(_three(v) for v in summary["per_episode"][name].values())] for name in SPREADS]
    tables = [
        {"label": "Rewards", "columns": ["part", "mean"], "rows": parts},
        {"label": "Per episode", "columns": ["", "mean", "median", "95 % below", "most"], "rows": counts},
        {"label": "How episodes ended", "columns": ["reason", "share"], "rows": stops},
    ]
    tries = [
        [k, _share(found["value"]), _share(summary["pass_hat_k"][k]["value"]), str(found["tasks"])]
        for k, found in summary["pass_at_k"].items()
    ]
    if len(tries) > 1 or summary["samples"] > 1:
        tables.insert(0, {"label": "Tries", "columns": ["k", "pass@k", "pass^k", "tasks"], "rows": tries})
    return [t for t in tables if t["rows"]]


def _sections(examples: Sequence[Example]) -> list[dict[str, Any]]:
    """What to look at first: a few of each kind of mistake, failures, and a few that are right."""
    wrong = [e for kind in (*KINDS, None) for e in [x for x in examples if x.kind == kind and not x.right][:EACH_KIND]]
    failed = [e for e in wrong if e.error is not None]
    wrong = [e for e in wrong if e.error is None]
    sections = [
        ("Wrong answers", f"Up to {EACH_KIND} of each kind; examples.jsonl has every episode.", wrong[:SHOWN]),
        ("Failed episodes", "Failures of the infrastructure: in none of the numbers.", failed),
        ("Right answers", "The first few.", [e for e in examples if e.right][:6]),
    ]
    return [
        {"label": label, "note": note, "examples": [_shown(e) for e in chosen]}
        for label, note, chosen in sections
        if chosen
    ]


def _shown(example: Example) -> dict[str, Any]:
    """An example whose texts can neither steer a terminal nor reorder a page."""
    plain = asdict(example)
    return {k: visible(v) if isinstance(v, str) else v for k, v in plain.items()} | {
        "question": visible(_short(example.question, 300)),
        "stop": example.stop.replace("_", " "),
    }


def _shown_comparison(comparison: Comparison | None) -> dict[str, Any] | None:
    if comparison is None:
        return None
    plain = asdict(comparison) | {"verdict": comparison.verdict}
    for name in ("fixed", "broken"):
        plain[name] = [
            c | {"task": visible(c["task"]), "question": visible(_short(c["question"]))} for c in plain[name]
        ]
    return plain


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.1%}"


def _three(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _between(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"95 % interval {100 * interval[0]:.1f} to {100 * interval[1]:.1f} %"


def _short(text: str, most: int = 160) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _cell(value: object) -> str:
    """Text that stays inside a Markdown table's cell."""
    return visible(" ".join(str(value).split())).replace("|", "\\|")
