# SPDX-License-Identifier: Apache-2.0
"""One trial of a sweep, and when it is ended early."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from palestra.config import Config
from palestra.errors import ConfigError, unknown
from palestra.run.metrics import FAMILIES, METRICS

Verb = Literal["rl", "sft", "prefer", "reward-model"]
Direction = Literal["maximize", "minimize"]

PHASES: dict[str, str] = {"rl": "rl", "sft": "sft", "prefer": "prefer", "reward-model": "reward_model"}
"""Verb → the phase of the rows that its training logs; a warm-up before it counts steps of its own."""
_AREAS = {
    "rl": ("train", "rollout", "reward", "eval", "time", "speed"),
    "sft": ("sft", "speed"),
    "prefer": ("prefer", "eval", "speed"),
    "reward-model": ("reward_model", "eval", "speed"),
}
_LESS = {"loss", "error", "errors", "seconds", "s", "truncated", "skipped", "alarms"}
_MORE = {"accuracy", "reward", "format", "margin", "success", "per"}


class PruneConfig(Config):
    """Ends trials that do worse than the median of the others at the same step. metric: the number, as in
    metrics.jsonl (none = held-out accuracy, or the loss of SFT). direction: which way of it is better (none = as its
    name says: less of a loss, more of an accuracy). trials: so many must have ended first. steps: none ends earlier."""

    metric: str | None = None
    direction: Direction | None = None
    trials: int = Field(default=4, ge=1)
    steps: int = Field(default=1, ge=0)

    def name(self, verb: str) -> str:
        """What is read."""
        return self.metric or ("sft/loss" if verb == "sft" else "eval/accuracy")

    def larger(self, verb: str) -> bool:
        """Whether more of it is better."""
        direction = self.direction or direction_of(self.name(verb))
        if direction is None:
            raise ConfigError(f"prune.direction: say whether {self.metric} is to maximize or to minimize")
        return direction == "maximize"

    def check(self, verb: str) -> None:
        """Raises ConfigError where the verb logs no such number, or nobody knows which way of it is better."""
        name, known = self.name(verb), logged(verb)
        of_family = verb == "rl" and any(name.startswith(prefix) and name != prefix for prefix in FAMILIES)
        if name not in known and not of_family:
            raise ConfigError(f"prune.metric: {verb} logs no such number: {unknown('metric', name, known)}")
        self.larger(verb)


def logged(verb: str) -> list[str]:
    """The registered names that a verb's training logs.

    >>> "eval/accuracy" in logged("rl"), "eval/margin" in logged("rl"), "eval/margin" in logged("prefer")
    (True, False, True)
    """
    paired = {name.partition("/")[2] for name in METRICS if name.startswith("prefer/")}
    of_pairs = {f"eval/{name}" for name in paired}
    names = [name for name in METRICS if name.partition("/")[0] in _AREAS[verb]]
    if verb == "rl":
        return [name for name in names if name not in of_pairs or name == "eval/accuracy"]
    return [name for name in names if not name.startswith("eval/") or name in of_pairs]


def direction_of(metric: str) -> Direction | None:
    """Which way of a number is better, where its name says so.

    >>> direction_of("eval/loss"), direction_of("accuracy_after"), direction_of("train/entropy")
    ('minimize', 'maximize', None)
    """
    words = set(re.split("[/_]", metric))
    if words & _LESS and "per" not in words:
        return "minimize"
    return "maximize" if words & _MORE and "std" not in words else None


@dataclass(slots=True)
class Trial:
    """One set of values and what came of it. value: the sweep's metric; None where the trial did not come to its end.
    reports: (step, the number that is pruned by) while it trained. error: why it failed, or at what it was pruned."""

    number: int
    params: dict[str, Any]
    status: Literal["running", "done", "pruned", "failed"] = "running"
    value: float | None = None
    reports: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    error: str | None = None

    def at(self, step: int) -> float | None:
        """The last number reported up to a step."""
        return next((value for s, value in reversed(self.reports) if s <= step), None)


def falls_behind(trial: Trial, others: Sequence[Trial], rule: PruneConfig, *, larger: bool) -> bool:
    """The median rule (Golovin et al. 2017, Vizier, section 3.2): worse at its last step than the median of what
    the trials that ended had reported by then. larger: whether more of the number is better.

    >>> ended = [Trial(n, {}, "done", reports=[(10, 0.1 * n)]) for n in (3, 4, 5)]
    >>> rule = PruneConfig(trials=3)
    >>> [falls_behind(Trial(9, {}, reports=[(10, v)]), ended, rule, larger=True) for v in (0.35, 0.45)]
    [True, False]
    """
    if not trial.reports or trial.reports[-1][0] < rule.steps:
        return False
    step, value = trial.reports[-1]
    seen = [v for other in others if other.status == "done" and (v := other.at(step)) is not None]
    if len(seen) < rule.trials:
        return False
    middle = statistics.median(seen)
    return value < middle if larger else value > middle
