# SPDX-License-Identifier: Apache-2.0
"""Rows of a table → tasks.

Read are ``task_id`` or ``id``, ``prompt`` or ``question``, ``answer`` or ``ground_truth``; the rest becomes ``meta``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.data.source import NOTHING, SOURCES, ListSource, Needs, check_fields
from palestra.errors import DataError
from palestra.types import Message, Task

ID = ("task_id", "id")
PROMPT = ("prompt", "question")
ANSWER = ("answer", "ground_truth")
ROLES = ("system", "user", "assistant", "tool")

Row = Mapping[str, Any]


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[tuple[int, Row]]:
    """The objects of a JSONL file with their line numbers, from 1; blank lines are skipped."""
    try:
        with open(path, encoding="utf-8-sig") as file:  # some editors begin a file with a mark
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, parse_line(line, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def parse_line(line: str, where: str) -> Row:
    """One line of a JSONL file as an object; ``where`` (file:line) begins every error."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not valid JSON ({error.msg} at column {error.colno}); one object per line"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: a number is too long or the nesting too deep to be read") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a {type(row).__name__} instead of an object; one object per line")
    return row


def row_to_task(row: Row, *, where: str, default_id: str, needs: Needs = NOTHING) -> Task:
    """One row as a task; ``where`` (file:line) begins every error. needs: fields that it must have, if only as null.

    >>> row_to_task({"id": 7, "question": "2+2?", "answer": 4, "level": "easy"}, where="a.jsonl:1", default_id="0")
    Task(id='7', prompt='2+2?', answer=4, meta={'level': 'easy'})
    >>> row_to_task({"question": ""}, where="a.jsonl:2", default_id="1")
    Traceback (most recent call last):
    palestra.errors.DataError: a.jsonl:2: field 'question' is empty; give it a text
    """
    prompt_field = _present(row, PROMPT)
    if prompt_field is None:
        raise DataError(f"{where}: no field 'prompt' or 'question'; the row has: {_listed(row)}")
    answer_field = _present(row, ANSWER)
    id_field = _present(row, ID)
    task_id = default_id if id_field is None else str(row[id_field])
    used = {prompt_field, answer_field, id_field}
    meta = {k: v for k, v in row.items() if k not in used}
    prompt = _prompt(row[prompt_field], f"{where}: field {prompt_field!r}")
    task = Task(task_id, prompt, None if answer_field is None else row[answer_field], meta)
    if needs:
        told = {prompt_field: " (the prompt)", id_field: " (the id)"}
        there = ", ".join(f"{name}{told.get(name, '')}" for name in row)
        check_fields(task, needs, where, answered=answer_field is not None, there=there)
    return task


def rows_to_tasks(
    rows: Iterable[tuple[int, Row]], *, name: str, needs: Needs = NOTHING, id_prefix: str = ""
) -> list[Task]:
    """All rows as tasks, at least one, no id twice. Rows without an id are named by ``id_prefix`` and line number."""
    tasks: list[Task] = []
    lines: dict[str, int] = {}
    for line, row in rows:
        task = row_to_task(row, where=f"{name}:{line}", default_id=f"{id_prefix}{line}", needs=needs)
        if task.id in lines:
            raise DataError(
                f"{name}:{line}: the id {task.id!r} was already used in line {lines[task.id]}; make ids unique"
            )
        lines[task.id] = line
        tasks.append(task)
    if not tasks:
        raise DataError(f"{name}: the data set is empty; give a file with at least one row")
    return tasks


def load_jsonl(path: str | os.PathLike[str], *, needs: Needs = NOTHING) -> list[Task]:
    """The tasks of a JSONL file."""
    return rows_to_tasks(read_jsonl(path), name=str(path), needs=needs)


@SOURCES.register("jsonl")
def jsonl(
    path: str, split: str = "train", seed: int = 0, shuffle: bool | None = None, needs: Needs = NOTHING
) -> ListSource:
    """A JSONL file, or a directory with one ``{split}.jsonl`` per split; training data is shuffled, other is not."""
    found = split_file(path, split)
    shuffled = split == "train" if shuffle is None else shuffle
    return ListSource(tuple(load_jsonl(found, needs=needs)), seed if shuffled else None)


def split_file(path: str | os.PathLike[str], split: str) -> Path:
    """The file of a split: ``path`` itself, or ``path/{split}.jsonl`` when it is a directory."""
    given = Path(path)
    if not os.path.exists(given):  # False for a name that is too long, where Path.exists raises
        raise DataError(f"data.path {str(given)!r} does not exist; give a JSONL file or a directory of them")
    found = given / f"{split}.jsonl" if given.is_dir() else given
    if not os.path.exists(found):
        there = ", ".join(sorted(p.name for p in given.glob("*.jsonl"))) or "no .jsonl file"
        raise DataError(f"data.path {str(given)!r} has no {split}.jsonl; there is: {there}")
    return found


def _present(row: Row, names: Sequence[str]) -> str | None:
    return next((n for n in names if n in row), None)


def _listed(row: Row) -> str:
    return ", ".join(map(str, row)) or "no field at all"


def _prompt(value: Any, where: str) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where} is empty; give it a text")
        return value
    if not isinstance(value, list) or not value:
        raise DataError(f"{where} is a {type(value).__name__}; give a text or a list of messages")
    for i, message in enumerate(value):
        if not isinstance(message, dict) or message.get("role") not in ROLES or "content" not in message:
            raise DataError(f"{where}, message {i}: needs 'role' ({', '.join(ROLES)}) and 'content'")
    check_contents(value, where)
    return tuple(value)


def check_contents(messages: Sequence[Any], where: str) -> None:
    """DataError, with the place, for what is no message or one whose content is no text; None and none are empty."""
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(
                f"{where}, message {i}: a {type(message).__name__} instead of a message with role and content"
            )
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            raise DataError(f"{where}, message {i}: its content must be a text, not a {type(content).__name__}")
