# SPDX-License-Identifier: Apache-2.0
r"""Any table of questions and answers: JSONL, JSON, CSV, Parquet or the Hub, whatever its columns are called.

An answer may be bare, or a whole solution that ends with ``#### 72`` (GSM8K) or holds ``\boxed{72}`` (MATH).
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from palestra.data.boxes import boxed_contents
from palestra.data.rows import ID, Row, read_jsonl
from palestra.data.source import NOTHING, SOURCES, ListSource, Needs, check_fields
from palestra.errors import ConfigError, DataError, unknown
from palestra.types import Message, Task

QUESTIONS = ("prompt", "question", "problem", "query", "instruction", "input")
ANSWERS = ("ground_truth", "answer", "solution", "target", "output", "response", "completion")
FORMS = ("raw", "sft", "rl")
MODES = ("numeric", "boxed", "math")
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
MARKS = re.compile(r"<<[^<>]*>>")


def read_table(path: str | os.PathLike[str]) -> Iterator[tuple[int, Row]]:
    """The rows of a file with their numbers (lines of a JSONL file, else rows from 1), by its suffix."""
    suffix = Path(path).suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return read_jsonl(path)
    readers = {".json": _json, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet}
    if suffix not in readers:
        raise DataError(f"{path}: cannot tell what kind of table this is; name it {', '.join(SUFFIXES)}")
    if not os.path.isfile(path):
        raise DataError(f"{path} does not exist; check the path")
    return enumerate(readers[suffix](Path(path)), 1)


def _json(path: Path) -> Iterator[Row]:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error}); give a list of objects") from None
    rows = [found] if isinstance(found, dict) else found
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: give a list of objects, one per row")
    yield from rows


def _csv(path: Path) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a table of comma-separated UTF-8 text ({error})") from None


def _parquet(path: Path) -> Iterator[Row]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"{path}: Parquet needs the package 'pyarrow' (pip install pyarrow)") from error
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these two
        raise DataError(f"{path}: not a Parquet file ({' '.join(str(error).split())[:200]})") from None


def hub_rows(name: str, subset: str | None, split: str, hint: str) -> Iterable[Row]:
    """The rows of a data set on the Hugging Face Hub; ``hint`` says what else the user could do."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{name} from the Hub needs the package 'datasets' (pip install 'palestra[hub]'); {hint}"
        ) from error
    try:
        loaded: Iterable[Row] = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # the Hub's client raises many types: offline, refused, unknown
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{name} could not be loaded from the Hub ({reason}); go online, {hint}") from error
    return loaded


def final_answer(answer: str) -> str | None:
    r"""The answer of a solution: behind ``####``, in the last box, or the whole text; None where it is cut off.

    >>> final_answer("<<2+2=4>>4\n#### 1,004"), final_answer("so $\\boxed{\\frac12}$"), final_answer(" 7 ")
    ('1004', '\\frac12', '7')
    """
    _, marker, after = answer.rpartition("####")
    if marker:
        return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", after.strip()) or None
    if "\\boxed" in answer or "\\fbox" in answer:
        boxes = boxed_contents(answer)
        return boxes[-1].strip() or None if boxes else None
    return answer.strip() or None


def column(row: Row, names: Sequence[str], what: str, where: str, chosen: str | None = None) -> str:
    """The name of a row's column: ``chosen``, or the first of ``names`` that it has.

    >>> column({"problem": "2+2?", "solution": "4"}, QUESTIONS, "question", "a.jsonl:1")
    'problem'
    """
    found = chosen if chosen is not None else next((n for n in names if n in row), None)
    if found is None or found not in row:
        wanted = repr(chosen) if chosen is not None else " or ".join(map(repr, names))
        there = ", ".join(map(str, row)) or "no field at all"
        raise DataError(f"{where}: no field {wanted} with the {what}; the row has: {there}")
    return found


def format_math_dataset(
    rows: Iterable[Row],
    form: str = "rl",
    *,
    question: str | None = None,
    answer: str | None = None,
    system: str | None = None,
    tokenizer: Any = None,
) -> list[dict[str, Any]]:
    """Any question/answer table in one of the forms that training takes.

    form: ``raw`` (``question``, ``answer``), ``sft`` (``prompt``, ``completion``: the solution without calculator
    marks) or ``rl`` (``prompt``, ``ground_truth``, ``question``, ``full_answer``). question, answer: the columns,
    where they have other names than the usual ones. system: a text before the question. tokenizer: writes the
    prompt through its own chat template, generation header included; without one, prompts are plain text, or
    messages when there is a ``system``.

    >>> format_math_dataset([{"problem": "2+2?", "solution": "It is <<2+2=4>>4.\\n#### 4"}], "rl")[0]["ground_truth"]
    '4'
    >>> format_math_dataset([{"q": "2+2?", "a": "It is <<2+2=4>>4."}], "sft", question="q", answer="a")
    [{'prompt': '2+2?', 'completion': 'It is 4.'}]
    """
    if form not in FORMS:
        raise ConfigError(unknown("form", form, FORMS))
    found = []
    for number, row in enumerate(rows, 1):
        where = f"row {number}"
        asked = _text(row, column(row, QUESTIONS, "question", where, question), where)
        solution = _text(row, column(row, ANSWERS, "answer", where, answer), where)
        prompt = _prompt(asked, system, tokenizer)
        if form == "raw":
            found.append({"question": asked, "answer": solution})
        elif form == "sft":
            found.append({"prompt": prompt, "completion": MARKS.sub("", solution)})
        else:
            gold = final_answer(solution)
            if gold is None:
                raise DataError(f"{where}: no answer in {solution[-60:]!r}: end it with '#### ANSWER' or a box")
            found.append({"prompt": prompt, "ground_truth": gold, "question": asked, "full_answer": solution})
    return found


def _text(row: Row, name: str, where: str) -> str:
    value = row[name]
    if isinstance(value, list | dict):
        raise DataError(f"{where}: field {name!r} is a {type(value).__name__}; a table of questions holds text")
    if value is None or not str(value).strip():
        raise DataError(f"{where}: field {name!r} is empty; give it a text")
    return str(value)


def _prompt(asked: str, system: str | None, tokenizer: Any) -> Any:
    messages: list[Message] = [{"role": "user", "content": asked}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    if tokenizer is not None:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return asked if system is None else messages


@SOURCES.register("table")
def table(
    path: str | None = None,
    split: str = "train",
    seed: int = 0,
    question: str | None = None,
    answer: str | None = None,
    mode: str | None = None,
    hub: str | None = None,
    subset: str | None = None,
    shuffle: bool | None = None,
    needs: Needs = NOTHING,
) -> ListSource:
    """Any question/answer table as tasks: prompt the question, answer the final answer of the solution.

    path: a file, or a directory with one per split. hub: a data set on the Hub instead, with its ``subset``.
    question, answer: columns, where they have unusual names. mode: how answers are compared (numeric, boxed or
    math), as a column of the tasks. Every other column becomes ``meta``; so do ``question`` and ``full_answer``.
    """
    if (path is None) == (hub is None):
        raise ConfigError("data source 'table' reads a file or the Hub: give either data.path or data.hub")
    if mode is not None and mode not in MODES:
        raise ConfigError(unknown("answer mode", mode, MODES))
    rows: Iterable[tuple[int, Row]]
    if hub is not None:
        name, rows = hub, enumerate(hub_rows(hub, subset, split, "or give data.path"), 1)
    else:
        file = table_file(str(path), split)
        name, rows = str(file), read_table(file)
    tasks = []
    for n, row in rows:
        tasks.append(_task(row, f"{name}:{n}", f"{split}/{n}", question, answer, mode))
        check_fields(tasks[-1], needs, f"{name}:{n}", answered=True)
    return ListSource(tuple(tasks), seed if (split == "train" if shuffle is None else shuffle) else None)


def _task(row: Row, where: str, default_id: str, question: str | None, answer: str | None, mode: str | None) -> Task:
    asks = column(row, QUESTIONS, "question", where, question)
    answers = column(row, [n for n in ANSWERS if n != asks], "answer", where, answer)
    asked, solution = _text(row, asks, where), _text(row, answers, where)
    gold = final_answer(solution)
    if gold is None:
        raise DataError(f"{where}: no answer in {solution[-60:]!r}: end it with '#### ANSWER' or a box")
    name = next((n for n in ID if n in row), None)
    rest = {k: v for k, v in row.items() if k not in (asks, answers, name, *ID, *TAKEN)}
    meta = {**rest, "question": asked, "full_answer": solution, **({} if mode is None else {"mode": mode})}
    return Task(default_id if name is None else str(row[name]), asked, gold, meta)


TAKEN = ("answer", "prompts", "completions", "completion_ids", "trajectories", "task_id")
"""Columns that reward functions get from us; a table's own of that name would hide them."""


def table_file(path: str, split: str) -> Path:
    """The file of a split: ``path`` itself, or ``path/{split}`` with a suffix that is known here."""
    given = Path(path)
    if os.path.isfile(given):  # False for a name that is too long, where Path.is_file raises
        return given
    found = next((f for s in SUFFIXES if os.path.isfile(f := given / f"{split}{s}")), None)
    if found is None:
        there = ", ".join(sorted(p.name for p in given.iterdir())[:8]) if os.path.isdir(given) else "no such path"
        raise DataError(f"data.path {path!r} has no {split} with {', '.join(SUFFIXES)}; there is: {there}")
    return found


@SOURCES.register("math")
def math(
    split: str = "train",
    seed: int = 0,
    path: str | None = None,
    shuffle: bool | None = None,
    needs: Needs = NOTHING,
) -> ListSource:
    r"""Problems in the style of MATH (Hendrycks et al., arXiv:2103.03874), compared as mathematics.

    Rows have ``problem``, ``solution`` with its answer in the last ``\boxed{}``, ``level`` ("Level 3") and ``type``.
    path: a file, a directory with one per split, or MATH's own tree, ``{split}/{type}/{number}.json``. meta:
    ``level`` as a number (left out where it is none), ``type``, ``mode`` math, ``question``, ``full_answer``.
    """
    if path is None:
        raise ConfigError("data source 'math' reads data.path: a file, a directory of them, or MATH's own tree")
    tree = sorted((Path(path) / split).rglob("*.json")) if os.path.isdir(path) else []
    rows = [(str(f.relative_to(path)), r) for f in tree for _, r in read_table(f)] or [
        (f"{split}/{n}", r) for n, r in read_table(table_file(path, split))
    ]
    tasks = [
        _levelled(_task(row, f"{path}: {name}", name.removesuffix(".json"), None, None, "math")) for name, row in rows
    ]
    for (name, _), task in zip(rows, tasks, strict=True):
        check_fields(task, needs, f"{path}: {name}", answered=True)
    return ListSource(tuple(tasks), seed if (split == "train" if shuffle is None else shuffle) else None)


def _levelled(task: Task) -> Task:
    found = re.search(r"\d+", str(task.meta.get("level", "")))
    rest = {k: v for k, v in task.meta.items() if k != "level"}
    return Task(task.id, task.prompt, task.answer, {**rest, **({"level": int(found[0])} if found else {})})
