# SPDX-License-Identifier: Apache-2.0
"""Numbers in words: English (``two and a half``, ``twenty percent``) and Chinese (``三百二十``)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

# fmt: off
ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
# fmt: on
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SMALL = {**{w: i for i, w in enumerate(ONES)}, **{w: 10 * i for i, w in enumerate(TENS, 2)}}
LARGE = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
PARTS = {"half": 2, "halve": 2, "third": 3, "fourth": 4, "quarter": 4, "fifth": 5, "sixth": 6, "seventh": 7}
PARTS |= {"eighth": 8, "ninth": 9, "tenth": 10, "hundredth": 100}

WORD = "|".join(sorted([*SMALL, *LARGE], key=len, reverse=True))
DIGIT = "|".join(ONES[:10])
COUNT = rf"(?:{WORD})(?:(?:\s+and\s+|[\s-]+)(?:{WORD})){{0,15}}"
ENGLISH = re.compile(
    rf"""\b(?:(?P<minus>minus|negative)\s+)?
    (?: (?P<point>(?:{COUNT})?\s*\bpoint(?:\s+(?:{DIGIT})){{1,15}})
      | (?:(?P<whole>{COUNT})\s+and\s+)?(?P<top>an?|{COUNT})[\s-]+(?P<part>{"|".join(PARTS)})(?P<plural>s)?
      | (?P<count>{COUNT}) | (?P<half>half)(?!\s+an?\s+dozen)
      | (?P<dozens>half\s+a|an?|{COUNT})(?=\s+dozen\b)
    )\b (?P<dozen>\s+dozens?\b)? (?P<percent>\s*(?:%|\bpercent\b|\bper\s+cent\b))?""",
    re.VERBOSE | re.IGNORECASE,
)

DIGITS = {c: i for i, c in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2, "兩": 2}
UNITS = {"十": 10, "百": 100, "千": 10**3}
MYRIADS = {"万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8}
RUN = rf"[{''.join(DIGITS)}十][{''.join([*DIGITS, *UNITS, *MYRIADS])}]{{0,24}}"
CHINESE = re.compile(
    rf"(?P<minus>负|負|零下)?"
    rf"(?:(?P<hundredths>百)分之(?P<share>{RUN}|百)|(?P<below>{RUN})分之(?P<above>{RUN})"
    rf"|(?P<half>一?半)|(?P<whole>{RUN})(?:点(?P<decimals>[{''.join(DIGITS)}]{{1,15}}))?)"
)


@dataclass(frozen=True, slots=True)
class Spoken:
    """A number in words. dozens: its count of dozens, where it is said in dozens; ``value`` counts the things."""

    value: Fraction
    percent: bool
    dozens: Fraction | None
    start: int
    end: int


def spoken(text: str) -> list[Spoken]:
    """All numbers in words, in order. A lone "one", "zero", "half" or Chinese digit counts only where the text begins
    with it: elsewhere it is mostly another word.

    >>> [str(s.value) for s in spoken("two and a half or three fourths, minus five, one of them")]
    ['5/2', '3/4', '-5']
    >>> [str(s.value) for s in spoken("三百二十")], [str(s.value) for s in spoken("一半")]
    (['320'], ['1/2'])
    """
    found = [_english(m, text) for m in ENGLISH.finditer(text)]
    found += [_chinese(m, text) for m in CHINESE.finditer(text)]
    return sorted((s for s in found if s is not None), key=lambda s: s.start)


def _begins(text: str, at: int) -> bool:
    return not text[:at].strip()


def _english(match: re.Match[str], text: str) -> Spoken | None:
    part = match.groupdict()
    dozens = None
    if part["point"]:
        before, _, after = part["point"].lower().partition("point")
        decimals = "".join(str(SMALL[w]) for w in after.split())
        value = Fraction(f"{_said(before)}.{decimals}")
    elif part["part"]:
        top, below = part["top"].lower(), PARTS[part["part"].lower()]
        above = 1 if top in ("a", "an") else _said(top)
        if not part["plural"] and above >= 10:  # "twenty third" is no fraction
            value = Fraction(above)
        else:
            value = Fraction(above, below) + (_said(part["whole"]) if part["whole"] else 0)
    elif part["half"]:
        value = Fraction(1, 2)
    elif part["dozens"]:
        times = part["dozens"].lower()
        value = Fraction(1, 2) if times.startswith("half") else Fraction(1 if times in ("a", "an") else _said(times))
    else:
        value = Fraction(_said(part["count"]))
    lone = (part["half"] or part["count"] or "").lower() in ("one", "zero", "half") and not part["dozen"]
    if lone and not part["percent"] and not _begins(text, match.start()):
        return None
    if part["dozen"]:
        value, dozens = 12 * value, value
    sign = -1 if part["minus"] else 1
    return Spoken(sign * value, part["percent"] is not None, dozens, match.start(), match.end())


def _said(text: str) -> int:
    total = current = 0
    for word in re.split(r"[\s-]+", text.lower()):
        if word in SMALL:
            current += SMALL[word]
        elif word == "hundred":
            current = max(current, 1) * 100
        elif word in LARGE:
            total, current = total + max(current, 1) * LARGE[word], 0
    return total + current


def _chinese(match: re.Match[str], text: str) -> Spoken | None:
    part = match.groupdict()
    if part["hundredths"]:
        value = Fraction(100 if part["share"] == "百" else _counted(part["share"]))
    elif part["below"]:
        below = _counted(part["below"])
        if below == 0:
            return None
        value = Fraction(_counted(part["above"]), below)
    elif part["half"]:
        value = Fraction(1, 2)
    else:
        value = Fraction(f"{_counted(part['whole'])}.{''.join(str(DIGITS[c]) for c in part['decimals'] or '零')}")
    if (len(match[0]) == 1 or part["half"]) and not _begins(text, match.start()):
        return None
    sign = -1 if part["minus"] else 1
    return Spoken(sign * value, part["hundredths"] is not None, None, match.start(), match.end())


def _counted(run: str) -> int:
    """``三万五`` is 35000: a last digit without a unit stands for the next lower one."""
    if all(c in DIGITS for c in run):
        return int("".join(str(DIGITS[c]) for c in run))
    total = section = digit = 0
    unit, zero = 1, False
    for char in run:
        if char in DIGITS:
            digit, zero = DIGITS[char], zero or DIGITS[char] == 0
        elif char in UNITS:
            section += (digit or 1) * UNITS[char]
            digit, unit, zero = 0, UNITS[char], False
        else:
            section += digit
            # 一亿三千万: what was said before is larger, and stays; 三千万亿 is multiplied whole.
            total = (total + section) * MYRIADS[char] if total < MYRIADS[char] else total + section * MYRIADS[char]
            section = digit = 0
            unit, zero = MYRIADS[char], False
    return total + section + digit * (1 if zero else max(unit // 10, 1))
