# SPDX-License-Identifier: Apache-2.0
"""``report.html``: what a run did, on one page that needs nothing but itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from palestra.run.charts import Points, Stretch, line_chart
from palestra.run.files import write_text
from palestra.run.metrics import help_of
from palestra.run.progress import clock, number
from palestra.run.report_page import PAGE, STYLE
from palestra.run.text import visible

Decode = Callable[[Sequence[int]], str]

LEARNING = ("eval/accuracy", "train/reward", "reward/")
"""Series of the large chart; a name that ends in ``/`` stands for its family."""

SMALL = (
    *("sft/loss", "train/kl", "rollout/sampled_tokens_mean", "rollout/turns_mean", "rollout/tool_calls_mean"),
    *("rollout/groups_zero_variance", "rollout/truncated_share", "train/entropy", "train/clip_fraction"),
    *("train/grad_norm", "train/loss", "train/learning_rate", "speed/sampled_tokens_per_s", "time/step_s"),
)
"""Metrics that get a small chart of their own."""

_FACTS = ("seed", "steps", "seconds", "model", "command")


def write_report(
    path: str | Path,
    *,
    title: str,
    summary: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    decode: Decode | None = None,
    max_groups: int = 12,
) -> None:
    """Write the report of a run.

    summary: as in ``summary.json``; ``x_before``/``x_after`` become one tile. metrics: rows of ``metrics.jsonl``;
    the steps of consecutive phases are laid end to end. groups: rollouts as plain data (docs/formats.md), the
    first ``max_groups`` shown. decode: token ids → text; with it every token of the model shows its own
    log-probability, without it a strip of marks below the text does.
    """
    page = render_report(title=title, summary=summary, metrics=metrics, groups=groups, decode=decode, limit=max_groups)
    write_text(path, page)


def render_report(
    *,
    title: str,
    summary: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    decode: Decode | None = None,
    limit: int = 12,
) -> str:
    """The page as text; see :func:`write_report`."""
    series, phases = timeline(metrics)
    learning, spans = balanced({_label(n): series[n] for n in _named(LEARNING, series)}, phases)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    shown = len(groups) if len(groups) <= limit else limit
    return environment.from_string(PAGE).render(
        title=title,
        style=Markup(STYLE),
        facts=_facts(summary),
        tiles=_tiles(summary),
        main=line_chart(learning, title="learning curve", phases=spans, dots=["eval accuracy"]) if learning else None,
        charts=[
            {
                "label": _label(name),
                "help": help_of(name) or name,
                "svg": line_chart({_label(name): _own_steps(series[name], phases)}, title=name, width=330, height=140),
            }
            for name in SMALL
            if len(series.get(name, ())) > 1
        ],
        table=_table(series),
        by_token=decode is not None,
        shown=f"{shown} of {len(groups)} groups." if len(groups) > shown else "",
        groups=[_group(g, decode) for g in groups[:shown]],
    )


def timeline(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[tuple[float, float]]], list[Stretch]]:
    """Series by name on one axis, phases end to end: a phase begins where the one before it has its last step.

    Rows of a phase that only measures (``eval/``, ``time/``) lie over the last phase that trains.

    >>> timeline([{"step": 2, "phase": "sft", "sft/loss": 1.5}, {"step": 1, "phase": "rl", "train/reward": 0.5}])
    ({'sft/loss': [(2, 1.5)], 'train/reward': [(3, 0.5)]}, [('sft', 0.0, 2.0), ('rl', 2.0, 3.0)])
    """
    lengths: dict[str, int] = {}
    for row in rows:
        lengths[row["phase"]] = max(lengths.get(row["phase"], 0), row["step"])
    training = {row["phase"] for row in rows if any(n.partition("/")[0] in ("sft", "train", "rollout") for n in row)}
    stretches, at = [], 0
    for phase in [p for p in lengths if p in training or not training]:
        stretches.append((phase, at, at + lengths[phase]))
        at += lengths[phase]
    starts = {phase: first for phase, first, _ in stretches}
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        start = starts.get(row["phase"], stretches[-1][1])
        for name, value in row.items():
            if "/" in name and isinstance(value, int | float) and math.isfinite(value):
                series.setdefault(name, []).append((start + row["step"], value))
    for points in series.values():
        points.sort(key=lambda p: p[0])
    return series, [(phase, float(first), float(last)) for phase, first, last in stretches]


def balanced(series: Mapping[str, Points], phases: Sequence[Stretch]) -> tuple[dict[str, Points], list[Stretch]]:
    """The same on an axis where a phase's width is the root of its steps: sixty RL steps after six hundred of
    warm-up stay readable. Returns positions in [0, 1] and the phases there.

    >>> balanced({"a": [(4, 1.0), (5, 2.0)]}, [("sft", 0, 4), ("rl", 4, 5)])[0]
    {'a': [(0.6666666666666666, 1.0), (1.0, 2.0)]}
    """
    shares = [math.sqrt(last - first) for _, first, last in phases]
    scale = math.fsum(shares) or 1.0
    starts = [math.fsum(shares[:i]) / scale for i in range(len(shares))]

    def place(x: float) -> float:
        i = max((i for i, (_, first, _) in enumerate(phases) if first < x), default=0)
        _, first, last = phases[i]
        return starts[i] + (x - first) / ((last - first) or 1.0) * shares[i] / scale

    placed: dict[str, Points] = {name: [(place(x), y) for x, y in points] for name, points in series.items()}
    ends = [*starts[1:], 1.0] if phases else []
    return placed, [
        (f"{name}, {last - first:g} steps", a, b)
        for (name, first, last), a, b in zip(phases, starts, ends, strict=True)
    ]


def _own_steps(points: Points, phases: Sequence[Stretch]) -> Points:
    """A metric's points with the steps of the phase it begins in."""
    start = max((first for _, first, _ in phases if first < points[0][0]), default=0)
    return [(x - start, y) for x, y in points]


def pieces(tokens: Sequence[int], decode: Decode) -> list[tuple[int, int, str]]:
    """(first token, end, text) pieces of a decoded sequence: one per token, more where a character spans several.

    >>> pieces([104, 195, 169], lambda ids: bytes(ids).decode("utf-8", "replace"))
    [(0, 1, 'h'), (1, 3, 'é')]
    """
    found, start, done = [], 0, ""
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[:end])
        whole = text.startswith(done) and not text.endswith("\ufffd")
        if whole or end == len(tokens):
            found.append((start, end, text[len(done) :]))
            start, done = end, text
    return found


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    named = {n: summary[n] for n in _FACTS if summary.get(n) is not None}
    return [("time", clock(v)) if n == "seconds" else (n, str(v)) for n, v in named.items()]


def _tiles(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    tiles = []
    for name, value in summary.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            continue
        stem = name.removesuffix("_after")
        before = summary.get(f"{stem}_before") if stem != name else None
        if name in (*_FACTS, "format") or (name.endswith("_before") and f"{name[:-7]}_after" in summary):
            continue
        change = value - before if isinstance(before, int | float) else 0.0
        tiles.append(
            {
                "label": stem.replace("_", " "),
                "value": number(value),
                "before": None if before is None else number(before),
                "change": f"{change:+.3f}",
                "direction": "up" if change > 0 else "down" if change < 0 else "",
            }
        )
    return tiles


def _table(series: Mapping[str, Sequence[tuple[float, float]]]) -> list[dict[str, Any]]:
    rows = []
    for name in sorted(series):
        ys = [y for _, y in series[name]]
        values = [number(v) for v in (ys[0], ys[-1], min(ys), max(ys))]
        rows.append({"name": name, "numbers": [*values, str(len(ys))], "help": help_of(name) or ""})
    return rows


def _named(wanted: Sequence[str], series: Mapping[str, object]) -> list[str]:
    return [n for w in wanted for n in sorted(series) if n == w or (w.endswith("/") and n.startswith(w))]


def _label(name: str) -> str:
    area, _, rest = name.partition("/")
    rest = rest.replace("_per_s", "/s").replace("_", " ").removesuffix(" mean")
    return f"{area} {rest}" if area in ("eval", "sft") else rest


def _group(group: Mapping[str, Any], decode: Decode | None) -> dict[str, Any]:
    task = group["task"]
    episodes = [_episode(e, decode) for e in group["episodes"]]
    return {
        "id": visible(str(task["id"])),
        "draw": group["draw"],
        "question": visible(question(task)),
        "answer": visible(str(task.get("answer"))),
        "rewards": ", ".join(e["reward"] for e in episodes),
        "episodes": episodes,
    }


def question(task: Mapping[str, Any]) -> str:
    """The task in one line: its prompt, or the last user message of it."""
    prompt = task["prompt"]
    if not isinstance(prompt, str):
        asked = [m for m in prompt if m.get("role") == "user"] or list(prompt)
        prompt = str(asked[-1].get("content", "")) if asked else ""
    line = " ".join(prompt.split())
    return line if len(line) <= 240 else line[:239] + "…"


def total(trajectory: Mapping[str, Any]) -> float | None:
    """Weighted sum of the reward parts that were scored; None when none was.

    >>> total({"rewards": {"accuracy": {"value": 1.0, "weight": 1.0}, "format": {"value": None, "weight": 0.2}}})
    1.0
    """
    scored = [p["weight"] * p["value"] for p in trajectory["rewards"].values() if p["value"] is not None]
    return math.fsum(scored) if scored else None


def optional(value: float | None, absent: str = "not scored") -> str:
    """A number, or in words that there is none: None is not zero."""
    return absent if value is None or not math.isfinite(value) else number(value)


def _episode(episode: Mapping[str, Any], decode: Decode | None) -> dict[str, Any]:
    views = [_trajectory(t, decode) for t in episode["trajectories"]]
    totals = [r for t in episode["trajectories"] if (r := total(t)) is not None]
    reward = optional(math.fsum(totals) / len(totals) if totals else None)
    excluded = ["excluded"] if episode.get("error") is not None else []
    headline = [f"reward {reward}", *(f"ended: {v['stop']}" for v in views[-1:]), *excluded]
    return {
        "member": episode["member"],
        "error": None if episode.get("error") is None else visible(str(episode["error"])),
        "reward": reward,
        "headline": " · ".join(headline),
        "trajectories": views,
    }


def _trajectory(trajectory: Mapping[str, Any], decode: Decode | None) -> dict[str, Any]:
    spans = [s for turn in trajectory["turns"] for s in turn["spans"]]
    return {
        "agent": trajectory["agent"],
        "stop": str(trajectory["stop"]).replace("_", " "),
        "reward": optional(total(trajectory)),
        "advantage": optional(trajectory.get("advantage"), "none"),
        "tokens": sum(len(s["tokens"]) for s in spans),
        "trained": sum(len(s["tokens"]) for s in spans if s["author"] == "model"),
        "parts": [
            {"name": name, "value": optional(p["value"]), "weight": f"{p['weight']:g}"}
            for name, p in trajectory["rewards"].items()
        ],
        "turns": [_turn(turn, decode) for turn in trajectory["turns"]],
    }


def _turn(turn: Mapping[str, Any], decode: Decode | None) -> dict[str, Any]:
    paid = [f"{name} {number(value)}" for name, value in turn.get("rewards", {}).items()]
    calls = turn.get("tool_calls", 0)
    called = [f"{calls} tool call{'s' if calls != 1 else ''}"] if calls else []
    note = [f"generation ended by {turn['finish_reason']}", *called, *(f"paid: {p}" for p in paid)]
    return {"note": " · ".join(note), "spans": [_span(s, decode) for s in turn["spans"]]}


def _span(span: Mapping[str, Any], decode: Decode | None) -> dict[str, Any]:
    text, logprobs = visible(span["text"]), span.get("logprobs")
    if span["author"] == "template":  # scaffolding is mostly line breaks and marks that one should see
        text = text.replace("\n", "⏎\n").removesuffix("\n")
    shown: dict[str, Any] = {"author": span["author"], "role": span["role"], "text": text, "pieces": [], "strip": []}
    if logprobs is None:
        return shown
    if decode is None:
        shown["strip"] = [_token(span, i, i + 1, "") for i in range(len(logprobs))]
    else:
        shown["pieces"] = [_token(span, a, b, visible(t)) for a, b, t in pieces(span["tokens"], decode)]
    return shown


def _token(span: Mapping[str, Any], start: int, end: int, text: str) -> dict[str, str]:
    """What hovering says about the tokens from ``start`` to ``end``: id, log-prob in nats, probability, version."""
    said = []
    for token, logprob in islice(zip(span["tokens"], span["logprobs"], strict=True), start, end):
        said.append(f"token {token}: log-prob {logprob:.3f} (p = {math.exp(logprob):.3f})")
    least = math.exp(min(span["logprobs"][start:end]))
    kind = "rare" if least < 0.1 else "maybe" if least < 0.5 else "sure"
    return {"text": text, "kind": kind, "title": f"{', '.join(said)}, policy version {span.get('version')}"}
