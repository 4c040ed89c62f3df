# SPDX-License-Identifier: Apache-2.0
r"""Where in a text its answer stands, in each mode.

Order: reasoning is stripped, an invented next question cut off; then ``<answer>``, ``####``, "the answer is" and
its kin, the last complete ``\boxed{}``, the last number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from palestra.data.boxes import BOX, boxed_contents
from palestra.errors import ConfigError, unknown
from palestra.reward.choices import bare_list, offers, same_value
from palestra.reward.numerals import LONE_DASH, SPACED, Number, cleaned, find_numbers, whole_number, words

MAX_TEXT = 20_000  # characters read, from the end: answers stand there, and a reward must not take seconds
MAX_AFTER = 300  # characters read behind a marker
MAX_LINE = 2_000  # of a mathematical answer
MAX_MARKERS = 20

REASONING = re.compile(r"<(think|thinking|thought|reasoning)>.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
REASONING_END = re.compile(r"^.*</(?:think|thinking|thought|reasoning)>", re.DOTALL | re.IGNORECASE)
TOOL_CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)
END_OF_TURN = re.compile(r"<\|(?:im_end|endoftext|eot_id|end|end_of_text)\|>|</s>|<eos>|<end_of_turn>|<\|im_start\|>")
NEXT_QUESTION = re.compile(
    r"^[ \t#*]*(?:(?:next|new|another)[ \t]+)?"
    r"(?:question|q|human|user|instruction|问|(?P<restated>problem|exercise|问题|题目))"
    r"[ \t]{0,9}#?(?P<number>\d{0,9})[ \t]{0,9}\**(?:[:：]|(?<=\d)[.)](?=\s))"
    r"|^(?:#{1,6}[ \t]+|\*\*)(?:(?:next|new|another)[ \t]+)?(?:question|problem|exercise)[ \t]*#?\d{0,9}\**[ \t]*$"
    r"|^(?:user|human)[ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
SIDE_BY_SIDE = re.compile(r"</answer>[ \t]*<answer>(?:(?!<answer>).)*\Z", re.DOTALL | re.IGNORECASE)
HASHES = re.compile(r"#{4,}[ \t]*(?:\n[ \t]*)?")
PHRASE = re.compile(
    r"(?:final\s+answer|(?<![A-Za-z/])answer)(?:\s+(?:to\s+the\s+(?:question|problem)))?"
    r"(?:\s+(?:is|should\s+be|would\s+be|must\s+be|equals|comes\s+to)\b(?!\s+not\b|n['’]t)(?:\s*[:：])?"
    r"|[\s*\"']*[:：=])"
    r"|(?:最终|正确)?答案(?:(?:应该|应|就)?(?:是|为|等于)\s*[:：]?|[\s*]*[:：]|\s*(?=[-\d$\\*]))",
    re.IGNORECASE,
)
OTHERWISE = re.compile(r"(?:\bor\b|或者?)[\s,]*(?:[a-z]+\s+){0,3}$", re.IGNORECASE)
LEAD = re.compile(r"^(?:\s|[*\"']|[:：>=≈]|(?:the\s+)?(?:final\s+)?answer\s*(?:is)?\b\s*[:：]?)*", re.IGNORECASE)
HEADING = re.compile(r"\d{1,2}[.):][ \t]+\D[^\n]{0,80}(?<![.。!])\n\s*\S")
SENTENCE_END = re.compile(r"\n|[。；;!?！？]|\.(?:\s|$)")
OPERAND = r"[\s(]{0,3}-?\.?\d[\d.,]*[ \t]?%?(?:[ \t]?[A-Za-z]{1,12}){0,2}?[ \t)]{0,3}"
OPERATOR = r"(?:[-+*/÷^]|(?:plus|minus|times|divided[ ]by|x|of)\b)"
SUM = re.compile(
    rf"(?:{OPERAND}(?:{OPERATOR}{OPERAND}){{1,12}}|[\s\d.,()+\-*/÷^%]*\d[\s)%]*[-+*/÷^][\s\d.,()+\-*/÷^%]*)"
    r"(?:=|(?:,[ \t]*)?\b(?:is|equals|makes|gives|which[ ]is|that[ ]is|so)\b)\s*(?=-?\.?\d)"
    rf"|{OPERAND}(?:(?:[+*÷]|(?:plus|times|x|of)\b){OPERAND}){{1,12}}(?:,[ \t]*)?or\b\s*(?=-?\.?\d)"
)
EXPLAINED = re.compile(r"\W*(?:explanation|reason|because|since|note|check|proof|解释|说明|因为|解析)", re.IGNORECASE)
UNFINISHED = re.compile(rf"(?:[ \t]?[A-Za-z]{{1,12}}){{0,2}}?[ \t)]{{0,3}}(?:[+*÷]|(?:plus|times)\b){OPERAND}")
ALGEBRAIC = re.compile(r"[xyzn](?![A-Za-z])(?!\s(?:as|more|the|times|faster)\b)|(?::| : )\d")
LABEL = re.compile(r"^[ \t]*(?:\d{1,2}[.)][ \t]+(?=[^\d\s])|(?:step|步骤)[ \t]*\d+)", re.IGNORECASE | re.MULTILINE)


CALCULATION = re.compile(r"<<[^<>]*>>")
FORMULA = re.compile(
    r"\$\$([^$]{1,999})\$\$|\$([^$\n]{0,998}[^$\s])\$(?!\d)|\\\(([^\n]{1,999}?)\\\)|\\\[(.{1,999}?)\\\]", re.DOTALL
)
COMMAND = re.compile(r"\\[A-Za-z]+|\b(?:sin|cos|tan|cot|sec|csc|log|sqrt|exp|max|min|mod|gcd|lcm|inf)\b")
PROSE = re.compile(r"[A-Za-z]{3,}|[\u4e00-\u9fff]")
EXPRESSION = re.compile(r"[\\^!]|\d\s*\([\d\s.+*/^()-]*\)|\b[a-z]\s*[=+*/-]|\d[a-z]\b")


class _Nothing:
    """The part of the text holds no answer at all, unlike None: it holds one that cannot be used."""


NOTHING = _Nothing()
Found = Number | str | None
"""A Number; a str where the answer is no number; None where there is no answer."""
Reading = Number | str | _Nothing | None


def read(text: str, mode: str) -> Found:
    """The answer of a whole text. Raises ConfigError for a mode that there is not."""
    reader = READERS.get(mode)
    if reader is None:
        raise ConfigError(unknown("answer mode", mode, MODES))
    return next((a for part in _parts(text) if (a := reader(part)) is not NOTHING), None)  # type: ignore[return-value]


def _parts(text: str) -> Iterator[str]:
    """The text up to each invented question, shortest first: what answers the asked one stands before the next.

    A question behind a mere number ("in 2 steps") may be the asked one, written down again: there a marker decides.
    """
    text = TOOL_CALL.sub(" ", REASONING_END.sub("", REASONING.sub(" ", text)))
    end = next((m.start() for m in END_OF_TURN.finditer(text) if text[: m.start()].strip()), len(text))
    text = text[:end]
    for found in list(NEXT_QUESTION.finditer(text))[:8]:
        before = text[max(0, found.start() - MAX_TEXT) : found.start()]
        again = found["restated"] and found["number"] in ("", "1") and "=" not in before
        if before.strip() and not (again and _marked(text) and not _marked(before)):
            yield before
    yield text[-MAX_TEXT:]


def _marked(text: str) -> bool:
    return any(marker.search(text) for marker in (TAGGED, HASHES, PHRASE, BOX))


def _read_numeric(text: str) -> Reading:
    plain = cleaned(text)
    for reader in (_tagged_number, _hash_number, _phrase_number, _boxed_number):
        found = reader(plain)
        if found is not NOTHING:
            return found
    if "\\boxed" in text and not boxed_contents(text):
        return None  # cut off inside its answer: the last number before is no answer
    return _last_number(plain)


def _read_boxed(text: str) -> Reading:
    boxes = boxed_contents(text)
    return NOTHING if not boxes else None if _boxes_to_choose(text) else bare(boxes[-1])


def _read_math(text: str) -> Reading:
    tagged = TAGGED.findall(text)
    if tagged:
        boxes = boxed_contents(tagged[-1])
        return _math(boxes[-1] if boxes else tagged[-1].strip().lstrip("#"))
    if _boxes_to_choose(text):
        return None
    boxes = boxed_contents(text)
    for marker in (HASHES, PHRASE):
        matches = list(marker.finditer(text))[-MAX_MARKERS:]
        for at, match in reversed(list(enumerate(matches))):
            if any(match[0] in box for box in boxes):  # said inside a box
                continue
            found = _math_after(text[match.end() :], markdown=marker is HASHES)
            if found is NOTHING:
                continue
            return None if at and OTHERWISE.search(text[matches[at - 1].end() : match.start()]) else found
    if boxes:
        return _math(boxes[-1])
    if "\\boxed" in text:
        return None
    formulas = FORMULA.findall(text)
    return _math("".join(formulas[-1])) if formulas else _last_number(cleaned(text))


def _math_after(rest: str, markdown: bool) -> Reading:
    """The mathematics right behind a marker: a box, a formula, or the whole line."""
    boxes = boxed_contents(rest)
    if boxes:
        return _math(boxes[-1])
    lead = LEAD.match(rest)[0]  # type: ignore[index]
    rest = rest[len(lead) :][:MAX_LINE]
    if markdown and HEADING.match(rest):
        return NOTHING
    if "\n" in lead:
        rest = LONE_DASH.sub("", rest)
    line = re.split(r"\n|\.\s", rest, maxsplit=1)[0].rstrip(" *.!?+")
    formula = FORMULA.search(rest if rest.startswith(("$$", "\\[")) else line)
    if formula and (formula.start() == 0 or _prose(line)):
        chosen = re.match(r"[\s,]*(?:or\b|或)", line[formula.end() :])
        return None if chosen else _math("".join(filter(None, formula.groups())))
    found = _math(line) if line else NOTHING
    if found is None or isinstance(found, Number):  # the line is cut at its end, where a choice may go on
        number = _after(cleaned(rest)[:MAX_AFTER], markdown)
        return number if number is None or isinstance(number, Number) else found
    return found


def _prose(text: str) -> bool:
    return PROSE.search(COMMAND.sub(" ", FORMULA.sub(" ", text))) is not None


READERS: dict[str, Callable[[str], Reading]] = {"numeric": _read_numeric, "boxed": _read_boxed, "math": _read_math}
MODES = tuple(READERS)


def bare(text: str) -> Reading:
    """A bare answer as a number where it is one; None when it offers two to choose from."""
    text = _unboxed(text)
    plain = cleaned(text)
    if re.search(r"\bor\b(?! so\b)|或", plain) or not text.strip():
        return None
    number = quantity(plain)
    if number is None and _prose(text) and re.search(r"\d", plain) and not EXPRESSION.search(plain):
        said = _after(plain[:MAX_AFTER])
        return text.strip() if said is NOTHING else said
    return number or text.strip()


def quantity(plain: str) -> Number | None:
    """The number that mathematical text is; ``10!`` is a factorial there, and ``10!`` in prose is 10."""
    if re.search(r"\d\s?!|[(\[{]\s*-?\d+,", plain):  # [0,100] is an interval
        return None
    return whole_number(plain)


def _math(text: str) -> Reading:
    """A mathematical answer, its own formula marks taken off."""
    return bare(CALCULATION.sub("", text).strip().removeprefix("$").removesuffix("$"))


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
        opened = text.lower().rfind("<answer>")
        return NOTHING if opened < 0 else _after(text[opened + len("<answer>") :][:MAX_AFTER])
    inside = tagged[-1]
    if len(tagged) > 1 and tagged[-2].strip() != inside.strip() and SIDE_BY_SIDE.search(text):
        return None
    boxes = boxed_contents(inside)
    found = _single(boxes[-1] if boxes else inside)
    if found is not None or boxes:
        return found
    found = _after(inside)
    return None if found is NOTHING else found


def _hash_number(text: str) -> Reading:
    matches = list(HASHES.finditer(text))[-MAX_MARKERS:]
    for at, match in reversed(list(enumerate(matches))):
        found = _after(text[match.end() : match.end() + MAX_AFTER], markdown=True)
        if found is NOTHING:
            continue
        before = text[matches[at - 1].end() : match.start()] if at else "\n"
        earlier = find_numbers(before) if "\n" not in before else []
        different = isinstance(found, Number) and any(not same_value(n, found) for n in earlier)
        return None if different else found  # "#### 5 #### 6"
    return NOTHING


def _phrase_number(text: str) -> Reading:
    matches = list(PHRASE.finditer(text))[-MAX_MARKERS:]
    for at, match in reversed(list(enumerate(matches))):
        found = _after(text[match.end() : match.end() + MAX_AFTER], heads=match[0].rstrip()[-1] in ":：=")
        if found is NOTHING:
            continue
        if at and OTHERWISE.search(text[matches[at - 1].end() : match.start()]):
            return None  # "the answer is 5 or the answer is 6"
        return found
    return NOTHING


def _boxed_number(text: str) -> Reading:
    boxes = boxed_contents(text)
    return NOTHING if not boxes else None if _boxes_to_choose(text) else _single(boxes[-1])


CHOICE_OF_BOXES = re.compile(
    r"\}[ \t$.,]{0,9}\\(?:boxed|fbox)\b|"
    r"\}[\s$.,]{0,9}(?:\bor\b|或者?|and\b|[,;|/])[\s$,]{0,9}(?:[a-z]+\s+){0,3}[\s$]{0,3}\\(?:boxed|fbox)\b"
)


def _boxes_to_choose(text: str) -> bool:
    r"""Whether the last two boxes stand side by side as a choice: ``\boxed{5} or \boxed{6}``."""
    boxes = boxed_contents(text)
    if len(boxes) < 2 or boxes[-2] == boxes[-1]:
        return False
    a, b = (whole_number(cleaned(box)) for box in boxes[-2:])
    at = text.rfind("\\boxed" if "\\boxed" in text else "\\fbox")
    side_by_side = CHOICE_OF_BOXES.search(text, max(0, at - 60), at + 7)
    return side_by_side is not None and not (a is not None and b is not None and same_value(a, b))


def _single(text: str) -> Reading:
    """The one number that a box or tag holds, alone or beside an equals sign; None when it holds another thing."""
    plain = cleaned(_unboxed(text))
    if re.search(r"\bor\b(?! so\b)|或", plain):
        numbers = find_numbers(plain) + words(plain)
        return numbers[0] if len(numbers) > 1 and all(same_value(n, numbers[0]) for n in numbers) else None
    if re.search(r"\d\s*[,;]\s*[A-Za-z]\s*=", plain):
        return None  # x = 5, x = 6
    return whole_number(plain) or whole_number(plain.rpartition("=")[2]) or whole_number(plain.partition("=")[0])


def _after(rest: str, markdown: bool = False, heads: bool = False) -> Reading:
    """The number right behind a marker, or the only one in its sentence; NOTHING when the marker has none.

    heads: the marker ends with a colon, so that a whole solution may stand behind it.
    """
    lead = LEAD.match(rest)[0]  # type: ignore[index]
    rest = rest[len(lead) :]
    if markdown and HEADING.match(rest):
        return NOTHING
    box = re.match(r"\W{0,4}\\(?:f?boxed|fbox)\s*\{", rest)
    if box:
        boxes = boxed_contents(rest)
        return None if not boxes or _boxes_to_choose(rest) else _single(boxes[0])
    rest = LONE_DASH.sub("" if "\n" in lead else "-", rest)  # at the start of a line it is a list's dash
    while equation := SUM.match(rest):
        rest = rest[equation.end() :]
    end = SENTENCE_END.search(rest)
    sentence = rest[: end.start()] if end else rest
    numbers = find_numbers(sentence) or words(sentence)
    if not numbers:
        return NOTHING
    if SPACED.fullmatch(sentence):
        return whole_number(sentence)
    first = numbers[0]
    if UNFINISHED.match(rest, first.end):  # 15 gallons * 8 pints / gallon = 120 pints
        return whole_number(sentence.rpartition("=")[2]) if "=" in sentence else None
    if offers(rest, first) or ALGEBRAIC.match(rest, first.end):
        return None
    whole = whole_number(sentence)
    if whole is not None:
        return whole
    near = whole_number(sentence[: first.end]) is not None
    more = rest[len(sentence) :]
    if heads and not near and re.search(r"\d", more) and not EXPLAINED.match(more):
        return NOTHING
    return first if near or (len(numbers) == 1 and not markdown) else NOTHING


def _last_number(plain: str) -> Reading:
    """The last number of a text without marks; None where it is one of several to choose from."""
    numbers = find_numbers(LABEL.sub(lambda m: " " * len(m[0]), plain)) or find_numbers(plain) or words(plain)
    if not numbers:
        return NOTHING
    last = numbers[-1]
    line = plain.rstrip().rpartition("\n")[2]
    in_line = find_numbers(line[:MAX_AFTER])
    if offers(plain, last):
        return None
    if len(in_line) > 1 and "=" not in line and not line[: in_line[0].start].strip() and bare_list(line, in_line[0]):
        return None
    for other in numbers[-2:-1]:
        change = re.search(r"\bfrom\s*$", plain[: other.start]) is not None
        if offers(plain[: last.end], other, between=change, whole=False) and not same_value(other, last):
            return None
    return last
