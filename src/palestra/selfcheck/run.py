# SPDX-License-Identifier: Apache-2.0
"""Runs known answers: cases → a line each. What is computed from is in the modules of each area."""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from palestra.data.rows import read_jsonl
from palestra.errors import DataError
from palestra.selfcheck.given import Given, NotData
from palestra.selfcheck.judge import Outcome, judge
from palestra.selfcheck.kinds import KINDS, Kind

OWN = Path(__file__).with_name("known_answers.jsonl")
"""The answers that come with the package: worked out by hand, or in a second way."""
AREAS = (
    "advantages", "losses", "reductions", "pairs", "credit", "scores", "settings", "rewards", "tokens", "playing",
    "evaluation", "episodes",
)  # fmt: skip

Status = Literal["passed", "failed", "not run"]


@dataclass(frozen=True, slots=True)
class Case:
    """One known answer: what is given, what must come out."""

    id: str
    area: str
    input: dict[str, Any]
    expected: dict[str, Any]
    why: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """How a case went; ``said`` is why it failed or was not run, or what of it was not looked at."""

    case: Case
    status: Status
    said: str = ""

    @property
    def line(self) -> str:
        """One line for a person."""
        return f"{self.status:<7}  {self.case.id}  {self.case.area}{f': {self.said}' if self.said else ''}"


def read_cases(path: Path) -> Iterator[Case]:
    """The cases of a JSONL file: ``id``, ``area``, ``input``, ``expected`` and, if it has one, ``why``.

    Raises DataError, with file and line, for a line that is no such object.
    """
    for number, row in read_jsonl(path):
        where = f"{path}:{number}"
        for key, wanted in (("id", str), ("area", str), ("input", dict), ("expected", dict)):
            if not isinstance(row.get(key), wanted):
                raise DataError(
                    f"{where}: {key} must be {'a text' if wanted is str else 'an object'}, not {row.get(key)!r}"
                )
        yield Case(row["id"], row["area"], row["input"], row["expected"], str(row.get("why", "")))


def run(cases: Iterable[Case]) -> Iterator[Result]:
    """The result of each case, in order."""
    _load()
    for case in cases:
        yield check(case)


def tell(file: Path | None, echo: Callable[[str], object]) -> bool:
    """A line for each case of ``file`` (or of our own), then ``N passed, N failed, N not run``. False if one failed.

    Raises DataError for a file that cannot be read as cases, before anything is computed.
    """
    cases = list(read_cases(file or OWN))
    if not cases:
        raise DataError(f"{file}: no cases in it; one JSON object per line, see docs/selfcheck.md")
    counts: Counter[Status] = Counter()
    for result in run(cases):
        counts[result.status] += 1
        echo(result.line)
    echo(f"{counts['passed']} passed, {counts['failed']} failed, {counts['not run']} not run")
    return not counts["failed"]


def check(case: Case) -> Result:
    """Compute what the case is about, and hold it against what it expects.

    >>> given, expected = {"ratio": 1.5, "advantage": 1.0, "eps": 0.2}, {"per_token_loss": -1.2}
    >>> check(Case("mine-1", "loss", given, expected)).line
    'passed   mine-1  loss'
    """
    _load()
    fitting = [k for k in KINDS.get(case.area, []) if all(need in case.input for need in k.needs)]
    if not fitting:
        return Result(case, "not run", _unknown(case))
    given = Given(case.input)
    try:
        outcome = _compute(fitting[0], given)
    except NotData as reason:
        return Result(case, "not run", str(reason))
    verdict = judge(outcome, case.expected)
    unread = [f"not read: {', '.join(given.unread)}"] if given.unread and outcome.raised is None else []
    if verdict.wrong:
        return Result(case, "failed", "; ".join(verdict.wrong + unread))
    if not verdict.checked:
        return Result(case, "not run", f"nothing here computes {', '.join(verdict.unchecked) or 'anything it expects'}")
    notes = [f"not checked: {', '.join(verdict.unchecked)}"] if verdict.unchecked else []
    return Result(case, "passed", "; ".join(notes + unread))


def _compute(chosen: Kind, given: Given) -> Outcome:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            values, raised = chosen.check(given), None
        except NotData:
            raise
        except Exception as error:  # a case may expect it, and one bad case must not end the others
            values, raised = {}, error
    return Outcome(values, raised, [str(w.message) for w in caught])


def _unknown(case: Case) -> str:
    if case.area not in KINDS:
        return f"area {case.area} is about behaviour, or unknown; areas of data: {', '.join(sorted(KINDS))}"
    return f"its input describes a behaviour, or has the keys of no kind of area {case.area} (docs/selfcheck.md)"


def _load() -> None:
    """The modules of all areas, which register their kinds."""
    for name in AREAS:
        importlib.import_module(f"palestra.selfcheck.{name}")
