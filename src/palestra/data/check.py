# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a data file, before a model learns it: every fault with its line, none invented.

Errors would stop a run or teach something false: rows that cannot be read, missing fields, empty values, ids used
twice, one question with two answers, test questions in the training file, gold answers that fail their own verifier.
Warnings are for a person to judge: duplicates, near duplicates, prompts over the limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from palestra.data.duplicates import near_pairs, plain_words
from palestra.data.rows import ID, Row, parse_line
from palestra.data.tables import ANSWERS, QUESTIONS, final_answer, read_table
from palestra.errors import ConfigError, DataError, unknown
from palestra.types import Task

ERRORS = ("unreadable", "missing", "empty", "no_preference", "duplicate_id", "contradiction", "bad_gold", "overlap")
WARNINGS = ("duplicate", "near_duplicate", "near_overlap", "too_long")
FORMS = ("rl", "sft", "dialogue", "preference")
NEEDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "rl": (QUESTIONS, ANSWERS),
    "sft": (QUESTIONS, ("completion",)),
    "dialogue": (("messages",),),
    "preference": (QUESTIONS, ("chosen",), ("rejected",)),
}
"""By form: the fields that a row needs, each under one of several names."""
BINS = 12

Verify = Callable[[Task], Sequence[str]]
"""Says what is wrong with a task's gold answer; :func:`palestra.reward.validate.validate` of one task does."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: its kind, the rows it is about (``train.jsonl:12``), and what is wrong in words."""

    kind: str
    rows: tuple[str, ...]
    message: str

    @property
    def error(self) -> bool:
        return self.kind in ERRORS


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found. rows: by file. lengths: of prompts, in ``unit``; histogram: (from, to, rows)."""

    rows: Mapping[str, int]
    forms: Mapping[str, str]
    findings: tuple[Finding, ...]
    unit: str
    longest: int
    histogram: tuple[tuple[int, int, int], ...]
    limit: int | None

    @property
    def errors(self) -> int:
        return sum(f.error for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        counts = Counter(f.kind for f in self.findings)
        length = {"unit": self.unit, "longest": self.longest, "limit": self.limit, "histogram": self.histogram}
        return {
            "rows": dict(self.rows),
            "forms": dict(self.forms),
            "errors": self.errors,
            "counts": {kind: counts[kind] for kind in (*ERRORS, *WARNINGS) if counts[kind]},
            "findings": [{**asdict(f), "error": f.error} for f in self.findings],
            "prompt_length": length,
        }


@dataclass(slots=True)
class _Item:
    """A row that can be compared: its parts as text."""

    where: str
    prompt: str
    rest: tuple[str, ...]
    answer: str | None = None
    words: tuple[str, ...] = field(default=())


def check_files(
    train: str | Path,
    test: str | Path | None = None,
    *,
    form: str | None = None,
    verify: Verify | None = None,
    length: Callable[[str], int] = len,
    unit: str = "characters",
    limit: int | None = None,
    near: bool = True,
) -> Report:
    """Check one file, or two that should share no question.

    form: rl (question and answer), sft (prompt and completion), dialogue (messages) or preference (prompt, chosen,
    rejected); None takes what most rows look like. verify: judges gold answers of rl rows. length, unit, limit: of
    prompts. near: look for near duplicates too.
    """
    if form is not None and form not in FORMS:
        raise ConfigError(unknown("form of rows", form, FORMS))
    findings: list[Finding] = []
    rows, forms, items = {}, {}, []
    for path in [train] if test is None else [train, test]:
        name = str(path)
        read = list(_read(Path(path), findings))
        rows[name] = len(read)
        forms[name] = form or _form_of([row for _, row in read])
        items.append(_checked(read, forms[name], verify, findings))
        findings += _repeated(items[-1], forms[name], near)
    if test is not None:
        findings += _overlaps(*items, near=near)
    lengths = [length(item.prompt) for one in items for item in one]
    if limit is not None:
        placed = zip((item for one in items for item in one), lengths, strict=True)
        findings += [Finding("too_long", (i.where,), f"a prompt of {n} {unit}") for i, n in placed if n > limit]
    order = {kind: at for at, kind in enumerate((*ERRORS, *WARNINGS))}
    found = tuple(sorted(findings, key=lambda f: order[f.kind]))
    return Report(rows, forms, found, unit, max(lengths, default=0), _histogram(lengths), limit)


def _read(path: Path, findings: list[Finding]) -> Iterator[tuple[str, Row]]:
    """The rows that can be read; the others become findings."""
    if path.suffix.lower() not in (".jsonl", ".ndjson"):
        yield from ((f"{path}:{n}", row) for n, row in read_table(path))
        return
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        try:
            text = line.decode("utf-8")
            if text.strip():
                yield where, parse_line(text, where)
        except UnicodeDecodeError as error:
            findings.append(Finding("unreadable", (where,), f"not UTF-8 text: {error.reason}"))
        except DataError as error:
            findings.append(Finding("unreadable", (where,), str(error).removeprefix(f"{where}: ")))


def _form_of(rows: Sequence[Row]) -> str:
    """The form of most rows; rl where none stands out."""

    def looks(row: Row) -> str:
        if "chosen" in row or "rejected" in row:
            return "preference"
        if "messages" in row:
            return "dialogue"
        return "sft" if "completion" in row and not {"answer", "ground_truth"} & set(row) else "rl"

    counts = Counter(map(looks, rows))
    return max(FORMS, key=lambda f: counts[f])


def _checked(read: Iterable[tuple[str, Row]], form: str, verify: Verify | None, findings: list[Finding]) -> list[_Item]:
    """The rows that have what they need, as items; what others lack becomes findings."""
    items: list[_Item] = []
    ids: dict[str, str] = {}
    for where, row in read:
        name = next((str(row[n]) for n in ID if row.get(n) is not None), None)
        if name is not None:
            if name in ids:
                findings.append(Finding("duplicate_id", (ids[name], where), f"the id {name!r} is used twice"))
            ids.setdefault(name, where)
        fields = _fields(row, form)
        missing = [names for names, found in fields if found is None]
        if missing:
            there = ", ".join(map(str, row)) or "no field at all"
            needed = "; ".join(" or ".join(names) for names in missing)
            findings.append(Finding("missing", (where,), f"no {needed}; the row has: {there}"))
            continue
        names = [found for _, found in fields if found is not None]
        empty = [n for n in names if not _as_text(row[n]).strip()]
        if empty:
            findings.append(Finding("empty", (where,), f"nothing in {', '.join(empty)}"))
            continue
        item = _item(where, row, names, form)
        if form == "preference" and item.rest[0] == item.rest[1]:
            findings.append(Finding("no_preference", (where,), "chosen and rejected are the same"))
        if form == "rl" and "tests" not in row:
            findings += _gold_faults(item, row, verify, name or where)
        items.append(item)
    return items


def _fields(row: Row, form: str) -> list[tuple[tuple[str, ...], str | None]]:
    needs = NEEDS[form]
    if form == "rl" and "tests" in row:
        needs = (QUESTIONS,)  # judged by its tests, not by an answer
    found: list[tuple[tuple[str, ...], str | None]] = []
    for names in needs:
        used = [f for _, f in found]
        found.append((names, next((n for n in names if n in row and n not in used), None)))
    return found


def _as_text(value: Any) -> str:
    if isinstance(value, list):  # messages; their roles are no content
        return "\n".join(_as_text(m.get("content")) if isinstance(m, Mapping) else str(m) for m in value)
    return "" if value is None else str(value)


def _item(where: str, row: Row, names: Sequence[str], form: str) -> _Item:
    prompt, *rest = (_as_text(row[n]) for n in names)
    answer = None
    if form == "rl" and rest:
        answer = final_answer(rest[0])
    return _Item(where, prompt, tuple(rest), answer, plain_words(prompt))


def _gold_faults(item: _Item, row: Row, verify: Verify | None, name: str) -> list[Finding]:
    if item.answer is None:
        return [Finding("bad_gold", (item.where,), f"no answer in {item.rest[0].strip()[-60:]!r}")]
    if verify is None:
        return []
    meta = {k: v for k, v in row.items() if k == "mode"}
    faults = verify(Task(name, item.prompt, item.answer, meta))
    return [Finding("bad_gold", (item.where,), fault.removeprefix(f"{name}: ")) for fault in faults[:1]]


def _repeated(items: Sequence[_Item], form: str, near: bool) -> list[Finding]:
    """Rows of one file that are the same, nearly the same, or ask the same and answer otherwise."""
    found: list[Finding] = []
    first: dict[tuple[Any, ...], _Item] = {}
    asked: dict[tuple[str, ...], _Item] = {}
    unique: list[_Item] = []
    for item in items:
        content = () if form == "rl" else tuple(plain_words(text) for text in item.rest)
        same = first.setdefault((item.words, content), item)
        if same is item:
            unique.append(item)
        elif form == "rl" and not _agree(same, item):
            message = f"one question, two answers: {_short(same)} and {_short(item)}"
            found.append(Finding("contradiction", (same.where, item.where), message))
        else:
            found.append(Finding("duplicate", (same.where, item.where), "the same row, letter case and spacing aside"))
        asked.setdefault(item.words, item)
    if near:
        texts = [sum((plain_words(r) for r in i.rest), i.words) if form != "rl" else i.words for i in unique]
        found += [
            Finding("near_duplicate", (unique[i].where, unique[j].where), f"{alike:.0%} of the words are the same")
            for i, j, alike in near_pairs(texts)
            if _agree(unique[i], unique[j])
        ]
    return found


def _overlaps(train: Sequence[_Item], test: Sequence[_Item], *, near: bool) -> list[Finding]:
    """Prompts of the test file that stand in the training file too."""
    learned = {item.words: item for item in reversed(train)}
    found = [
        Finding("overlap", (learned[item.words].where, item.where), "a test prompt is in the training file")
        for item in test
        if item.words in learned
    ]
    if near:
        both = [*learned.values(), *(item for item in test if item.words not in learned)]
        split = len(learned)
        found += [
            Finding("near_overlap", (both[i].where, both[j].where), f"{alike:.0%} of the prompt's words are the same")
            for i, j, alike in near_pairs([item.words for item in both])
            if i < split <= j and _agree(both[i], both[j])
        ]
    return found


def _agree(a: _Item, b: _Item) -> bool:
    return a.answer == b.answer


def _short(item: _Item) -> str:
    return repr((item.answer or "")[:40])


def _histogram(lengths: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """(from, to, rows), both ends counted in."""
    width = (max(lengths, default=0) + BINS) // BINS
    counts = Counter(n // width for n in lengths)
    return tuple((b * width, (b + 1) * width - 1, counts[b]) for b in range(BINS) if lengths)
