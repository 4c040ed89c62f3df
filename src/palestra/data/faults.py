# SPDX-License-Identifier: Apache-2.0
"""What is wrong with one row of a data file, judged by what the loaders of its form take."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.data.dialogues import row_to_dialogue
from palestra.data.duplicates import plain_words
from palestra.data.preferences import row_to_preference
from palestra.data.renumber import MARK, evaluate
from palestra.data.rows import ROLES, Row
from palestra.data.tables import ANSWERS, QUESTIONS, final_answer
from palestra.errors import DataError

ERRORS = (
    *("unreadable", "missing", "malformed", "empty", "no_reply", "no_preference", "duplicate_id", "contradiction"),
    *("bad_gold", "bad_step", "leak", "overlap"),
)
WARNINGS = ("duplicate", "near_duplicate", "near_overlap", "reversed", "unanswered", "garbled", "too_long")
FORMS = ("rl", "sft", "dialogue", "preference")
NEEDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "rl": (QUESTIONS, ANSWERS),
    "sft": (("prompt",), ("completion",)),
    "dialogue": (("messages",),),
    "preference": (("prompt",), ("chosen",), ("rejected",)),
    "labelled": (("prompt",), ("completion",), ("label",)),
}
"""By form: the fields that a row needs, each under one of several names. labelled: a preference with one reply."""
MARKER = "####"
GARBLED = re.compile("[\ufffd\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f\\x7f-\\x9f]|[\u00c2\u00c3][\\x80-\\xbf]|\u00e2\u20ac.")
"""What is left of text that was decoded wrongly, such as the é of UTF-8 read as Latin-1."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: its kind, the rows it is about (``train.jsonl:12``), and what is wrong in words."""

    kind: str
    rows: tuple[str, ...]
    message: str

    @property
    def error(self) -> bool:
        return self.kind in ERRORS


@dataclass(slots=True)
class Item:
    """A row that can be compared: its parts as text. answer: the gold answer of an rl row."""

    where: str
    prompt: str
    rest: tuple[str, ...]
    answer: str | None = None
    words: tuple[str, ...] = field(default=())


def form_of(rows: Sequence[Row]) -> str:
    """The form of most rows; rl where none stands out. A field that is null is not there: columnar files fill up."""

    def looks(row: Row) -> str:
        there = {name for name, value in row.items() if value is not None}
        if there & {"chosen", "rejected"} or {"prompt", "completion", "label"} <= there:
            return "preference"
        if "messages" in there:
            return "dialogue"
        return "sft" if {"prompt", "completion"} <= there and not there & {"answer", "ground_truth"} else "rl"

    counts = Counter(map(looks, rows))
    return max(FORMS, key=lambda form: counts[form])


def as_text(value: Any) -> str:
    """What a field says; of messages their contents and calls, not their roles."""
    if isinstance(value, list | tuple):
        return "\n".join(_said(m) if isinstance(m, Mapping) else str(m) for m in value)
    return "" if value is None else str(value)


def _said(message: Mapping[str, Any]) -> str:
    calls = message.get("tool_calls")
    parts = [as_text(message.get("content")), json.dumps(calls, ensure_ascii=False, default=str) if calls else ""]
    return "\n".join(part for part in parts if part)


def read_item(where: str, row: Row, form: str) -> tuple[Item | None, list[Finding]]:
    """The row as an item, where it has all that its form needs, and what is wrong with it."""
    if None in row:  # as csv.DictReader files what has no column
        return None, [Finding("malformed", (where,), "more values than the table has columns")]
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        half = f"half a character (\\u{ord(error.object[error.start]):04x}) that stands for nothing"
        return None, [Finding("unreadable", (where,), half)]
    found = _fields(row, form)
    missing = [names for names, name in found if name is None]
    if missing:
        there = ", ".join(map(str, row)) or "no field at all"
        needed = "; ".join(" or ".join(names) for names in missing)
        return None, [Finding("missing", (where,), f"no {needed}; the row has: {there}")]
    names = [name for _, name in found if name is not None]
    if blank := [name for name in names if not as_text(row[name]).strip()]:
        return None, [Finding("empty", (where,), f"nothing in {', '.join(blank)}")]
    faults = [Finding(kind, (where,), message) for kind, message in _shape(row, form, names, where)]
    if faults:
        return None, faults[:1]
    item = _item(where, row, names, form)
    if form == "preference" and len(item.rest) == 2 and item.rest[0].strip() == item.rest[1].strip():
        faults.append(Finding("no_preference", (where,), "chosen and rejected are the same"))
    if form == "rl" and MARKER in item.prompt and item.answer is not None and final_answer(item.prompt) == item.answer:
        faults.append(Finding("leak", (where,), f"the prompt ends with its own answer, {MARKER} {item.answer}"))
    if form == "dialogue" and row["messages"][-1]["role"] != "assistant":
        message = f"the last message is the {row['messages'][-1]['role']}'s, and nothing answers it"
        faults.append(Finding("unanswered", (where,), message))
    if any(GARBLED.search(text) for text in (item.prompt, *item.rest)):
        faults.append(Finding("garbled", (where,), "characters that are no text: decoded wrongly"))
    return item, faults


def _fields(row: Row, form: str) -> list[tuple[tuple[str, ...], str | None]]:
    """What the form needs, each with the field that has it; of several names the first that is not null."""
    needs = NEEDS[form]
    if form == "rl" and "tests" in row:
        needs = (QUESTIONS, ("tests",))  # judged by its tests, not by an answer
    if form == "preference":
        if "label" in row and "chosen" not in row:
            needs = NEEDS["labelled"]
        elif any(_is_dialogue(row.get(name)) for name in ("chosen", "rejected")):
            needs = needs[1:]  # what the two begin with is the prompt
    found: list[tuple[tuple[str, ...], str | None]] = []
    for names in needs:
        there = [n for n in names if n in row and n not in (used for _, used in found)]
        found.append((names, next((n for n in there if row[n] is not None), there[0] if there else None)))
    return found


def _is_dialogue(value: Any) -> bool:
    """Whether a preferred reply is a whole dialogue, with its prompt in it."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and first.get("role") != "assistant"


def _shape(row: Row, form: str, names: Sequence[str], where: str) -> Iterator[tuple[str, str]]:
    """Kind and message of what the loaders would refuse."""
    for name in names:
        yield from _wrong_type(name, row[name], form)
    tools = row.get("tools")
    if form != "rl" and tools is not None and not _list_of(Mapping, tools):
        yield "malformed", f"tools is a {type(tools).__name__}; give a list of JSON schemas"
    for name in names:
        if isinstance(row[name], list) and name not in ("tests", "label"):
            yield from _messages(name, row[name])
    try:
        if form == "preference":
            row_to_preference(row, where)
        elif form in ("sft", "dialogue"):
            row_to_dialogue(row, where)
    except DataError as error:
        message = str(error).removeprefix(f"{where}: ")
        yield "no_reply" if "nothing to imitate" in message else "malformed", message


def _wrong_type(name: str, value: Any, form: str) -> Iterator[tuple[str, str]]:
    kind = type(value).__name__
    if name == "messages":
        if not isinstance(value, list):
            yield "malformed", f"messages is a {kind}; give a list of messages with role and content"
    elif form == "rl" and name in ANSWERS and name not in QUESTIONS:
        if isinstance(value, Mapping):
            yield "malformed", f"{name} is a {kind}; give a text or a number"
    elif name not in ("tests", "label") and not isinstance(value, str | list):
        yield "malformed", f"{name} is a {kind}; give a text or a list of messages"


def _messages(name: str, messages: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Faults of messages, the first of each; a list of plain answers has none."""
    if name in ANSWERS and name != "completion" and not any(isinstance(m, Mapping) for m in messages):
        return
    for number, message in enumerate(messages):
        at = f"{name}, message {number}"
        if not isinstance(message, Mapping):
            yield "malformed", f"{at}: a {type(message).__name__} instead of a message with role and content"
            continue
        role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
        if role is None:
            yield "malformed", f"{at}: no role; give one of {', '.join(ROLES)}"
        elif role not in ROLES:
            yield "malformed", f"{at}: the role {role!r} is not known; give one of {', '.join(ROLES)}"
        if content is not None and not isinstance(content, str):
            yield "malformed", f"{at}: its content must be a text, not a {type(content).__name__}"
        elif calls is not None and not _list_of(Mapping, calls):
            yield "malformed", f"{at}: tool_calls is a {type(calls).__name__}; give a list of calls"
        elif not (content or "").strip() and not calls and role != "tool":  # a tool may answer nothing
            yield "empty", f"{at}: the {role or 'message'} says nothing"


def _list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, kind) for one in value)


def _item(where: str, row: Row, names: Sequence[str], form: str) -> Item:
    texts = [as_text(row[name]) for name in names]
    if form == "preference" and names[0] != "prompt":
        texts = [as_text(part) for part in _parts(row, where)]
    prompt, *rest = texts
    answer = final_answer(rest[0]) if form == "rl" and names[1] != "tests" else None
    return Item(where, prompt, tuple(rest), answer, plain_words(prompt))


def _parts(row: Row, where: str) -> tuple[Any, ...]:
    found = row_to_preference(row, where)
    return (found.prompt, *found.replies)


def wrong_steps(solution: str) -> list[str]:
    """The ``<<…>>`` calculations of a solution that are not right; rounded ones are.

    >>> wrong_steps("<<48/2=25>>25 and <<10/3=3.33>>3.33 and <<x+1=2>>2")
    ['48/2=25']
    """
    wrong = []
    for expression, said in MARK.findall(solution):
        value, result = evaluate(expression.replace(",", "")), evaluate(said.replace(",", ""))
        if value is not None and result is not None and not math.isclose(value, result, rel_tol=0.01, abs_tol=0.01):
            wrong.append(f"{expression}={said}")
    return wrong
