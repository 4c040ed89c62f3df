# SPDX-License-Identifier: Apache-2.0
"""What becomes of the measurements: medians, ratios, bars, and the file they are written to row by row."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from palestra.errors import DataError

Record = dict[str, Any]
"""A row as it stands in the JSON file."""
NOT_ASKED = "not asked for"
"""Why a peer that the command line leaves out is absent."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What a row must reach. over: how many times better than each peer, at least. at_most: the value itself.

    stretch: the further aim, as ``over``, with ``limit`` for the share of the computed limit. said: the bar in words,
    where these do not say it.
    """

    over: Mapping[str, float] = field(default_factory=dict)
    at_most: float | None = None
    stretch: Mapping[str, float] = field(default_factory=dict)
    said: str | None = None

    def text(self) -> str:
        """For people.

        >>> Bar({"hf": 2.5, "vllm": 1.4}).text(), Bar(at_most=0.3).text(), Bar().text()
        ('≥ 2.5 × hf, ≥ 1.4 × vllm', '≤ 0.3', '')
        """
        parts = [f"≥ {times:g} × {name}" for name, times in self.over.items()]
        return self.said or ", ".join(parts + ([f"≤ {self.at_most:g}"] if self.at_most is not None else []))

    def met(self, ours: float | None, ratio: Mapping[str, float]) -> bool | None:
        """True or False; None where there is no bar, or a peer it names was not measured and the others are met."""
        if ours is None or not (self.over or self.at_most is not None):
            return None
        found = [ratio[name] >= times if name in ratio else None for name, times in self.over.items()]
        found += [ours <= self.at_most] if self.at_most is not None else []
        return False if False in found else None if None in found else True

    def stretched(self, ratio: Mapping[str, float], limit_share: float | None) -> bool | None:
        """Whether the further aim is reached; None where there is none or it cannot be told."""
        seen = dict(ratio) | ({} if limit_share is None else {"limit": limit_share})
        known = [seen[name] >= least for name, least in self.stretch.items() if name in seen]
        return all(known) if known and len(known) == len(self.stretch) else None


@dataclass(frozen=True, slots=True)
class Check:
    """A condition beside the speed: a value with its least or largest allowed value."""

    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool:
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    runs: the values of each who was measured, ``ours`` among them. better: whether a higher or a lower value is.
    limit: what the machine could reach at most, in ``unit``. absent: peers that were not measured, and why. facts:
    whatever else is worth keeping.
    """

    work: str
    dtype: str
    unit: str
    runs: Mapping[str, Sequence[float]]
    better: Literal["higher", "lower"] = "higher"
    limit: float | None = None
    bar: Bar = Bar()
    checks: Mapping[str, Check] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> Record:
        """As written to the file: what the issue's readers look for first, then the rest."""
        middle = {name: statistics.median(values) for name, values in self.runs.items() if values}
        ours = middle.pop("ours", None)
        ratio = {} if ours is None else {name: self._times(ours, value) for name, value in middle.items()}
        share = None if ours is None or not self.limit else self._times(ours, self.limit)
        met = self.bar.met(ours, ratio)
        if not all(check.met for check in self.checks.values()):
            met = False
        return {
            "work": self.work,
            "dtype": self.dtype,
            "ours": ours,
            "peers": middle,
            "ratio": ratio,
            "limit_share": share,
            "bar": self.bar.text(),
            "met": met,
            "unit": self.unit,
            "better": self.better,
            "limit": self.limit,
            "spread": {name: spread(values) for name, values in self.runs.items() if values},
            "runs": {name: list(values) for name, values in self.runs.items()},
            "stretch": dict(self.bar.stretch),
            "stretch_met": self.bar.stretched(ratio, share),
            "checks": {
                name: {"value": c.value, "at_least": c.at_least, "at_most": c.at_most, "met": c.met}
                for name, c in self.checks.items()
            },
            "absent": dict(self.absent),
            **self.facts,
        }

    def _times(self, ours: float, other: float) -> float:
        """How many times better ours is."""
        return ours / other if self.better == "higher" else other / ours


def spread(values: Sequence[float]) -> float:
    """Largest less smallest, as a share of the median.

    >>> spread([9.0, 10.0, 12.0])
    0.3
    """
    middle = statistics.median(values)
    return (max(values) - min(values)) / middle if middle else 0.0


class Results:
    """The rows of one JSON file. Every row is written as soon as it is known, so a run that is cut goes on with
    ``resume``; a row is its work and dtype, and a new one takes the place of the old."""

    def __init__(self, path: Path | None, *, resume: bool = False) -> None:
        self.path = path
        self.rows: list[Record] = []
        if path is not None and resume and path.exists():
            self.rows = _read(path)

    def find(self, work: str, dtype: str) -> Record | None:
        """The row, or None."""
        return next((r for r in self.rows if (r["work"], r["dtype"]) == (work, dtype)), None)

    def add(self, record: Record) -> None:
        """File a row and write the file, whole or not at all."""
        old = self.find(record["work"], record["dtype"])
        self.rows = [record if row is old else row for row in self.rows] + ([] if old else [record])
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_name(f"{self.path.name}.part")
            part.write_text(json.dumps(self.rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(part, self.path)


def _read(path: Path) -> list[Record]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not all({"work", "dtype"} <= set(row) for row in rows):
            raise ValueError("a row without work or dtype")
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path} is no file of bench rows ({error}); give another --json or leave out --resume"
        ) from None
    return list(rows)
