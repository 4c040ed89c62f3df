# SPDX-License-Identifier: Apache-2.0
"""``palestra doctor RUN``: the health rules over what a run has logged, finished or still running."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra import config as configuration
from palestra.errors import RunError
from palestra.run.directory import read_run
from palestra.run.health import FORMAT, Alarm, Monitor, numbers
from palestra.run.health_facts import Rails
from palestra.run.health_rules import RULES
from palestra.run.trackers import read_metrics

_WIDTH = 110
HEARD = frozenset(rule.phase for rule in RULES)
"""The phases that there are rules for."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the rules say about a run. steps: the last step of each phase. over: number of the alarm → the first step
    without it, for those that did not last to the end. finished: the run wrote its summary."""

    run: str
    finished: bool
    steps: Mapping[str, int]
    alarms: tuple[Alarm, ...]
    over: Mapping[int, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        alarms = [{**alarm.to_dict(), "over": self.over.get(i)} for i, alarm in enumerate(self.alarms)]
        return {
            "format": FORMAT,
            "run": self.run,
            "finished": self.finished,
            "steps": dict(self.steps),
            "alarms": alarms,
        }

    def text(self) -> str:
        """For people: a head, then each alarm with its cause and what to change."""
        played = ", ".join(f"{step} {phase} steps" for phase, step in self.steps.items()) or "no step yet"
        n = len(self.alarms)
        count = "no alarm" if n == 0 else "1 alarm" if n == 1 else f"{n} alarms"
        if unheard := [phase for phase in self.steps if phase not in HEARD]:
            count += f" ({', '.join(unheard)} has no rules)"
        head = f"{self.run}: {'finished' if self.finished else 'not finished'}, {played}; {count}"
        return "\n".join([head, *(self._shown(i, alarm) for i, alarm in enumerate(self.alarms))])

    def _shown(self, i: int, alarm: Alarm) -> str:
        until = f"over since step {self.over[i]}" if i in self.over else "so to the end"
        rows = [("seen", alarm.seen), ("cause", alarm.cause), *(("change", str(change)) for change in alarm.changes)]
        lines = [f"\n{alarm.rule} ({alarm.phase}): since step {alarm.since}, rang at step {alarm.step}, {until}"]
        for name, text in rows:
            lines.append(textwrap.fill(text, _WIDTH, initial_indent=f"  {name:<8}", subsequent_indent=" " * 10))
        return "\n".join(lines)


def diagnose(run: str | Path, *, rails: Rails | None = None) -> Diagnosis:
    """Read ``config.yaml`` and ``metrics.jsonl`` of a run directory and hear them as the run itself would have.

    Reads only. rails: learning rates within which remedies stay (``train/config.py``). Raises RunError where there
    is no run or nothing logged yet, ConfigError and DataError for files that cannot be read.
    """
    run = Path(run)
    read_run(run)
    if not (run / "metrics.jsonl").is_file():
        raise RunError(f"{run} has logged nothing yet (no metrics.jsonl); look again once it has begun")
    monitor = Monitor(configuration.read_yaml(run / "config.yaml"), rails)
    steps: dict[str, int] = {}
    for row in read_metrics(run / "metrics.jsonl"):
        monitor.observe(row["step"], numbers(row), phase=row["phase"])
        steps[row["phase"]] = max(row["step"], steps.get(row["phase"], 0))
    finished = (run / "summary.json").is_file()
    return Diagnosis(str(run), finished, steps, tuple(monitor.alarms), monitor.over)
