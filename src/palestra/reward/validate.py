# SPDX-License-Identifier: Apache-2.0
"""Data whose gold answer fails its own verifier teaches that right is wrong: find it before training does."""

from __future__ import annotations

from collections.abc import Iterable

from palestra.reward.answers import is_correct
from palestra.types import Task

GARBAGE = ("", "I do not know.", "\n" * 50, "#### ", "\\boxed{}", "no number here at all")


def validate(tasks: Iterable[Task], mode: str = "numeric") -> list[str]:
    """One line per task whose gold does not score 1.0, or for which garbage or the bare question does.

    >>> validate([Task("a", "2+2?", "4"), Task("b", "?", "unknown")])
    ["b: the gold answer 'unknown' fails its own verifier"]
    """
    faults: list[str] = []
    for task in tasks:
        gold = str(task.answer)
        written = f"\\boxed{{{gold}}}" if mode in ("boxed", "math") else f"#### {gold}"
        if task.answer is None or not is_correct(written, gold, mode):
            faults.append(f"{task.id}: the gold answer {gold!r} fails its own verifier")
        passing = next((g for g in GARBAGE if is_correct(g, gold, mode)), None)
        if passing is not None:
            faults.append(f"{task.id}: {passing!r} passes for the gold answer {gold!r}")
    return faults
