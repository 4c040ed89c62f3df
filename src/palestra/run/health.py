# SPDX-License-Identifier: Apache-2.0
"""The health monitor: metrics in, alarms out. One code path while training and afterwards (``palestra doctor``).

The rules are data, in ``health_rules.py``; what they look for is in ``health_checks.py``; docs/health.md is for people.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from palestra.run.files import write_text, writing
from palestra.run.health_facts import Facts, Finding, Look, Rails
from palestra.run.health_rules import RULES, Remedy, Rule
from palestra.run.trackers import Metrics, read_metrics

FORMAT = 1
QUIET = 10
"""An alarm is over once its condition has not been met for this many rows; only then may it ring again."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing to change: the config key, why, and where a value can be named, the override to try."""

    key: str
    why: str
    override: str | None = None

    def __str__(self) -> str:
        return f"{self.override or self.key} ({self.why})"


@dataclass(frozen=True, slots=True)
class Alarm:
    """What a rule has to say. since: the step where it began; step: the one where it rang."""

    rule: str
    phase: str
    since: int
    step: int
    seen: str
    cause: str
    changes: tuple[Change, ...]

    def line(self) -> str:
        """Everything on one line."""
        tried = "; try " + " or ".join(map(str, self.changes)) if self.changes else ""
        return f"{self.rule} since step {self.since}: {self.seen}. Usually: {self.cause}{tried}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"format": FORMAT, **asdict(self)}


class Monitor:
    """Takes rows of metrics and says when something is wrong.

    config: the resolved config as plain data. rails: learning rates that a pretrained model bears, so that no remedy
    leaves them.

    >>> monitor = Monitor({"algorithm": {"group_size": 8}, "sampling": {"temperature": 1.0}})
    >>> rows = [{"train/reward": 0.5, "rollout/groups_zero_variance": 4, "rollout/groups": 4}] * 8
    >>> for step, row in enumerate(rows, start=1):
    ...     for alarm in monitor.observe(step, row, phase="rl"):
    ...         print(step, alarm.rule, alarm.seen, alarm.changes[0].override)
    8 group_collapse the reward is always 0.5 algorithm.group_size=16
    """

    def __init__(self, config: Mapping[str, Any], rails: Rails | None = None, rules: Iterable[Rule] = RULES) -> None:
        self.facts = Facts(config, rails)
        self.alarms: list[Alarm] = []
        self.over: dict[int, int] = {}
        self._rules = tuple(rules)
        self._looks: dict[str, Look] = {}
        self._ringing: dict[tuple[str, str], _Ringing] = {}

    def observe(self, step: int, metrics: Metrics, *, phase: str) -> list[Alarm]:
        """One row, as it goes to ``metrics.jsonl``; returns the alarms that begin with it."""
        look = self._looks.setdefault(phase, Look(phase, self.facts))
        look.add(step, metrics)
        new = []
        for rule in self._rules:
            if rule.phase == phase:
                new += self._hear(rule, rule.check(look), step)
        return new

    def _hear(self, rule: Rule, finding: Finding | None, step: int) -> list[Alarm]:
        ringing = self._ringing.get((rule.phase, rule.name))
        if ringing is not None:
            if finding is not None:
                ringing.quiet = []
            else:
                ringing.quiet.append(step)
                if len(ringing.quiet) >= QUIET:
                    self.over[ringing.number] = ringing.quiet[0]
                    del self._ringing[rule.phase, rule.name]
            return []
        if finding is None:
            return []
        changes = tuple(c for r in rule.remedies if (c := _change(r, rule.phase, self.facts, finding)) is not None)
        alarm = Alarm(rule.name, rule.phase, finding.since, step, finding.seen, rule.cause, changes)
        self._ringing[rule.phase, rule.name] = _Ringing(len(self.alarms))
        self.alarms.append(alarm)
        return [alarm]


@dataclass
class _Ringing:
    """An alarm whose condition holds, or did until a moment ago: its number, and the rows without it since."""

    number: int
    quiet: list[int] = field(default_factory=list)


class Watch:
    """A monitor at work in a run directory: alarms are told at once and kept in ``RUN/alarms.jsonl``.

    Give it the rows that the run logs, after a resumed run has rewound them: what ``metrics.jsonl`` holds by then is
    heard first, silently.
    """

    def __init__(
        self, run: Path, config: Mapping[str, Any], *, rails: Rails | None = None, tell: Callable[[str], None]
    ) -> None:
        self._run, self._tell, self._started = run, tell, False
        self.monitor = Monitor(config, rails)

    def observe(self, step: int, metrics: Metrics, *, phase: str) -> None:
        """Hear one row. Call it before the row is logged."""
        if not self._started:
            self._started = True
            self._catch_up()
        new = self.monitor.observe(step, metrics, phase=phase)
        for alarm in new:
            self._tell(alarm.line())
        if new:
            with writing(self._run), (self._run / "alarms.jsonl").open("a", encoding="utf-8") as file:
                file.write(_lines(new))

    def _catch_up(self) -> None:
        rows, kept = self._run / "metrics.jsonl", self._run / "alarms.jsonl"
        for row in read_metrics(rows) if rows.exists() else []:
            self.monitor.observe(row["step"], numbers(row), phase=row["phase"])
        if kept.exists() or self.monitor.alarms:
            write_text(kept, _lines(self.monitor.alarms))


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a row of ``metrics.jsonl``."""
    return {name: value for name, value in row.items() if "/" in name and isinstance(value, int | float)}


def _lines(alarms: Iterable[Alarm]) -> str:
    return "".join(json.dumps(alarm.to_dict(), ensure_ascii=False) + "\n" for alarm in alarms)


def _change(remedy: Remedy, phase: str, facts: Facts, finding: Finding) -> Change | None:
    """A remedy in the words of the run at hand; None where it does not apply or changes nothing."""
    if remedy.key in finding.leave_out:
        return None
    part = facts.format_part
    if "{format}" in remedy.key and part is None:
        return None
    key = remedy.key.replace("{sft}", facts.section("sft")).replace("{train}", facts.section(phase))
    key = facts.weight_key(part) if "{format}" in key and part is not None else key
    parent = key.rpartition(".")[0]
    if parent and facts.get(parent) is None:
        return None
    if remedy.value is None:
        return Change(key, remedy.why)
    value = remedy.value(facts, phase, key)
    now = facts.get(key, facts.rate(phase) if key.endswith("learning_rate") else None)
    if value is None or value == now:
        return None
    was = "" if now is None else f", now {now:g}" if isinstance(now, int | float) else f", now {now}"
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return Change(key, remedy.why + was, f"{key}={shown}")
