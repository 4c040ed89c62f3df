# SPDX-License-Identifier: Apache-2.0
"""What a health rule looks at: the numbers so far, in windows, and the facts of the config."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Rails = Mapping[tuple[str, bool], tuple[float, float, float]]
"""(kind, adapter) → (lowest, default, highest) learning rate that a pretrained model bears; see ``train/config.py``."""


EQUAL, FAILED = "share of groups with equal rewards", "share of episodes that failed"
SHARES = {
    EQUAL: ("rollout/groups_zero_variance", "rollout/groups"),
    FAILED: ("rollout/errors", "rollout/episodes"),
}
"""Series that are the quotient of two metrics of one row."""

SKIPPED = "updates skipped although there was a signal"


NOISE = 40
"""Values that the noise of a window is estimated from."""


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive values of a series: their mean, its standard error, the steps of the first and the last.

    The error comes from the differences of neighbours, so that a trend is not taken for noise.
    """

    mean: float
    error: float
    since: int
    until: int

    def above(self, other: Window, errors: float) -> bool:
        """True when this mean exceeds the other by more than ``errors`` standard errors of the difference."""
        return self.mean - other.mean > errors * math.hypot(self.error, other.error)


class Series:
    """One metric over the steps that reported it, with running sums, so that a mean of any window costs the same.

    >>> series = Series()
    >>> for step, value in enumerate([1.0, 5.0, 3.0, 1.0], start=1):
    ...     series.append(step, value)
    >>> series.last(2).mean, series.best(2).mean, series.best(2).since
    (2.0, 4.0, 2)
    """

    __slots__ = ("_best", "_jumps", "_sums", "steps", "values")

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self._sums, self._jumps = [0.0], [0.0]
        self._best: dict[tuple[int, float], tuple[int, float, int]] = {}

    def __len__(self) -> int:
        return len(self.values)

    def append(self, step: int, value: float) -> None:
        """Add a value; one for a step that is not after the last (a row read twice) is left out."""
        if self.steps and step <= self.steps[-1]:
            return
        jump = value - self.values[-1] if self.values else 0.0
        self.steps.append(step)
        self.values.append(value)
        self._sums.append(self._sums[-1] + value)
        self._jumps.append(self._jumps[-1] + jump * jump)

    def window(self, first: int, end: int) -> Window:
        """The values ``first`` … ``end - 1``. The noise is that of the 40 values up to there."""
        n, start = end - first, max(end - NOISE, 1)
        variance = (self._jumps[end] - self._jumps[start]) / (2 * max(end - start, 1))
        mean = (self._sums[end] - self._sums[first]) / n
        return Window(mean, math.sqrt(max(variance, 0.0) / n), self.steps[first], self.steps[end - 1])

    def first(self, n: int) -> Window:
        """The first ``n`` values, or all where there are fewer."""
        return self.window(0, min(n, len(self)))

    def last(self, n: int) -> Window:
        """The last ``n`` values, or all where there are fewer."""
        return self.window(max(len(self) - n, 0), len(self))

    def best(self, n: int, sign: float = 1.0) -> Window:
        """The window of ``n`` with the largest mean (``sign=-1``: the smallest), the earliest of equals."""
        seen, top, end = self._best.get((n, sign), (n - 1, -math.inf, n))
        for e in range(seen + 1, len(self) + 1):
            score = sign * (self._sums[e] - self._sums[e - n])
            if score > top:
                top, end = score, e
        self._best[n, sign] = (max(seen, len(self)), top, end)
        return self.window(end - n, end)

    def since(self, test: Callable[[float], bool]) -> int:
        """The first step of the unbroken tail of values that pass the test."""
        at = len(self)
        while at > 0 and test(self.values[at - 1]):
            at -= 1
        return self.steps[min(at, len(self) - 1)]

    def mostly(self, n: int, test: Callable[[float], bool]) -> bool:
        """True when there are ``n`` values and at least four in five of the last ``n`` pass the test."""
        return len(self) >= n and sum(map(test, self.values[-n:])) >= 0.8 * n


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """What the rules need to know of the resolved config. rails: None where no guard rails are known.

    >>> facts = Facts({"model": {"path": "org/m"}, "train": {"learning_rate": 4e-5}, "algorithm": {}, "lora": {"r": 8}},
    ...               {("rl", True): (1e-6, 1e-5, 5e-4)})
    >>> facts.moved_rate("rl", 0.2), facts.moved_rate("rl", 100.0)
    (8e-06, 0.0005)
    """

    values: Mapping[str, Any]
    rails: Rails | None = None

    def get(self, key: str, default: Any = None) -> Any:
        """The value at ``a.b.c``, or the default where there is none."""
        node: Any = self.values
        for part in key.split("."):
            if not isinstance(node, Mapping) or node.get(part) is None:
                return default
            node = node[part]
        return node

    def number(self, key: str, default: float = 0.0) -> float:
        value = self.get(key, default)
        return float(value) if isinstance(value, int | float) else default

    def section(self, phase: str) -> str:
        """The section of the config that a phase trains by."""
        return "train" if phase == "rl" else "warmup" if "algorithm" in self.values else "sft"

    @property
    def from_scratch(self) -> bool:
        return str(self.get("model.path", "")).startswith("builtin:")

    @property
    def metric(self) -> str:
        """The reward part that counts as accuracy."""
        return str(self.get("eval.metric", "accuracy"))

    @property
    def format_part(self) -> str | None:
        """The reward part that looks at form: by its name, or by its function's."""
        parts = self.get("rewards", {})
        named = [
            n for n, p in parts.items() if "format" in f"{n} {p.get('function') if isinstance(p, Mapping) else ''}"
        ]
        return next((n for n in named if n != self.metric), None)

    def weight(self, part: str | None) -> float:
        found = self.get("rewards", {}).get(part)
        return float(found.get("weight", 1.0)) if isinstance(found, Mapping) else float(found or 0.0)

    def weight_key(self, part: str) -> str:
        nested = isinstance(self.get("rewards", {}).get(part), Mapping)
        return f"rewards.{part}.weight" if nested else f"rewards.{part}"

    def warm_steps(self, phase: str) -> int:
        """Steps during which the learning rate still rises."""
        section = self.section(phase)
        return math.ceil(self.number(f"{section}.warmup_ratio") * self.number(f"{section}.steps"))

    def rate(self, phase: str) -> float | None:
        """The phase's learning rate: the configured one, or the default of its kind."""
        default = self.rails[phase, self.lora][1] if self.rails else None
        found = self.get(f"{self.section(phase)}.learning_rate", default)
        return float(found) if found is not None else None

    @property
    def lora(self) -> bool:
        return self.get("lora") is not None

    def moved_rate(self, phase: str, factor: float) -> float | None:
        """The learning rate times ``factor``, within the rails of a pretrained model; None where there is no room."""
        now = self.rate(phase)
        if now is None:
            return None
        new = now * factor
        if self.rails and not self.from_scratch:
            low, _, high = self.rails[phase, self.lora]
            new = min(max(new, low), high)
        new = float(f"{new:.2g}")
        return new if (new < now if factor < 1 else new > now) else None


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """Everything a rule sees: the facts, and one phase's series by metric name (empty for a name never logged)."""

    phase: str
    facts: Facts
    series: dict[str, Series] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Series:
        return self.series.get(name) or Series()

    def add(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        """The numbers of a row; those that are none (None, NaN, infinite) are left out, as in ``metrics.jsonl``."""
        row = {n: float(v) for n, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)}
        for name, (part, whole) in SHARES.items():
            if part in row and row.get(whole):
                row[name] = row[part] / row[whole]
        if "train/updates_skipped" in row:
            row[SKIPPED] = row["train/updates_skipped"] if row.get(EQUAL, 0.0) < 1 else 0.0
        for name, value in row.items():
            self.series.setdefault(name, Series()).append(step, value)


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule's condition is met: since which step, and what was seen. leave_out: keys of remedies that do not fit."""

    since: int
    seen: str
    leave_out: tuple[str, ...] = ()
