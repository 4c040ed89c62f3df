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
from collections.abc import Callable, Iterator
from fractions import Fraction

from palestra.data.boxes import boxed_contents as boxed_contents
from palestra.errors import ConfigError, unknown
from palestra.reward.latex import MAX_LENGTH, bare_latex, parts, plain_math
from palestra.reward.numerals import Number, cleaned, find_numbers, whole_number, words
from palestra.reward.symbolic import ALGEBRA

MAX_TEXT = 20_000  # characters read, from the end: answers stand there, and a reward must not take seconds

MAX_MARKERS = 20

REASONING = re.compile(r"<(think|thinking|thought|reasoning)>.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
REASONING_END = re.compile(r"^.*</(?:think|thinking|thought|reasoning)>", re.DOTALL | re.IGNORECASE)
END_OF_TURN = re.compile(r"<\|(?:im_end|endoftext|eot_id|end|end_of_text)\|>|</s>|<eos>|<end_of_turn>|<\|im_start\|>")
NEXT_QUESTION = re.compile(
    r"^[ \t#*]*(?:(?:next|new)\s+)?(?:question|q|problem|exercise|human|user|instruction|问题|题目|问)"
    r"[ \t]{0,9}\d{0,9}[ \t]{0,9}\**[:：]",
    re.IGNORECASE | re.MULTILINE,
)
TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
HASHES = re.compile(r"####[ \t]*(?:\n[ \t]*)?")
PHRASE = re.compile(
    r"(?:final\s+answer|(?<![A-Za-z])answer)(?:\s+(?:to\s+the\s+(?:question|problem)))?"
    r"(?:\s+(?:is|should\s+be|would\s+be|must\s+be|equals|comes\s+to)(?!\s+not\b)(?:\s*[:：])?|[\s*]*[:：=])"
    r"|(?:最终|正确)?答案(?:应该|应|就)?(?:是|为|等于)?\s*[:：]?",
    re.IGNORECASE,
)
LEAD = re.compile(r"^(?:\s|\*|[:：>=≈]|(?:the\s+)?(?:final\s+)?answer\s*(?:is)?\b\s*[:：]?)*", re.IGNORECASE)
HEADING = re.compile(r"^\d+[.):]\s+\D")
SENTENCE_END = re.compile(r"\n|[。；;!?！？]|\.(?:\s|$)")
HEDGE = re.compile(
    r"\s*[A-Za-z]{0,12}\s*(?:\bor\b|或者?)\s*-?\d"
    r"|(?:(?:\s*[,;&、，；]\s*|\s+and\s+|\s+)-?\d+(?:\.\d+)?)+\W*$"  # nothing but further numbers
)
SUM = re.compile(r"[\s\d.,()+\-*/÷^%]*=\s*(?=-?\.?\d)")

MODES = ("numeric", "boxed", "math")


def extract_answer(text: str, mode: str = "numeric") -> str | None:
    r"""The answer that a text gives, in canonical form, or None when it gives none (or hedges between two).

    >>> extract_answer("48/2=24, 24+48=72.\n#### 1,072"), extract_answer("\\boxed{\\frac12}", "boxed")
    ('1072', '1/2')
    """
    found = _found(text, mode)
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
    answer = _found(completion, mode)
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
    if a.percent == b.percent:
        return _close(a.value, b.value, rel_tol)
    percent, plain = (a.value, b.value) if a.percent else (b.value, a.value)
    return _close(percent, plain, rel_tol) or _close(percent / 100, plain, rel_tol)


def _close(a: Fraction, b: Fraction, rel_tol: float) -> bool:
    # 5,600,001 is within 1e-6 of 5,600,000, and wrong: counts are exact.
    if a.denominator == 1 == b.denominator:
        return a == b
    return abs(a - b) <= Fraction(rel_tol) * max(abs(a), abs(b))


# Candidates: a Number; a str where the answer is no number; None where there is no answer.
Found = Number | str | None


def _found(text: str, mode: str) -> Found:
    read = READERS.get(mode)
    if read is None:
        raise ConfigError(unknown("answer mode", mode, MODES))
    return next((a for part in _parts_to_read(text) if (a := read(part)) is not NOTHING), None)  # type: ignore[return-value]


def _gold(text: str, mode: str) -> Found:
    """A gold answer is bare, unless it is a whole solution with its own marker or box."""
    if "####" in text or "\\boxed" in text:
        return _found(text, mode)
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
    x, y = _quantity(cleaned(a)), _quantity(cleaned(b))
    if x is not None and y is not None:
        return same_number(x, y, rel_tol)
    if ":" in a + b or not (a and b):
        return False  # clock times and ratios are compared as text
    return ALGEBRA.equal(gold, answer, rel_tol=rel_tol, timeout_s=timeout_s)


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


class _Nothing:
    """The part of the text holds no answer at all, unlike None: it holds one that cannot be used."""


NOTHING = _Nothing()
Reading = Number | str | _Nothing | None


def _parts_to_read(text: str) -> Iterator[str]:
    """The text up to each invented question, shortest first: what answers the asked one stands before the next."""
    text = REASONING_END.sub("", REASONING.sub(" ", text))
    end = next((m.start() for m in END_OF_TURN.finditer(text) if text[: m.start()].strip()), len(text))
    text = text[:end]
    starts = [m.start() for m in NEXT_QUESTION.finditer(text)][:8]
    yield from (text[max(0, at - MAX_TEXT) : at] for at in starts if text[:at].strip())
    yield text[-MAX_TEXT:]


def _read_numeric(text: str) -> Reading:
    plain = cleaned(text)
    for reader in (_tagged_number, _hash_number, _phrase_number, _boxed_number):
        found = reader(plain)
        if found is not NOTHING:
            return found
    if "\\boxed" in text and not boxed_contents(text):
        return None  # cut off inside its answer: the last number before is no answer
    numbers = find_numbers(plain)
    return (numbers[-1] if numbers else words(plain)) or NOTHING


def _read_boxed(text: str) -> Reading:
    boxes = boxed_contents(text)
    return _bare(boxes[-1]) if boxes else NOTHING


def _read_math(text: str) -> Reading:
    tagged = TAGGED.findall(text)
    if tagged:
        boxes = boxed_contents(tagged[-1])
        return _math(boxes[-1] if boxes else tagged[-1])
    for marker in (HASHES, PHRASE):
        for match in reversed(list(marker.finditer(text))[-MAX_MARKERS:]):
            rest = text[match.end() :]
            boxes = boxed_contents(rest)
            if boxes:
                return _math(boxes[-1])
            line = re.split(r"\n|\.\s", rest.strip(), maxsplit=1)[0].strip(" *.")
            if line and not HEADING.match(line):
                return _math(line)
    boxes = boxed_contents(text)
    if boxes:
        return _math(boxes[-1])
    if "\\boxed" in text:
        return None
    formulas = re.findall(r"\$([^$\n]{1,999})\$|\\\(([^\n]{1,999}?)\\\)|\\\[(.{1,999}?)\\\]", text, re.DOTALL)
    if formulas:
        return _math("".join(formulas[-1]))
    numbers = find_numbers(cleaned(text))
    return numbers[-1] if numbers else NOTHING


READERS: dict[str, Callable[[str], Reading]] = {"numeric": _read_numeric, "boxed": _read_boxed, "math": _read_math}


def _bare(text: str) -> Reading:
    """A bare answer as a number where it is one; None when it offers two to choose from."""
    text = _unboxed(text)
    plain = cleaned(text)
    if re.search(r"\bor\b|或", plain) or not text.strip():
        return None
    return _quantity(plain) or text.strip()


def _quantity(plain: str) -> Number | None:
    """The number that mathematical text is; ``10!`` is a factorial there, and ``10!`` in prose is 10."""
    return None if re.search(r"\d\s?!", plain) else whole_number(plain)


def _math(text: str) -> Reading:
    """A mathematical answer, its own formula marks taken off."""
    return _bare(text.strip().removeprefix("$").removesuffix("$"))


def _unboxed(text: str) -> str:
    for _ in range(3):
        inner = boxed_contents(text)
        if len(inner) != 1 or not text.strip().startswith(("\\boxed", "\\fbox")):
            break
        text = inner[0]
    return text


def _tagged_number(text: str) -> Reading:
    tagged = TAGGED.findall(text)
    if not tagged:
        return NOTHING
    inside = tagged[-1]
    boxes = boxed_contents(inside)
    return _single(boxes[-1] if boxes else inside)


def _hash_number(text: str) -> Reading:
    for match in reversed(list(HASHES.finditer(text))[-MAX_MARKERS:]):
        found = _after(text[match.end() : match.end() + 300], markdown=True)
        if found is not NOTHING:
            return found
    return NOTHING


def _phrase_number(text: str) -> Reading:
    for match in reversed(list(PHRASE.finditer(text))[-MAX_MARKERS:]):
        found = _after(text[match.end() : match.end() + 300])
        if found is not NOTHING:
            return found
    return NOTHING


def _boxed_number(text: str) -> Reading:
    boxes = boxed_contents(text)
    return _single(boxes[-1]) if boxes else NOTHING


def _single(text: str) -> Reading:
    """The one number that a box or tag holds, after its last equals sign; None when it holds another thing."""
    plain = cleaned(_unboxed(text))
    if re.search(r"\bor\b|或", plain):
        return None
    return whole_number(plain) or whole_number(plain.rpartition("=")[2])


def _after(rest: str, markdown: bool = False) -> Reading:
    """The number right behind a marker, or the only one in its sentence; NOTHING when the marker has none."""
    rest = rest[len(LEAD.match(rest)[0]) :]  # type: ignore[index]
    if markdown and HEADING.match(rest):
        return NOTHING
    box = re.match(r"\W{0,4}\\(?:f?boxed|fbox)\s*\{", rest)
    if box:
        boxes = boxed_contents(rest)
        return _single(boxes[0]) if boxes else None
    equation = SUM.match(rest)
    rest = rest[equation.end() :] if equation else rest
    end = SENTENCE_END.search(rest)
    sentence = rest[: end.start()] if end else rest
    numbers = find_numbers(sentence)
    if not numbers:
        return words(sentence) or NOTHING
    first = numbers[0]
    if HEDGE.match(sentence[first.end :]):
        return None
    near = whole_number(sentence[: first.end]) is not None
    return first if near or (len(numbers) == 1 and not markdown) else NOTHING
