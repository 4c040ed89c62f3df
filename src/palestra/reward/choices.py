# SPDX-License-Identifier: Apache-2.0
"""Whether an answer offers several values to choose from: "5 or 6", "5-10", "5, maybe 6", "4; 5".

An answer that names the same value twice, "1/2, or 0.5", offers one.
"""

from __future__ import annotations

import re
from fractions import Fraction

from palestra.reward.numerals import Number, find_numbers, words
from palestra.reward.spoken import COUNT

UNIT = r"(?:[ \t]?[^\W\d_]{1,15}(?:[ \t][^\W\d_]{1,15})?)?"  # apples, square feet
FILLER = (
    r"(?:(?:maybe|possibly|perhaps|probably|likely|even|about|around|just|it|could|might|may|be|is|the|else|a|an)\s+)"
)
CLOSED = r"[ \t]*[)\]}\"'$]{0,3}"
NEXT = rf"[($\"']{{0,3}}(?:[A-Za-z][ \t]?=[ \t]?)?(?=-?\.?\d|(?:{COUNT})\b|(?:an?\s+)?(?:half|dozen)\b)"
OR = re.compile(
    rf"{UNIT}{CLOSED}[.,，。;；(?!]{{0,2}}[ \t]*(?:[(/][ \t]*)?"
    rf"(?:\b(?:and/or|or(?!\s+so\b)|maybe|perhaps|possibly|alternatively|vs\.?|versus)[\s,/]+|或者?\s*|也可能是?\s*)"
    rf"{FILLER}{{0,4}}{NEXT}",
    re.IGNORECASE,
)
TO = re.compile(rf"{CLOSED}[ \t]*(?:(?:-|~|\.{{2,3}}|…|到|至)[ \t]*|\bto\s+){FILLER}{{0,2}}{NEXT}", re.IGNORECASE)
MORE = re.compile(r"[ \t]*(?:\||±|\+/-|\\(?:pm|lor|vee|cup|to|mid|&|\\)(?![A-Za-z]))[ \t]*-?\.?\d")
LIST = re.compile(
    rf"(?:{UNIT}{CLOSED}[ \t]*(?:[,;&/|、，；]|and\b|和)[ \t]*|[ \t]+)"
    r"(?=[-$(\[{]{0,3}(?:[A-Za-z][ \t]?=[ \t]?)?\.?\d)",
    re.IGNORECASE,
)
LIST_END = re.compile(rf"{UNIT}[^\w\n]*(?:\n|\Z)")
MAX_LIST = 12
BETWEEN = re.compile(r"(?P<words>(?:=>|[^\d\n(=+*/^:\"√\\]){1,20}?)(?=-?\.?\d)")
RELATED = re.compile(
    r"\b(?:not|than|of|per|in|for|at|after|from|every|with|by|on|since|because|(?<!well )as(?! well)|if|before|is|minus"
    r"|times|equals|makes|so|total|i\.e)\b",
    re.IGNORECASE,
)
END = re.compile(r"[^\w\n]*(?:\n|\Z)")


def offers(text: str, first: Number, *, between: bool = False, whole: bool = True) -> bool:
    """Whether something else than the number is offered right behind it, in the cleaned text that it is from.

    between: with "from 5 to 10" as one value, the second. Without, a range is a choice. whole: the number begins its
    line, so that nothing but numbers behind it is a list.
    """
    if MORE.match(text, first.end) or text[: first.start].rstrip().endswith(("±", "\\pm", "+/-")):
        return True
    if re.search(r"\bbetween\s*$", text[: first.start], re.IGNORECASE):
        return True
    patterns = (OR,) if between else (OR, TO)
    for found in (pattern.match(text, first.end) for pattern in patterns):
        if found is not None and _differs(first, _number(text, found.end())):
            return True
    return _lists(text, first) or (whole and bare_list(text, first))


def bare_list(text: str, first: Number) -> bool:
    """Nothing but numbers with a word or a sign between them, up to the end of the line: "5 else 6", "5 -> 6"."""
    at, differs = first.end, False
    for _ in range(MAX_LIST):
        found = BETWEEN.match(text, at)
        if found is None or RELATED.search(found["words"]):
            break
        other = _number(text, found.end())
        if other is None:
            break
        at, differs = other.end, differs or _differs(first, other)
    return differs and END.match(text, at) is not None


def _lists(text: str, first: Number) -> bool:
    """Nothing but further numbers up to the end of the line."""
    at, differs = first.end, False
    for _ in range(MAX_LIST):
        found = LIST.match(text, at)
        other = _number(text, found.end()) if found else None
        if other is None:
            break
        at, differs = other.end, differs or _differs(first, other)
    return differs and LIST_END.match(text, at) is not None


def _number(text: str, at: int) -> Number | None:
    """The number that begins at a place, or right behind an opening mark there."""
    part = re.match(r"[($\[{\"'\s]{0,4}(?:[A-Za-z]\s?=\s?)?", text[at:])
    start = at + (part.end() if part else 0)
    some = find_numbers(text[start : start + 80]) or words(text[start : start + 80])
    if not some or some[0].start > 0:
        return None
    n = some[0]
    return Number(n.value, n.text, n.percent, start, start + n.end, n.dozens)


def _differs(a: Number, b: Number | None) -> bool:
    return b is not None and not same_value(a, b)


def same_value(a: Number, b: Number) -> bool:
    """Whether two numbers of one text say the same: 25% and 0.25 do, also 25% and 25.

    >>> same_value(find_numbers("25%")[0], find_numbers("0.25")[0])
    True
    """
    if a.value is None or b.value is None:
        return a.text == b.text
    return bool(readings(a) & readings(b))


def readings(number: Number) -> set[Fraction]:
    """What a number may stand for: a percentage with and without its sign, dozens by the dozen and by the piece."""
    if number.value is None:
        return set()
    return {
        number.value,
        *([number.value / 100] if number.percent else []),
        *([number.dozens] if number.dozens is not None else []),
    }
