# SPDX-License-Identifier: Apache-2.0
"""A word problem with new numbers, and its solution recomputed through the ``<<…>>`` steps.

Every number of the solution is traced: to a number of the question, to an earlier step, or to a constant that a word
explains (twice, dozen, percent). What cannot be traced without doubt is not changed, and a problem where that leaves
nothing is refused: a wrong gold answer costs more than a missing variant.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

TRIES = 100
MARK = re.compile(r"<<([^<>=]+)=([^<>]*)>>")
NUMBER = re.compile(r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+")
ALONE = re.compile(rf"(?<![/:^])(?:{NUMBER.pattern})(?![\d/:^A-Za-z]|[.,]\d)")
"""A number that is no part of a fraction, a time, an ordinal or a unit."""
LITERAL = re.compile(r"\d+(?:\.\d+)?|\.\d+")
ARITHMETIC = re.compile(r"[\d.+\-*/() ]+")

# fmt: off
WORDS: dict[str, tuple[str, ...]] = {
    "1": ("one", "once", "half", "halves", "third", "thirds", "quarter", "quarters", "fourth", "fourths", "fifth",
          "fifths", "sixth", "sixths", "eighth", "eighths", "tenth", "tenths"),
    "2": ("two", "twice", "double", "doubles", "doubled", "half", "halves", "pair", "pairs", "couple", "both",
          "second", "twins"),
    "3": ("three", "thrice", "triple", "triples", "tripled", "third", "thirds", "yard", "yards", "triplets"),
    "4": ("four", "fourth", "fourths", "quarter", "quarters", "quadruple", "quarts", "gallon", "gallons"),
    "5": ("five", "fifth", "fifths", "weekday", "weekdays", "nickel", "nickels"),
    "6": ("six", "sixth", "sixths"),
    "7": ("seven", "seventh", "week", "weeks", "weekly"),
    "8": ("eight", "eighth", "eighths"),
    "9": ("nine", "ninth"),
    "10": ("ten", "tenth", "tenths", "dime", "dimes", "decade", "decades"),
    "11": ("eleven",), "13": ("thirteen",), "14": ("fourteen",), "15": ("fifteen",),
    "16": ("sixteen", "pound", "pounds"),
    "12": ("twelve", "dozen", "dozens", "year", "years", "yearly", "month", "months", "annual", "annually", "foot",
           "feet", "inch", "inches"),
    "17": ("seventeen",), "18": ("eighteen",), "19": ("nineteen",),
    "20": ("twenty",), "24": ("hour", "hours", "day", "days"), "25": ("quarter", "quarters"), "30": ("thirty", "month"),
    "36": ("yard", "yards"), "40": ("forty",), "50": ("fifty",), "52": ("year", "years", "weeks"),
    "60": ("sixty", "hour", "hours", "minute", "minutes", "hourly"), "70": ("seventy",), "80": ("eighty",),
    "90": ("ninety",), "100": ("percent", "percentage", "cent", "cents", "penny", "pennies", "hundred", "century"),
    "365": ("year", "years"), "1000": ("thousand", "kilometer", "kilometers", "kilogram", "kilograms", "liter"),
    "0.5": ("half",), "0.25": ("quarter",), "1.5": ("half",),
}
# fmt: on
CALENDAR = {
    "day": {7, 28, 29, 30, 31, 365, 366},
    "hour": {24},
    "month": {12},
    "minute": {60},
    "second": {60},
    "week": {4, 52},
    "ounce": {16},
    "letter": {26},
    "state": {50},
    "card": {52},
}
"""What there are so many of, whoever tells the story."""
SHARE = re.compile(
    r"[ -](?:[a-z]+ )?(?:seconds?|minutes?|hours?|days?|weeks?|months?|quarters?) "
    r"(?:an?|per|each|every|(?:in|of|out of|to) (?:an?|the|each|every|one|that|this)) "
    r"(?:single |calendar |school |work )?(?:minute|hour|day|week|month|year)"
)
"""Behind a number: part of a larger unit, which holds only so many."""
CLOCK = re.compile(r"\s?(?:(?:to|-|–|and|until|till) \d+(?::\d+)?\s?)?(?:[ap]\.?\s?m\b|o['’]clock)", re.IGNORECASE)
LABEL = re.compile(
    r"\b(?:January|February|March|April|May|June|July|August|September|October|November|December"
    r"|[Dd]ay|[Ww]eek|[Mm]onth|[Yy]ear|[Hh]our|[Gg]rade|[Rr]oom|[Nn]umber|[Nn]o\.|[Ll]evel|[Cc]hapter|[Pp]age|[Rr]oute"
    r"|[Hh]ighway|[Ss]tage|[Rr]ound|#) ?#?$"
)
"""Before a number: it says which one, not how many."""


@dataclass(frozen=True, slots=True)
class Step:
    """One ``<<expression=result>>``: the expression parsed, its literals in order, and its result."""

    tree: ast.expr
    literals: tuple[Fraction, ...]
    result: Fraction


Source = tuple[str, Fraction]
"""Where a literal comes from: ("question", value), ("percent", value), ("step", index) or ("constant", value)."""


def steps_of(solution: str) -> list[Step] | None:
    """The steps of a solution, if each is plain arithmetic that is right and the last is the answer behind ``####``.

    >>> [str(s.result) for s in steps_of("Half is <<48/2=24>>24.\\n<<48+24=72>>72\\n#### 72")]
    ['24', '72']
    >>> steps_of("<<48/2=25>>25\\n#### 25") is None, steps_of("<<48/2=24>>24\\n#### 25") is None
    (True, True)
    """
    body, marker, gold = solution.rpartition("####")
    steps: list[Step] = []
    for expression, result in MARK.findall(body):
        tree = _parsed(expression)
        literals = tuple(Fraction(x) for x in LITERAL.findall(expression))
        value = None if tree is None else _value(tree, literals)
        if tree is None or value is None or value != _number(result):
            return None
        steps.append(Step(tree, literals, value))
    return steps if marker and steps and _number(gold) == steps[-1].result else None


def evaluate(expression: str) -> Fraction | None:
    """The exact value of plain arithmetic; None when the text is something else.

    >>> evaluate("(1+2)*.3/4"), evaluate("2*x"), evaluate("1/0")
    (Fraction(9, 40), None, None)
    """
    tree = _parsed(expression)
    return None if tree is None else _value(tree, [Fraction(x) for x in LITERAL.findall(expression)])


def _parsed(expression: str) -> ast.expr | None:
    if not ARITHMETIC.fullmatch(expression):
        return None
    try:
        # Numbers are read from the text, exactly; here they only have to be numbers (007 is none in Python).
        return ast.parse(LITERAL.sub("1", expression).strip(), mode="eval").body
    except SyntaxError:
        return None


def _value(tree: ast.expr, literals: Sequence[Fraction]) -> Fraction | None:
    """The value with these literals, in the order of the text, in the place of the tree's own."""
    left = iter(literals)

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant):
            return next(left)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            a, b = value(node.left), value(node.right)
            return OPERATIONS[type(node.op)](a, b)
        raise ValueError("not plain arithmetic")

    try:
        return value(tree)
    except (ZeroDivisionError, ValueError):
        return None


OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def renumbered(question: str, solution: str, rng: random.Random) -> tuple[str, str] | None:
    """The problem with other numbers, and the solution recomputed; None where that cannot be done without doubt.

    >>> question = "Ann sold 48 clips in April and half as many in May. How many in all?"
    >>> solution = "In May 48/2 = <<48/2=24>>24.\\nIn all 48+24 = <<48+24=72>>72.\\n#### 72"
    >>> for text in renumbered(question, solution, random.Random(1)): print(text)
    Ann sold 96 clips in April and half as many in May. How many in all?
    In May 96/2 = <<96/2=48>>48.
    In all 96+48 = <<96+48=144>>144.
    #### 144
    """
    steps = steps_of(solution)
    sources = None if steps is None else trace(question, solution, steps)
    if steps is None or sources is None:
        return None
    used = {value for step in sources for kind, value in step if kind in ("question", "percent")}
    free = sorted(v for v in used if _changeable(v, question, solution))
    if not free:
        return None
    percent = {_number(m[0]) for m in NUMBER.finditer(question) if question[m.end() :].lstrip()[:1] == "%"}
    fixed = {v for v in _values(question) if v not in free}
    for _ in range(TRIES):
        new = _draw(free, percent, rng)
        if new is None or set(new.values()) & fixed:
            continue
        results = _recompute(steps, sources, new)
        if results is not None and _sound(steps, results, {*new.values(), *fixed}):
            return _rewrite(question, new, {}), _rewrite_solution(solution, steps, sources, new, results)
    return None


def trace(question: str, solution: str, steps: Sequence[Step]) -> list[list[Source]] | None:
    """For each step, where each of its literals comes from; None when one could come from two places or from none."""
    asked = set(_values(question))
    percents = {v for v in asked if f"{_plain(v)}%" in question.replace(" ", "").replace(",", "")}
    explained = _explained(f"{question} {solution}")
    results = [s.result for s in steps]
    if len(set(results)) < len(results) or set(results) & (asked | explained) or 0 in results:
        return None
    found: list[list[Source]] = []
    for index, step in enumerate(steps):
        line: list[Source] = []
        for literal in step.literals:
            earlier = literal in results[:index]
            if literal in asked:
                line.append(("question", literal))
            elif earlier:
                line.append(("step", Fraction(results.index(literal))))
            elif literal * 100 in percents and literal not in explained:
                line.append(("percent", literal * 100))
            elif literal in explained:
                line.append(("constant", literal))
            else:
                return None
        found.append(line)
    known = asked | explained | set(results) | {v / 100 for v in percents}
    return found if set(_values(MARK.sub("", solution))) <= known else None


def _changeable(value: Fraction, question: str, solution: str) -> bool:
    """Written once in the question, in digits, and nowhere in words."""
    alone = [_number(m[0]) for m in ALONE.finditer(question)]
    once = alone.count(value) == 1 == _values(question).count(value)
    year = value.denominator == 1 and 1900 <= value <= 2100
    if not once or value <= 1 or year or value in _explained(f"{question} {solution}"):
        return False
    (match,) = (m for m in ALONE.finditer(question) if _number(m[0]) == value)
    return not _given_by_the_world(value, question[: match.start()], question[match.end() :])


def _given_by_the_world(value: Fraction, before: str, behind: str) -> bool:
    """A calendar's number, a time of day, a date, the name of a thing: another one would be wrong or another thing.

    >>> [_given_by_the_world(Fraction(n), *text.split("#")) for n, text in (
    ...     (7, "in # days"), (5, "works # days a week"), (8, "from # to 9 pm"), (3, "on May #"), (9, "in # days"))]
    [True, True, True, True, False]
    """
    unit = re.match(r"[ -]([a-z]+?)s?\b", behind)
    counted = unit is not None and value in CALENDAR.get(unit[1], ())
    return counted or any((SHARE.match(behind), CLOCK.match(behind), LABEL.search(before)))


def _explained(text: str) -> set[Fraction]:
    words = set(re.findall(r"[a-z]+", text.lower()))
    found = {Fraction(number) for number, names in WORDS.items() if words & set(names)}
    return found | ({Fraction(100)} if "%" in text or "$" in text else set())


def _draw(
    free: Sequence[Fraction], percent: set[Fraction | None], rng: random.Random
) -> dict[Fraction, Fraction] | None:
    """New values, half to twice the old, as round as they were and in the same order of size; None when they fail."""
    new: dict[Fraction, Fraction] = {}
    for value in free:
        places = len(_plain(value).partition(".")[2])
        unit = Fraction(1, 10**places)
        while places == 0 and value % (unit * 10) == 0 and value > unit * 10:
            unit *= 10
        if value in percent and value % 5 == 0:
            unit = Fraction(5)
        low, high = max(1, int(value / unit / 2)), int(value / unit * 2)
        if value in percent:
            high = min(high, int(95 / unit))
        new[value] = unit * rng.randint(low, max(low, high))
    values = list(new.values())
    rising = all(a < b for a, b in pairwise(values))
    return new if rising and min(values) > 1 and any(a != b for a, b in new.items()) else None


def _recompute(
    steps: Sequence[Step], sources: Sequence[Sequence[Source]], new: Mapping[Fraction, Fraction]
) -> list[Fraction] | None:
    results: list[Fraction] = []
    for step, line in zip(steps, sources, strict=True):
        value = _value(step.tree, [_literal(source, new, results) for source in line])
        if value is None:
            return None
        results.append(value)
    return results


def _literal(source: Source, new: Mapping[Fraction, Fraction], results: Sequence[Fraction]) -> Fraction:
    kind, value = source
    if kind == "step":
        return results[int(value)]
    if kind == "percent":
        return new.get(value, value) / 100
    return new.get(value, value) if kind == "question" else value


def _substituted(expression: str, literals: Sequence[Fraction]) -> str:
    left = iter(literals)
    return LITERAL.sub(lambda _: _plain(next(left)), expression)


def _sound(steps: Sequence[Step], results: Sequence[Fraction], others: set[Fraction]) -> bool:
    """Results of the same kind as before (whole stays whole, above 0), each a number of its own."""
    alike = all(r > 0 and _places(r) <= _places(s.result) for s, r in zip(steps, results, strict=True))
    return alike and len(set(results)) == len(results) and not set(results) & others


def _places(value: Fraction) -> int:
    """Decimals of a value; many where it has no end."""
    return next((p for p in range(4) if (value * 10**p).denominator == 1), 99)


def _rewrite_solution(
    solution: str,
    steps: Sequence[Step],
    sources: Sequence[Sequence[Source]],
    new: Mapping[Fraction, Fraction],
    results: Sequence[Fraction],
) -> str:
    to = {s.result: r for s, r in zip(steps, results, strict=True)}
    percents = (
        {v / 100: n / 100 for v, n in new.items()} if any(k == "percent" for line in sources for k, _ in line) else {}
    )
    parts: list[str] = []
    at = 0
    for match, line, result in zip(MARK.finditer(solution), sources, results, strict=True):
        parts.append(_rewrite(solution[at : match.start()], {**percents, **new}, to))
        expression = _substituted(match[1], [_literal(s, new, results) for s in line])
        parts.append(f"<<{expression}={_plain(result)}>>")
        at = match.end()
    return "".join(parts) + _rewrite(solution[at:], {**percents, **new}, to)


def _rewrite(text: str, new: Mapping[Fraction, Fraction], results: Mapping[Fraction, Fraction]) -> str:
    """The text with its numbers replaced, each written as the old one was."""

    def written(match: re.Match[str]) -> str:
        old = _number(match[0])
        value = None if old is None else results.get(old, new.get(old))
        if value is None or value == old:
            return match[0]
        digits = len(match[0].partition(".")[2])
        plain = _plain(value)
        if digits > 1 and _places(value) <= digits:  # an amount of money stays one
            plain = f"{float(value):.{digits}f}"
        whole, dot, decimals = plain.partition(".")
        grouped = (
            f"{int(whole):,}" if "," in match[0] or (int(whole) >= 1000 and old is not None and old < 1000) else whole
        )
        return grouped + dot + decimals

    return NUMBER.sub(written, text)


def _values(text: str) -> list[Fraction]:
    found = (_number(m[0]) for m in NUMBER.finditer(text))
    return [v for v in found if v is not None]


def _number(text: str) -> Fraction | None:
    try:
        return Fraction(text.strip().replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def _plain(value: Fraction) -> str:
    """A number in digits: no separators, no trailing zeros."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.10f}".rstrip("0")
