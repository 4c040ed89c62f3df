# SPDX-License-Identifier: Apache-2.0
"""Numbers as people and models write them, read exactly (as fractions), with linear-time patterns only."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from palestra.reward.spoken import Spoken, spoken

MAX_ANSWER = 300  # characters of a bare answer
MAX_DIGITS = 400  # longer literals are not answers, and Python refuses to convert very long ones

SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
SCALES = {
    **{"k": 10**3, "K": 10**3, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12},
    **{"M": 10**6, "hundred": 100, "dozen": 12, "百": 100, "千": 10**3, "万": 10**4, "亿": 10**8},
}

Rules = tuple[tuple[re.Pattern[str], str], ...]


def _rules(*pairs: tuple[str, str]) -> Rules:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in pairs)


# What surrounds numbers, in the order it is taken away; the LaTeX part only from texts with a backslash.
PLAIN = _rules(
    (r"<<[^<>]*>>", ""),  # GSM8K's calculator annotations
    (r"[\u2010-\u2013−﹣－]", "-"),
    (r"(?<=\d)[\u00a0\u2009\u202f](?=\d{3}(?!\d))|\{,\}|(?<=\d)['’_](?=\d{3}(?!\d))", ","),
    (r"\b(?:USD|US|AUD|CAD|HK|RMB|CNY|EUR|GBP|Rs\.?)\s?(?=-?[$€£¥]?\s?-?[\d.])|[$€£¥₩₹¢]", ""),
    (r"[×]", "*"),
    (r"\*\*|__|[`°]", ""),
)
# What says that a number is negative, brought to a dash right before it.
SIGNS = _rules(
    (r"\bnegative\s+(?=\.?\d)|(?:负|負|零下)\s*(?=\d)", "-"),
    (r"(?i)((?:^|[=:≈({\[]|\b(?:is|was|equals|be|of|to|at))\s*)minus\s+(?=\.?\d)", r"\1-"),
    (r"((?:[=:≈({\[]|\bis)[ \t]*)-[ \t]+(?=\.?\d)", r"\1-"),  # at the start of a line it is a list's dash
    (r"百分之\s?(-?\d[\d.]*)", r"\1%"),
)
LATEX = _rules(
    (r"\\!", ""),
    (r"(?<=\d)\\,(?=\d)", ","),
    (r"\\[,!;: ]|(?<=\d)~(?=\\)", " "),
    (r"\\([%$])", r"\1"),
    (r"(-?)\\[dt]?frac\s*\{\s*(-?[\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}", r" \1\2/\3 "),
    (r"(-?)\\[dt]?frac\s*(\d)\s*(\d)", r" \1\2/\3 "),
    (r"(-?)\\[dt]?frac\s*(\d)\s*\{\s*(\d+)\s*\}", r" \1\2/\3 "),
    (r"(-?)\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*(\d)", r" \1\2/\3 "),
    (r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}", r" \1 "),
    (r"\^[\s{]{0,4}\\circ\s{0,4}\}?|\\(?:degree|left|right|displaystyle|quad|qquad)(?![A-Za-z])", ""),
    (r"\\(?:times|cdot)(?![A-Za-z])", "*"),
    (r"\\(?:approx|sim)(?![A-Za-z])", "≈"),
    (r"\\[()\[\]]", " "),
)

TOKEN = re.compile(
    r"""
    (?<![A-Za-z_\d.\\^])(?<!\^\{)(?<!_\{)
    (?: (?P<clock>\d{1,2}:\d{2}(?::\d{2})?)(?![\d:])
      | (?P<whole>\d{1,9})\s+(?P<top>\d{1,9})\s?/\s?(?P<bottom>\d{1,9})(?![\d.,]*\d)
      | (?P<digits>[1-9]\d{0,2}(?:,\d{3}){1,9}(?!\d) | \d{1,2}(?:,\d{2}){1,6},\d{3}(?!\d) | \d+ | (?=\.\d))
        (?P<decimals>\.\d+)?
        (?: [eE](?P<exp>[+-]?\d{1,3})(?!\w) | \s?[*x]\s?10\s?\^\s?\{?(?P<ten>[+-]?\d{1,3})\}? )?
        (?: \^\{?(?P<power>\d{1,3})\}? )?
        (?: \s?/\s?(?P<den>\d{1,3}(?:,\d{3}){1,9}(?!\d)|\d+)(?P<dendec>\.\d+)? )?
        (?P<half>\ and\ (?:a|one)[ -]half\b)?
        (?: (?P<scale>[kKM](?![A-Za-z\d/]) | \s?(?:thousand|million|billion|trillion|hundred|dozen)\b
              | \s?(?:[百万亿]|千(?![克米瓦卡]))) )?
    )
    (?P<percent>\s?(?:%|％|percent\b|per\ cent\b))?
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Number:
    """A number found in a text: its exact value, the text it came from, and where it stands in the cleaned text.

    ``value`` is None for a clock time, which is an answer, but not a quantity. ``dozens`` is what counts the dozens,
    where it is said in dozens: who is asked for dozens of eggs says "7 dozen" and means 7.
    """

    value: Fraction | None
    text: str
    percent: bool = False
    start: int = 0
    end: int = 0
    dozens: Fraction | None = None

    @property
    def canonical(self) -> str:
        """The one way we write it: ``-1234.5``, ``1/3`` where no decimal ends, ``6:30``."""
        return self.text if self.value is None else decimal(self.value)


def decimal(value: Fraction) -> str:
    """A fraction as a decimal when that ends, as ``a/b`` when it does not.

    >>> decimal(Fraction(72)), decimal(Fraction(-5, 4)), decimal(Fraction(1, 3))
    ('72', '-1.25', '1/3')
    """
    rest, places = value.denominator, 0
    for prime in (2, 5):
        count = 0
        while rest % prime == 0:
            rest, count = rest // prime, count + 1
        places = max(places, count)
    if rest != 1 or places > 30:
        return f"{value.numerator}/{value.denominator}"
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    sign = "-" if value < 0 else ""
    return sign + (f"{digits[:-places]}.{digits[-places:]}" if places else digits)


def cleaned(text: str) -> str:
    """The text with LaTeX, currency and unusual characters around numbers brought into plain form.

    >>> cleaned("costs \\\\$1{,}234 or ½")
    'costs 1,234 or  1/2'
    """
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda m: "^" + m[0].translate(SUPERSCRIPTS), text)
    text = re.sub("[¼½¾⅐-⅞]", lambda m: " " + unicodedata.normalize("NFKC", m[0]).replace("\u2044", "/"), text)
    text = text.translate(FULL_WIDTH)
    text = DOTTED.sub(lambda m: m[0].replace(".", ""), text)
    text = MONEY.sub(lambda m: m[0].replace(" ", ""), text)
    for pattern, replacement in (*LATEX, *PLAIN, *SIGNS) if "\\" in text else (*PLAIN, *SIGNS):
        text = pattern.sub(replacement, text)
    return CENTS.sub(lambda m: f"{m[1]}.{int(m[2]):02}", text)


DOTTED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:\.\d{3}){2,9}(?![\d.]*\d)")
MONEY = re.compile(r"(?<=[$€£¥₩₹])\d{1,3}(?: \d{3}){1,4}(?!\d)")
CENTS = re.compile(r"\b(\d+)\s{1,3}dollars?\s{1,3}and\s{1,3}(\d{1,2})\s{1,3}cents?\b")


FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}


def find_numbers(text: str) -> list[Number]:
    """All numbers of a cleaned text, in order.

    >>> [n.canonical for n in find_numbers("2 boxes of 1,234 at -3.50 each, 1/2 off; 10-3, x^2, 5k")]
    ['2', '1234', '-3.5', '0.5', '10', '3', '5000']
    """
    found = (_read(text, m) for m in TOKEN.finditer(text))
    return [n for n in found if n is not None]


def _read(text: str, match: re.Match[str]) -> Number | None:
    part = match.groupdict()
    start = match.start()
    if part["clock"]:
        return Number(None, part["clock"], False, start, match.end())
    if any(len(v) > MAX_DIGITS for v in part.values() if v):
        return None
    value = _value(part)
    if value is None:
        return None
    if _signed(text, start):
        value, start = -value, start - 1
    dozens = value / 12 if (part["scale"] or "").strip() == "dozen" else None
    return Number(value, text[start : match.end()], part["percent"] is not None, start, match.end(), dozens)


def _value(part: dict[str, str | None]) -> Fraction | None:
    if part["whole"]:
        bottom = int(part["bottom"] or 0)
        return None if bottom == 0 else int(part["whole"]) + Fraction(int(part["top"] or 0), bottom)
    value = Fraction(((part["digits"] or "0").replace(",", "") or "0") + (part["decimals"] or ""))
    value *= Fraction(10) ** int(part["exp"] or part["ten"] or 0)
    if part["power"]:
        if len(str(value)) * int(part["power"]) > MAX_DIGITS:
            return None
        value = value ** int(part["power"])
    if part["den"]:
        below = Fraction(part["den"].replace(",", "") + (part["dendec"] or ""))
        if below == 0:
            return None
        value /= below
    if part["half"]:
        value += Fraction(1, 2)
    return value * SCALES[(part["scale"] or "").strip()] if part["scale"] else value


def _signed(text: str, start: int) -> bool:
    """Whether a minus right before the number is its sign: in ``10-3`` and ``10 -3`` it is an operation."""
    if start == 0 or text[start - 1] != "-":
        return False
    before = text[max(0, start - 12) : start - 1]
    operand = before.rstrip()[-1:]
    if before[-1:].isspace():
        return not (operand.isdigit() or operand in (")", "]", "%"))
    return not ((operand.isascii() and operand.isalnum()) or operand in (")", "]", "}", "%"))


BEFORE = re.compile(
    r"""[\s=:：≈~"'(\[{]*
    (?:(?:thus|therefore|hence|then|simply|now|indeed|so)\b\s*[:,]?\s*)?
    (?:(?:it\ is|is|equal\ to|are|about|approximately|approx\.?|around|roughly|exactly|only|just|at\ least
        |a\ total\ of|约|大约|共)\s*)?
    (?:[A-Za-z]\w{0,20}\s*[=≈]\s*)?[\s(\[{]*(?:\+(?!-))?""",
    re.IGNORECASE | re.VERBOSE,
)
AFTER = re.compile(
    r"[)\]}]*(?:\^\{?\d\}?)?(?:[^\W\d_]|[\s.°/'\"~-]|(?<=[^\W\d_])\s?\^\{?-?\d\}?)*[)\]}]*[\s.。,，;；!！*:]*"
)
FACTOR = re.compile(r"\s*\\?(?:(?:pi|sqrt|oo|sin|cos|tan|log|ln|root)(?![a-z])|π|√|∞)")
UNIT_LETTERS = "mgslLhJNWVA"


SPACED = re.compile(r"[1-9]\d{0,2}(?: \d{3}){1,4}")


def whole_number(text: str) -> Number | None:
    """The number that a cleaned text *is*, units and words like "about" aside; None when it is something else.

    >>> [n and n.canonical for n in map(whole_number, ("18 dollars", "x = 5 cm^2", "4 or 5", "5x", "seventy-two"))]
    ['18', '5', None, None, '72']
    """
    if len(text) > MAX_ANSWER:
        return None
    text = LONE_DASH.sub("-", text)
    if SPACED.fullmatch(text.strip(" .")):
        text = text.replace(" ", "")
    numbers = find_numbers(text)
    if not numbers:
        said = words(text)
        alone = len(said) == 1 and not re.search(r"\bor\b(?! so\b)|或|[A-Za-z]-[A-Za-z]", text[said[0].end - 1 :])
        return said[0] if alone else None
    number = numbers[0]
    if len(numbers) > 1 or not BEFORE.fullmatch(text[: number.start]) or "+-" in text[: number.start + 1]:
        return None
    rest = text[number.end :]
    letters = re.match(r"[A-Za-z]*", rest)
    single = letters is not None and len(letters[0]) == 1 and letters[0] not in UNIT_LETTERS
    if single or FACTOR.match(rest) or not AFTER.fullmatch(rest) or re.search(r"\bor\b(?! so\b)|或", rest):
        return None
    return number


LONE_DASH = re.compile(r"\A\s*-[ \t]+(?=\.?\d)")


def words(text: str) -> list[Number]:
    """The numbers written in words, in order.

    >>> [n.canonical for n in words("There are one hundred and seventy-two clips.")]
    ['172']
    """
    return [_in_words(text, s) for s in spoken(text)]


def _in_words(text: str, said: Spoken) -> Number:
    return Number(said.value, text[said.start : said.end], said.percent, said.start, said.end, said.dozens)
