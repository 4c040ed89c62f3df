# SPDX-License-Identifier: Apache-2.0
"""The arithmetic that a text does: its equations, whether each is true, and the operations in them.

What cannot be read without doubt (variables, powers, clock times) is left out, so a true equation is never called
false: ``2x + 3 = 7`` is no statement about 2 + 3.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

MAX_TEXT = 20_000  # characters read, from the end
MAX_DIGITS = 400  # longer runs of digits are no numbers that anybody calculates with

# Possessive quantifiers, and no number begins among its own digits: a text is read once, not from every character.
NUMBER = r"(?>(?<!\d)\d++(?:\.\d++)?+|\.\d++)(?![A-Za-z\d])"
_UNIT = r"(?:[ \t]{0,2}+[A-Za-z]{2,20}+){0,2}+"
_TERM = rf"(?>(?:[(\-] ?+){{0,3}}+{NUMBER}%?+{_UNIT}(?: ?\)){{0,3}}+)"
_SIDE = rf"{_TERM}(?>[ \t]{{0,2}}[+\-*/][ \t]{{0,2}}{_TERM}){{0,12}}+"
CHAIN = re.compile(rf"(?<![\d.,]){_SIDE}(?>[ \t]{{0,2}}=[ \t]{{0,2}}{_SIDE})++")
"""Sides joined by equals signs, after :func:`plain`."""
CALL = re.compile(rf"\b(add|sub|subtract|mul|multiply|div|divide)\(\s*(-?{NUMBER})\s*,\s*(-?{NUMBER})\s*\)")
_SIGN = re.compile(r"[+\-*/]")
SYMBOLS = {"add": "+", "sub": "-", "subtract": "-", "mul": "*", "multiply": "*", "div": "/", "divide": "/"}
_AST: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_APPLY: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\\[dt]?frac\{([^{}]{1,40})\}\{([^{}]{1,40})\}"), r"(\1)/(\2)"),
    (re.compile(r"\\(?:text|mathrm)\{[^{}]{0,40}\}|\\[()\[\],!;]|[$£€¥\\]|\*\*"), ""),
    (re.compile(r"×|·|✕|(?:times|cdot)(?=\s*[\d(])"), "*"),
    (re.compile(r"÷|div(?=\s*[\d(])"), "/"),
    (re.compile(r"[−–]"), "-"),
    (re.compile(r"(?<=\d),(?=\d{3}(?!\d))|(?<=\d) (?=000(?!\d))"), ""),
    (re.compile(r"(?<=[\d)])\s{0,2}[xX]\s{0,2}(?=[\d(])"), "*"),
    (re.compile(r"(?<![\d.])(\d{1,6}) (\d{1,3})/(\d{1,3})(?!\d)"), r"(\1+\2/\3)"),
    (re.compile(rf"({NUMBER})\s{{0,2}}%\s{{0,2}}of\s{{1,2}}(?=[\d(.])"), r"(\1/100)*"),
)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on two numbers.

    >>> str(Operation("/", Fraction(48), Fraction(2)))
    '48 / 2'
    """

    symbol: str
    left: Fraction
    right: Fraction

    @property
    def result(self) -> Fraction:
        return _APPLY[self.symbol](self.left, self.right)

    def __str__(self) -> str:
        return f"{shown(self.left)} {self.symbol} {shown(self.right)}"


@dataclass(frozen=True, slots=True)
class Equation:
    """One written equation. text: as it stands in the text; value: what its left side really is; written: what the
    text says it is; operations: those of the left side."""

    text: str
    value: Fraction
    written: Fraction
    true: bool
    operations: tuple[Operation, ...]


def shown(value: Fraction) -> str:
    """A number for people: whole, or with up to six decimals.

    >>> shown(Fraction(24)), shown(Fraction(1, 3))
    ('24', '0.333333')
    """
    if value.denominator == 1 or abs(value) > 10**15:
        return str(round(value))
    return f"{float(value):.6f}".rstrip("0").rstrip(".")


def to_float(value: Fraction) -> float:
    """The nearest float; infinite where none reaches so far.

    >>> to_float(Fraction(1, 4)), to_float(Fraction(-(10**400)))
    (0.25, -inf)
    """
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def plain(text: str) -> str:
    r"""The text with one notation: ``*`` and ``/``, no currency, no thousands separators, percentages as hundredths.

    >>> plain("$1,200 × \\frac{1}{2}"), plain("25% of 80")
    ('1200 * (1)/(2)', '(25/100)*80')
    """
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def equations(text: str) -> list[Equation]:
    """The equations of a text in their order. ``3*4 = 12 + 5 = 17``, a running calculation, is two true ones.

    A result that is rounded or cut off at its last digit is true; so is a percentage without its hundredth.

    >>> [(e.text, e.true) for e in equations("48/2 = 25 clips in May. Then 25 + 48 = 73 in all.")]
    [('48/2 = 25', False), ('25 + 48 = 73', True)]
    """
    found: list[Equation] = []
    for line in plain(text[-MAX_TEXT:]).splitlines():
        for match in CHAIN.finditer(line):
            if not _part_of_more(line, match):
                found += _chain(match[0])
    return found


def operations(text: str) -> list[Operation]:
    """The operations a text writes down: those of its equations, and calls such as ``add(3, 4)``, each in order.

    >>> [str(o) for o in operations("<call>mul(64,961)</call>, (3+4)*5 = 35")]
    ['64 * 961', '3 + 4', '7 * 5']
    """
    calls = [m for m in CALL.finditer(text[-MAX_TEXT:]) if len(m[0]) <= MAX_DIGITS]
    called = [Operation(SYMBOLS[m[1]], Fraction(m[2]), Fraction(m[3])) for m in calls]
    written = [o for e in equations(text) for o in e.operations]
    return [o for o in (*called, *written) if o.symbol != "/" or o.right]


def operations_of(expression: str) -> list[Operation]:
    """The operations of one arithmetic expression, inner ones first; none where it is something else.

    >>> [str(o) for o in operations_of("2 * (3 + 4)")], operations_of("hello")
    (['3 + 4', '2 * 7'], [])
    """
    parsed = _parsed(expression)
    return [] if parsed is None else list(parsed[1])


def numbers(text: str) -> list[Fraction]:
    """Every number of a text, in order.

    >>> [str(n) for n in numbers("1,200 clips at 0.5")]
    ['1200', '1/2']
    """
    return [Fraction(m[0]) for m in re.finditer(NUMBER, plain(text[-MAX_TEXT:])) if len(m[0]) <= MAX_DIGITS]


def _part_of_more(line: str, match: re.Match[str]) -> bool:
    """Whether an operator, a number, a variable or a clock time beside the match makes it a piece of something."""
    before, after = line[: match.start()].rstrip(), line[match.end() :].lstrip()
    if before[-1:].isnumeric() or before.endswith((")", " x", "+", "*", "/", "^", "-", "(", ":")):
        return True
    if (match[0][0] == "-" and before[-1:].isalnum()) or (match[0][0] == "(" and line[: match.start()][-1:].isalnum()):
        return True
    if re.search(r"\d and$", before) and re.match(r"\d/\d\b", match[0]):
        return True
    grouped = match[0][-1].isdigit() and after[:1].isdigit()
    return grouped or re.match(r"[\^+*/:(]|-\s*\(|[A-Za-z]\b", after) is not None


def _chain(text: str) -> list[Equation]:
    sides = text.split("=")
    parsed = [_parsed(_without_units(side)) for side in sides]
    found: list[Equation] = []
    for i in range(len(sides) - 1):
        left, right = parsed[i], parsed[i + 1]
        if left is None or right is None or not left[1] or _doubtful(sides[i], sides[i + 1]):
            continue
        lead = re.search(NUMBER, sides[i + 1])
        running = bool(right[1]) and lead is not None and Fraction(lead[0]) == left[0]
        written = left[0] if running else right[0]
        true = (
            running
            or _agree(left[0], right[0], sides[i + 1])
            or ("%" in text and _agree_as_percents(*sides[i : i + 2]))
        )
        said = " = ".join(" ".join(re.sub(r"[A-Za-z]+", "", side).split()) for side in sides[i : i + 2])
        found.append(Equation(said, left[0], written, true, tuple(left[1])))
    return found


def _doubtful(left: str, right: str) -> bool:
    """What people write and arithmetic reads otherwise: ``25 / 1/3``, ``4 pounds - 6 ounces``, ``weeks 1-2``, 0900."""
    if re.search(rf"/ ?{NUMBER} ?/", left) or re.search(r"(?<![\d.])0\d", left + right):
        return True
    units = [re.findall(r"[A-Za-z]+", term) for term in re.split(r"[+\-]", left)]
    named = {words[-1].lower().rstrip("s") for words in units if words}
    words = {word for term in units for word in term}
    apart = len(named) > 1 or words & {"of", "and", "is", "than", "to", "or"} or re.search(r"\bcents?\b", right)
    return bool(apart) or (re.fullmatch(r"\d+-\d+", left.strip()) is not None and _SIGN.search(right) is not None)


def _agree(value: Fraction, written: Fraction, text: str) -> bool:
    """Equal, or equal as far as the digits go."""
    if value == written or ("%" in text and value == written * 100):
        return True
    digits = len(text.rstrip("%) ").partition(".")[2].split()[0]) if "." in text else 0
    unit = Fraction(1, 10**digits) / (100 if "%" in text else 1)
    return (value / unit).denominator != 1 and abs(value - written) < unit


def _agree_as_percents(left: str, right: str) -> bool:
    """``100% - 80% = 20``: the signs are left out, or kept, at will."""
    a, b = (_parsed(_without_units(side.replace("%", ""))) for side in (left, right))
    return a is not None and b is not None and (a[0] == b[0] or a[0] * 100 == b[0] or a[0] == b[0] * 100)


def _without_units(side: str) -> str:
    return re.sub(rf"({NUMBER})\s?%", r"(\1/100)", re.sub(r"[A-Za-z]+", "", side))


def _parsed(expression: str) -> tuple[Fraction, Sequence[Operation]] | None:
    text = re.sub(r"(?<![\d.])0+(?=\d)", "", plain(expression)).strip()
    if not re.fullmatch(r"[\d.+\-*/() ]{1,400}", text):
        return None
    try:
        done: list[Operation] = []
        return _value(ast.parse(text, mode="eval").body, done), done
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _value(node: ast.expr, done: list[Operation]) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, done)
    if isinstance(node, ast.BinOp) and type(node.op) in _AST:
        operation = Operation(_AST[type(node.op)], _value(node.left, done), _value(node.right, done))
        result = operation.result
        done.append(operation)
        return result
    raise ValueError("not plain arithmetic")
