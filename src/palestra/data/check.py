# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a data file, before a model learns it: every fault with its line, none invented.

Errors would stop a run or teach something false: rows that cannot be read, missing fields, empty values, messages in
the wrong shape, dialogues without a reply, ids used twice, one question with two answers, test questions in the
training file, gold answers that fail their own verifier, calculations that are wrong. Warnings are for a person to
judge: duplicates, near duplicates, pairs preferred both ways, garbled text, prompts over the limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from palestra.data.duplicates import near_pairs, plain_words
from palestra.data.faults import ERRORS, FORMS, MARKER, WARNINGS, Finding, Item, form_of, read_item, wrong_steps
from palestra.data.rows import ID, Row, parse_line
from palestra.data.tables import read_table
from palestra.errors import ConfigError, DataError, unknown
from palestra.types import Task

BINS = 12

Verify = Callable[[Task], Sequence[str]]
"""Says what is wrong with a task's gold answer; :func:`palestra.reward.validate.validate` of one task does."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found. rows: by file. longest, histogram (from, to, rows): of prompts in ``unit``, with replies
    where ``whole``. limited_by: where the limit comes from."""

    rows: Mapping[str, int]
    forms: Mapping[str, str]
    findings: tuple[Finding, ...]
    unit: str
    longest: int
    histogram: tuple[tuple[int, int, int], ...]
    limit: int | None
    limited_by: str | None = None
    whole: bool = False

    @property
    def errors(self) -> int:
        return sum(f.error for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        counts = Counter(f.kind for f in self.findings)
        length = {"unit": self.unit, "longest": self.longest, "limit": self.limit, "histogram": self.histogram}
        length |= {"limited_by": self.limited_by, "whole": self.whole}
        return {
            "rows": dict(self.rows),
            "forms": dict(self.forms),
            "errors": self.errors,
            "counts": {kind: counts[kind] for kind in (*ERRORS, *WARNINGS) if counts[kind]},
            "findings": [{**asdict(f), "error": f.error} for f in self.findings],
            "prompt_length": length,
        }


def check_files(
    train: str | Path,
    test: str | Path | None = None,
    *,
    form: str | None = None,
    verify: Verify | None = None,
    length: Callable[[str], int] = len,
    unit: str = "characters",
    limit: int | None = None,
    limited_by: str | None = None,
    whole: bool = False,
    near: bool = True,
    told: Callable[[str], None] = lambda _: None,
) -> Report:
    """Check one file, or two that should share no question.

    form: rl (question and answer), sft (prompt and completion), dialogue (messages) or preference (prompt, chosen,
    rejected); None takes what most rows look like. verify: judges gold answers of rl rows. length, unit, limit: of
    prompts; whole: with their longest reply. near: look for near duplicates too. told: hears what is
    being done.
    """
    if form is not None and form not in FORMS:
        raise ConfigError(unknown("form of rows", form, FORMS))
    findings: list[Finding] = []
    rows, forms, items = {}, {}, []
    for path in [train] if test is None else [train, test]:
        name = str(path)
        told(f"reading {Path(path).name}")
        read = list(_read(Path(path), findings))
        rows[name] = len(read)
        if not read and not any(f.rows[0].startswith(f"{name}:") for f in findings):
            findings.append(Finding("empty", (name,), "no row in the file"))
        forms[name] = form or form_of([row for _, row in read])
        told(f"checking {len(read):,} rows of {Path(path).name}")
        items.append(_checked(read, forms[name], verify, findings))
        told(f"comparing {len(read):,} rows of {Path(path).name}")
        findings += _repeated(items[-1], forms[name], near)
    if test is not None:
        told("comparing the test rows with the training rows")
        findings += _overlaps(*items, near=near)
    told("measuring lengths")
    lengths = [length(_measured(item, whole)) for one in items for item in one]
    if limit is not None:
        kind = "prompt and reply" if whole else "prompt"
        placed = zip((item for one in items for item in one), lengths, strict=True)
        findings += [Finding("too_long", (i.where,), f"a {kind} of {n} {unit}") for i, n in placed if n > limit]
    order = {kind: at for at, kind in enumerate((*ERRORS, *WARNINGS))}
    found = tuple(sorted(findings, key=lambda f: order[f.kind]))
    return Report(rows, forms, found, unit, max(lengths, default=0), _histogram(lengths), limit, limited_by, whole)


def _measured(item: Item, whole: bool) -> str:
    return item.prompt + max(item.rest, key=len, default="") if whole else item.prompt


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
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")  # some editors begin a file with a mark
            if text.strip():
                yield where, parse_line(text, where)
        except UnicodeDecodeError as error:
            findings.append(Finding("unreadable", (where,), f"not UTF-8 text: {error.reason}"))
        except DataError as error:
            findings.append(Finding("unreadable", (where,), str(error).removeprefix(f"{where}: ")))


def _checked(read: Iterable[tuple[str, Row]], form: str, verify: Verify | None, findings: list[Finding]) -> list[Item]:
    """The rows that have what they need, as items; what others lack becomes findings."""
    items: list[Item] = []
    golds: list[tuple[Item, Row, str]] = []
    ids: dict[str, str] = {}
    for where, row in read:
        name = next((str(row[n]) for n in ID if row.get(n) is not None), None)
        if name is not None:
            if name in ids:
                findings.append(Finding("duplicate_id", (ids[name], where), f"the id {name!r} is used twice"))
            ids.setdefault(name, where)
        item, faults = read_item(where, row, form)
        findings += faults
        if item is None:
            continue
        items.append(item)
        if form == "rl" and "tests" not in row:
            golds.append((item, row, name or where))
    marked = 2 * sum(MARKER in item.rest[0] for item, _, _ in golds) > len(golds)
    for item, row, name in golds:
        findings += _gold_faults(item, row, verify, name, marked=marked)
    return items


def _gold_faults(item: Item, row: Row, verify: Verify | None, name: str, *, marked: bool) -> Iterator[Finding]:
    """marked: most answers of the file are solutions that end behind ``####``."""
    solution = item.rest[0].strip()
    wrong = wrong_steps(solution)
    if wrong:
        yield Finding("bad_step", (item.where,), f"the calculation {wrong[0]} is wrong")
    if item.answer is None:
        yield Finding("bad_gold", (item.where,), f"no answer in {solution[-60:]!r}")
    elif marked and MARKER not in solution and len(solution.split()) > 1:
        yield Finding("bad_gold", (item.where,), f"no {MARKER} in {solution[-60:]!r}, as the other answers have it")
    elif verify is not None:
        meta = {k: v for k, v in row.items() if k == "mode"}
        faults = verify(Task(name, item.prompt, item.answer, meta))
        yield from (Finding("bad_gold", (item.where,), fault.removeprefix(f"{name}: ")) for fault in faults[:1])


def _repeated(items: Sequence[Item], form: str, near: bool) -> list[Finding]:
    """Rows of one file that are the same, nearly the same, or ask the same and answer otherwise."""
    found: list[Finding] = []
    first: dict[tuple[Any, ...], Item] = {}
    pairs: dict[tuple[Any, ...], Item] = {}
    unique: list[Item] = []
    for item in items:
        content = () if form == "rl" else tuple(plain_words(text) for text in item.rest)
        same = first.setdefault((item.words, content), item)
        if same is item:
            unique.append(item)
        elif form != "rl" or _agree(same, item):
            message = "the same row, letter case, punctuation and spacing aside"
            found.append(Finding("duplicate", (same.where, item.where), message))
        elif None not in (same.answer, item.answer) and _spaced(same.prompt) == _spaced(
            item.prompt
        ):  # a sign can make another question: 5! is not 5
            message = f"one question, two answers: {_short(same)} and {_short(item)}"
            found.append(Finding("contradiction", (same.where, item.where), message))
        if form == "preference" and len(item.rest) == 2 and item.rest[0].strip() != item.rest[1].strip():
            if (other := pairs.get((item.prompt, *item.rest[::-1]))) is not None:
                found.append(Finding("reversed", (other.where, item.where), "one pair, preferred both ways"))
            pairs.setdefault((item.prompt, *item.rest), item)
    if near:
        texts = [sum((plain_words(r) for r in i.rest), i.words) if form != "rl" else i.words for i in unique]
        found += [
            Finding("near_duplicate", (unique[i].where, unique[j].where), f"{alike:.0%} of the words are the same")
            for i, j, alike in near_pairs(texts)
            if _agree(unique[i], unique[j])
        ]
    return found


def _overlaps(train: Sequence[Item], test: Sequence[Item], *, near: bool) -> list[Finding]:
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


def _agree(a: Item, b: Item) -> bool:
    """Whether two answers are the same, however they are written: 1,000 and 1000.0, Yes and yes."""
    if a.answer is None or b.answer is None or a.answer == b.answer:
        return a.answer == b.answer
    one, other = (text.strip().strip("$").replace(",", "") for text in (a.answer, b.answer))
    try:
        return float(one) == float(other)
    except ValueError:
        return plain_words(a.answer) == plain_words(b.answer)


def _spaced(text: str) -> str:
    return " ".join(text.casefold().split())


def _short(item: Item) -> str:
    return repr((item.answer or "")[:40])


def _histogram(lengths: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """(from, to, rows), both ends counted in."""
    width = (max(lengths, default=0) + BINS) // BINS
    counts = Counter(n // width for n in lengths)
    return tuple((b * width, (b + 1) * width - 1, counts[b]) for b in range(BINS) if lengths)
