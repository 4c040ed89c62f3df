# SPDX-License-Identifier: Apache-2.0
"""Is what was computed what a case expects? Each key of the expectation is one demand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TOLERANCE = 1e-6
"""Absolute and relative: known answers are written with six decimals."""

BOUNDS = {"below": -1, "less_than": -1, "at_most": -1, "above": 1, "greater_than": 1, "at_least": 1, "within_s": -1}


@dataclass(slots=True)
class Outcome:
    """What a check computed (name → value), what it raised, what it warned of."""

    values: dict[str, Any] = field(default_factory=dict)
    raised: Exception | None = None
    warned: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Verdict:
    """wrong: a line for each demand that is not met. unchecked: demands in words, which nothing here can test."""

    wrong: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    checked: int = 0


def judge(outcome: Outcome, expected: Mapping[str, Any]) -> Verdict:
    """Hold an outcome against every demand of an expectation (docs/selfcheck.md lists the forms a demand may have).

    >>> judge(Outcome({"loss": 1.0}), {"loss": 1.0000001, "not_loss": 0.8, "property": "is finite"}).unchecked
    ['property']
    >>> judge(Outcome({"loss": 0.8}), {"loss": 1.0, "not_loss": 0.8}).wrong
    ['loss is 0.8, expected 1.0', 'loss is 0.8, expected anything but 0.8']
    """
    verdict = Verdict()
    tolerance = max(float(expected.get("abs_tol", 0.0)), 0.0) or TOLERANCE
    accepts_errors = bool({"raises", "raises_at", "message_mentions", "either", "warns_or_raises"} & expected.keys())
    if outcome.raised is not None and (not accepts_errors or expected.get("raises", "") is None):
        verdict.wrong.append(f"raised {type(outcome.raised).__name__}: {_line(outcome.raised)}")
        return verdict
    for key, wanted in expected.items():
        if key in ("abs_tol", "rel_tol"):
            continue
        said = _demand(key, wanted, outcome, tolerance)
        if said is None:
            verdict.unchecked.append(key)
        else:
            verdict.checked += 1
            verdict.wrong += [said] if said else []
    return verdict


def _demand(key: str, wanted: Any, outcome: Outcome, tolerance: float) -> str | None:
    """ "" where it is met, a line where it is not, None where it cannot be tested."""
    values = outcome.values
    if key == "raises":
        return _raises(wanted, outcome)
    if key == "message_mentions":
        said = "" if outcome.raised is None else str(outcome.raised)
        listed = wanted if isinstance(wanted, list) else [wanted]
        missing = [str(m) for m in listed if str(m) not in said]
        return f"the message does not mention {missing[0]}: {said or 'there is none'}" if missing else ""
    if key == "warns_or_raises":
        happened = outcome.raised is not None or bool(outcome.warned)
        return "" if happened == wanted else f"{'an' if happened else 'no'} error or warning"
    if key == "either":
        return _either(wanted, outcome, tolerance)
    if key == "must_not":
        return _must_not(wanted, values, tolerance)
    if key.endswith("_contains") and (name := key.removesuffix("_contains")) in values:
        listed = wanted if isinstance(wanted, list) else [wanted]
        missing = [m for m in listed if str(m) not in str(values[name])]
        return f"{values[name]!r} does not contain {missing[0]!r}" if missing else ""
    if key in values:
        return _equal(key, values[key], wanted, tolerance)
    if key.startswith("not_"):
        return _not(key[4:], wanted, values, tolerance)
    if key == "finite" or key.endswith("_finite"):
        return "" if _finite(values) == wanted else "a number is not finite"
    return _bound(key, wanted, values)


def _raises(wanted: Any, outcome: Outcome) -> str:
    if wanted is None:
        return ""  # an error has been told before
    if outcome.raised is None:
        return f"raised nothing, expected {wanted}"
    names = [c.__name__ for c in type(outcome.raised).__mro__]
    return "" if wanted in names else f"raised {names[0]}, expected {wanted}: {_line(outcome.raised)}"


def _either(options: Any, outcome: Outcome, tolerance: float) -> str | None:
    """Options in words: ``raises X …``, ``name [json]``, or the name of something the check found to be so."""
    known = False
    for option in options if isinstance(options, list) else [options]:
        word, _, rest = str(option).partition(" ")
        if word == "raises":
            known = True
            if outcome.raised is not None:
                return ""
        elif word in outcome.values:
            known = True
            if not _equal(word, outcome.values[word], _json(rest), tolerance):
                return ""
        elif (name := str(option).replace(" ", "_")) in outcome.values:
            known = True
            if outcome.values[name] is True:
                return ""
    return f"none of {options}" if known or outcome.raised is not None else None


def _must_not(wanted: Any, values: Mapping[str, Any], tolerance: float) -> str | None:
    if isinstance(wanted, str):
        if "nan" in wanted.lower() or "inf" in wanted.lower().split():
            return "" if _finite(values) else "a number is not finite"
        return None
    if isinstance(wanted, int | float):
        held = [name for name, value in values.items() if not _differ(value, wanted, tolerance)]
        return f"{held[0]} is {wanted}" if held else ""
    return None


def _not(name: str, wanted: Any, values: Mapping[str, Any], tolerance: float) -> str | None:
    """``not_x`` and ``not_x_with_a_reason``: x is anything else."""
    found = [key for key in values if name == key or name.startswith(f"{key}_")]
    if not found:
        return None
    value = values[max(found, key=len)]
    met = _differ(value, wanted, tolerance)
    return "" if met else f"{name} is {_short(value)}, expected anything but {_short(wanted)}"


def _bound(key: str, wanted: Any, values: Mapping[str, Any]) -> str | None:
    """``x_below``, ``x_greater_than`` and so on, and ``max_x``."""
    for suffix, sign in BOUNDS.items():
        name = key.removesuffix(f"_{suffix}")
        if name != key and name in values and isinstance(wanted, int | float):
            reached = suffix.startswith(("at_", "within_")) and values[name] == wanted
            met = sign * values[name] > sign * wanted or reached
            return "" if met else f"{name} is {_short(values[name])}, expected {suffix.replace('_', ' ')} {wanted}"
    name = key.removeprefix("max_")
    if name != key and name in values and isinstance(wanted, int | float):
        return "" if values[name] <= wanted else f"{name} is {_short(values[name])}, expected at most {wanted}"
    return None


def _equal(name: str, got: Any, wanted: Any, tolerance: float) -> str | None:
    if isinstance(got, frozenset):  # in no order, and nobody has to name them all
        missing = [w for w in (wanted if isinstance(wanted, list) else [wanted]) if w not in got]
        return f"{name} has no {_short(missing[0])}: {_short(sorted(got))}" if missing else ""
    if isinstance(wanted, str) and isinstance(got, bool):  # a statement in words that the check has tested
        return "" if got else f"{name} does not hold: {wanted}"
    if isinstance(wanted, Mapping) and isinstance(got, Mapping):
        wrong = [k for k, v in wanted.items() if k not in got or _differ(got[k], v, tolerance)]
        return f"{name} is {_short(got)}, expected {_short(wanted)}" if wrong else ""
    return f"{name} is {_short(got)}, expected {_short(wanted)}" if _differ(got, wanted, tolerance) else ""


def _differ(got: Any, wanted: Any, tolerance: float) -> bool:
    if isinstance(got, list) and isinstance(wanted, list):
        return len(got) != len(wanted) or any(_differ(g, w, tolerance) for g, w in zip(got, wanted, strict=True))
    if _number(got) and _number(wanted):
        return not (got == wanted or abs(got - wanted) <= tolerance * (1 + abs(wanted)))
    return bool(got != wanted)


def _number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _finite(values: Any) -> bool:
    return all(math.isfinite(v) for v in _leaves(values))


def _leaves(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, int | float):
        yield float(value)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
