# SPDX-License-Identifier: Apache-2.0
r"""Reading the answer out of a text, and comparing it with the gold one. No text raises.

Order: reasoning is stripped, an invented next question cut off; then ``<answer>``, ``####``, "the answer is" and
its kin, the last complete ``\boxed{}``, the last number. Modes:

* ``numeric``: one number, as a decimal;
* ``boxed``: only what stands in a box counts, numbers or not;
* ``math``: any mathematical answer, compared symbolically where text does not decide.
"""

from __future__ import annotations

import re
from fractions import Fraction

from palestra.data.boxes import boxed_contents as boxed_contents
from palestra.reward.choices import readings
from palestra.reward.latex import MAX_LENGTH, bare_latex, parts, plain_math, without_unit
from palestra.reward.numerals import Number, cleaned, whole_number
from palestra.reward.reading import MODES as MODES
from palestra.reward.reading import Found, quantity, read
from palestra.reward.symbolic import ALGEBRA

CHOICE = re.compile(r"\d\s*(?:[|&、≈→_@#]|\\(?:lor|vee|cup|to|mid|sim|approx|quad)(?![A-Za-z])|到|至|\.{2,}|…)\s*-?\d")
DASH = re.compile("[\u2010-\u2013\u2212]")


def extract_answer(text: str, mode: str = "numeric") -> str | None:
    r"""The answer that a text gives, in canonical form, or None when it gives none (or hedges between two).

    >>> extract_answer("48/2=24, 24+48=72.\n#### 1,072"), extract_answer("\\boxed{\\frac12}", "boxed")
    ('1072', '1/2')
    """
    found = read(text, mode)
    if isinstance(found, Number):
        return found.canonical if mode == "numeric" else _plain(found)
    return plain_math(found) if found and mode == "math" else _plain(found)


def is_correct(
    completion: str, ground_truth: str, mode: str = "numeric", *, rel_tol: float = 1e-6, timeout_s: float = 5.0
) -> bool:
    """Whether the completion's answer is the gold one.

    Whole numbers must agree exactly, others within ``rel_tol`` of the larger. A percentage equals its number with
    or without the sign. ``timeout_s`` bounds a symbolic comparison, which is unequal when it takes longer.

    >>> is_correct("The answer is 72.0 dollars", "72"), is_correct("#### 0.3333", "1/3")
    (True, False)
    """
    answer = read(completion, mode)
    if answer is None:
        return False
    gold = _gold(str(ground_truth), mode)
    if isinstance(answer, Number) and isinstance(gold, Number):
        return same_number(answer, gold, rel_tol)
    if mode == "numeric":
        return _plain(answer) == _plain(gold)
    return _same_math(_text(answer), _text(gold), rel_tol, timeout_s)


def normalise(text: str) -> str:
    r"""A bare answer in canonical form; doing it twice changes nothing, and a list stays a list.

    >>> [normalise(t) for t in ("2, 3", "1,080", "\\frac{1}{2}", "-7")]
    ['2, 3', '1080', '1/2', '-7']
    """
    number = whole_number(cleaned(text))
    return " ".join(text.split()) if number is None else _plain(number) or ""


def to_number(text: str) -> float | None:
    """The number that a bare answer is, as a float; None when it is none.

    >>> to_number("1,234"), to_number("1/4"), to_number("six")
    (1234.0, 0.25, 6.0)
    """
    number = whole_number(cleaned(text))
    try:
        return None if number is None or number.value is None else float(number.value)
    except OverflowError:
        return None


def same_number(a: Number, b: Number, rel_tol: float) -> bool:
    """Equality of two numbers as answers."""
    if a.value is None or b.value is None:
        return a.text == b.text
    if a.percent and b.percent:
        return _close(a.value, b.value, rel_tol)
    return any(_close(x, y, rel_tol) for x in readings(a) for y in readings(b))


def _close(a: Fraction, b: Fraction, rel_tol: float) -> bool:
    # 5,600,001 is within 1e-6 of 5,600,000, and wrong: counts are exact.
    if a.denominator == 1 == b.denominator:
        return a == b
    return abs(a - b) <= Fraction(rel_tol) * max(abs(a), abs(b))


def _gold(text: str, mode: str) -> Found:
    """A gold answer is bare, unless it is a whole solution with its own marker or box."""
    if "####" in text or "\\boxed" in text:
        return read(text, mode)
    number = whole_number(cleaned(text))
    return text if number is None else number


def _plain(found: Found) -> str | None:
    """Canonical text: a number as it is written, without separators and units; fractions stay fractions."""
    if not isinstance(found, Number):
        return None if found is None else " ".join(found.split())
    fraction = re.fullmatch(r"(-?)\s*(\d+)\s?/\s?(\d+)", found.text.strip())
    return f"{fraction[1]}{fraction[2]}/{fraction[3]}" if fraction else found.canonical


def _text(found: Found) -> str:
    return (_plain(found) or "") if isinstance(found, Number) else (found or "")


def _same_math(answer: str, gold: str, rel_tol: float, timeout_s: float) -> bool:
    a, b = plain_math(answer), plain_math(gold)
    if a == b:
        return True
    if max(len(answer), len(gold)) > MAX_LENGTH:
        return False
    (brackets_a, list_a), (brackets_b, list_b) = parts(bare_latex(answer)), parts(bare_latex(gold))
    if len(list_a) != len(list_b):
        return False
    if len(list_a) > 1:
        return _same_list(brackets_a, list_a, brackets_b, list_b, rel_tol, timeout_s)
    x, y = quantity(cleaned(a)), quantity(cleaned(b))
    if x is not None and y is not None:
        return same_number(x, y, rel_tol)
    if ":" in a + b or not (a and b):
        return False  # clock times and ratios are compared as text
    if CHOICE.search(answer) or ("+-" in a) != ("+-" in b):
        return False  # several values, of which the algebra would read one
    return ALGEBRA.equal(without_unit(gold), DASH.sub("-", without_unit(answer)), rel_tol=rel_tol, timeout_s=timeout_s)


def _same_list(
    brackets_a: str, a: tuple[str, ...], brackets_b: str, b: tuple[str, ...], rel_tol: float, timeout_s: float
) -> bool:
    """Tuples and intervals in order and with the same brackets; sets and bare lists in any order."""
    unordered = {brackets_a, brackets_b} <= {"", "{}"}
    if not unordered and brackets_a != brackets_b:
        return False
    if not unordered:
        return all(_same_math(x, y, rel_tol, timeout_s) for x, y in zip(a, b, strict=True))
    left = list(b)
    for x in a:
        match = next((i for i, y in enumerate(left) if _same_math(x, y, rel_tol, timeout_s)), None)
        if match is None:
            return False
        del left[match]
    return True
