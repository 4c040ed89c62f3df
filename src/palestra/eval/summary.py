# SPDX-License-Identifier: Apache-2.0
"""What the examples of an evaluation add up to, as plain data for JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from palestra.eval.examples import Example, error_of
from palestra.eval.metrics import mean, pass_at_k, pass_hat_k, quantile, wilson_interval
from palestra.eval.mistakes import KINDS

BANDS = (0.01, 0.05, 0.10)
"""Distances to the gold number, as shares of it, within which answers are counted."""
DIFFICULTIES: tuple[tuple[str, int, int | None], ...] = (("1-2", 1, 2), ("3-4", 3, 4), ("5+", 5, None))
"""Name, fewest and most steps of each class of tasks."""
SPREADS = ("tokens", "characters", "steps", "turns", "tool_calls", "tool_failures", "seconds")


def summarise(examples: Sequence[Example], ks: Sequence[int] = ()) -> dict[str, Any]:
    """``pass_at_k`` and ``pass_hat_k`` (k → value, interval, tasks), ``numeric_error``, ``per_episode`` (count → mean,
    median, p95, max), ``mistakes`` (kind → how many, and the share of all wrong ones) and ``difficulty``.

    ks: the k to report; without them the powers of two up to the number of samples. A k beyond it has no value.
    Failed episodes are in none of these numbers.
    """
    good = [e for e in examples if e.error is None]
    tasks = by_task(good)
    most = max((len(group) for group in tasks.values()), default=0)
    asked = ks or [k for k in (2**i for i in range(20)) if k <= most]
    return {
        "pass_at_k": {str(k): _over_tasks(tasks, k, pass_at_k) for k in asked},
        "pass_hat_k": {str(k): _over_tasks(tasks, k, pass_hat_k) for k in asked},
        "numeric_error": numeric_error(good),
        "per_episode": {name: spread([float(getattr(e, name)) for e in good]) for name in SPREADS},
        "mistakes": mistakes(good),
        "difficulty": by_difficulty(good),
    }


def by_task(examples: Iterable[Example]) -> dict[str, list[Example]]:
    """The scored examples of each task."""
    tasks: dict[str, list[Example]] = {}
    for example in examples:
        if example.right is not None:
            tasks.setdefault(example.task, []).append(example)
    return tasks


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, 95th percentile and maximum.

    >>> spread([1.0, 2.0, 3.0])
    {'mean': 2.0, 'median': 2.0, 'p95': 2.9, 'max': 3.0}
    """
    return {
        "mean": mean(values),
        "median": quantile(values, 0.5),
        "p95": quantile(values, 0.95),
        "max": max(values, default=None),
    }


def numeric_error(examples: Sequence[Example]) -> dict[str, Any]:
    """How far numeric answers are from the gold.

    numeric: examples with a gold number. read: those whose answer is a number, which ``mean`` and ``median`` of
    |prediction - gold| are over. within: share of all numeric ones whose answer is within 1, 5, 10 % of the gold; no
    answer is within nothing.
    """
    numeric = [e for e in examples if error_of(Example("", 0, "", e.gold, prediction=e.gold)) is not None]
    errors = [found for e in numeric if (found := error_of(e)) is not None]
    absolute = [off for off, _ in errors]
    within = {f"{band:.0%}": mean([float(share <= band) for _, share in errors]) for band in BANDS}
    scale = len(errors) / len(numeric) if numeric else 0.0
    return {
        "numeric": len(numeric),
        "read": len(errors),
        "mean": mean(absolute),
        "median": quantile(absolute, 0.5),
        "within": {name: None if share is None else share * scale for name, share in within.items()},
    }


def mistakes(examples: Sequence[Example]) -> dict[str, dict[str, float]]:
    """Kind of mistake → count, and share of all the wrong ones."""
    wrong = [e for e in examples if e.right is False]
    counts = {kind: sum(e.kind == kind for e in wrong) for kind in KINDS}
    return {kind: {"count": n, "share": n / len(wrong)} for kind, n in counts.items() if wrong}


def readable(examples: Sequence[Example]) -> float | None:
    """Share of the episodes whose answer could be read, where and how it was asked for; None where no task has an
    answer. The format rate where no reward part judges form.

    >>> readable([Example("a", 0, "", "7", prediction="7"), Example("b", 0, "", "7", right=False, kind="format")])
    0.5
    """
    asked = [e for e in examples if e.error is None and e.gold is not None]
    return mean([float(e.prediction is not None and e.kind != "format") for e in asked])


def by_difficulty(examples: Sequence[Example]) -> list[dict[str, Any]]:
    """Accuracy of the tasks of each difficulty that occurs, with Wilson's interval over tasks."""
    rows = []
    for name, low, high in (*DIFFICULTIES, ("unknown", 0, 0)):
        inside = [e for e in examples if _inside(e.difficulty, low, high)]
        rates = [sum(bool(e.right) for e in group) / len(group) for group in by_task(inside).values()]
        if rates:
            interval = wilson_interval(sum(rates), len(rates))
            rows.append({"steps": name, "tasks": len(rates), "accuracy": mean(rates), "interval": interval})
    return rows


def _inside(steps: int | None, low: int, high: int | None) -> bool:
    return low <= (steps or 0) and (high is None or (steps or 0) <= high)


def _over_tasks(
    tasks: Mapping[str, Sequence[Example]], k: int, estimate: Callable[[int, int, int], float | None]
) -> dict[str, Any]:
    """The estimate's mean over the tasks with enough samples, Wilson's interval, and how many tasks these are."""
    found = [estimate(len(group), sum(bool(e.right) for e in group), k) for group in tasks.values()]
    values = [v for v in found if v is not None]
    return {"value": mean(values), "interval": wilson_interval(sum(values), len(values)), "tasks": len(values)}
