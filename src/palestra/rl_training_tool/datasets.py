# SPDX-License-Identifier: Apache-2.0
"""Rows for training and evaluation, from a name, a path or an object, in the form that each algorithm reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.data import tables
from palestra.data.gsm8k import HINT, HUB_ID
from palestra.data.preferences import row_to_preference
from palestra.data.tables import (
    ANSWERS,
    MARKS,
    QUESTIONS,
    TAKEN,
    column,
    final_answer,
    hub_rows,
    read_table,
    table_file,
)
from palestra.errors import ConfigError, DataError, unknown
from palestra.reward.formats import without_end_tokens

Row = dict[str, Any]
GSM8K = "gsm8k"
HELD_OUT_SHARE = 0.1
MOST_HELD_OUT = 200


def rows_of(data: Any, where: str) -> list[Row]:
    """A list of rows, a table of columns, a ``datasets.Dataset``, or the path of a file, as rows.

    >>> rows_of({"question": ["1+1?", "2+2?"], "answer": ["2", "4"]}, "mine")[1]
    {'question': '2+2?', 'answer': '4'}
    """
    if isinstance(data, str | Path):
        return [dict(row) for _, row in read_table(table_file(str(data), "train"))]
    if isinstance(data, Mapping):
        lists = {str(name): list(values) for name, values in data.items()}
        if len({len(values) for values in lists.values()}) > 1:
            raise DataError(f"{where}: its columns have different lengths; give one value of each per row")
        return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    if not isinstance(data, Iterable):
        raise DataError(f"{where} is a {type(data).__name__}; give a list of rows, columns, a data set or a path")
    rows = list(data)
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise DataError(f"{where}: give at least one row, each a mapping of fields")
    return [dict(row) for row in rows]


def named_rows(name: str, split: str, registered: Mapping[str, Any]) -> list[Row]:
    """The rows of a data set by name: a registered one, ``gsm8k``, a path, or one on the Hub."""
    if name in registered:
        return rows_of(registered[name], f"dataset {name!r}")
    if name == GSM8K:
        hint = HINT.replace("data.path=DIR", "dataset=DIR")
        return [dict(row) for row in hub_rows(HUB_ID, "main", split, hint)]
    if Path(name).exists():
        return [dict(row) for _, row in read_table(table_file(name, split))]
    if "/" in name and not name.startswith((".", "/", "~")):
        return [dict(row) for row in hub_rows(name, None, split, "or give a file or directory as dataset")]
    raise DataError(
        f"{unknown('dataset', name, {GSM8K, *registered})}; or give a file, a directory or a name on the Hub"
    )


def has_split(name: str, split: str, registered: Mapping[str, Any]) -> bool:
    """Whether a data set has rows of its own for this split."""
    if name in registered:
        return False
    if Path(name).is_dir():
        return any((Path(name) / f"{split}{suffix}").is_file() for suffix in tables.SUFFIXES)
    return name == GSM8K and not Path(name).exists()


def split_off(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The rows to train on and the last tenth of them, at most 200, to measure on.

    >>> [len(part) for part in split_off([{}] * 30)]
    [27, 3]
    """
    if len(rows) < 2:
        raise DataError("eval_steps measures on held-out rows and there is one row in all; give more, or leave it out")
    held = min(MOST_HELD_OUT, max(1, int(len(rows) * HELD_OUT_SHARE)))
    return list(rows[:-held]), list(rows[-held:])


def check_raw(rows: Iterable[Row]) -> None:
    """DataError for rows that are no plain questions and answers."""
    for number, row in enumerate(rows, 1):
        formed = next((name for name in ("messages", "completion", "ground_truth") if name in row), None)
        if formed is not None and "answer" not in row:
            raise DataError(
                f"row {number}: format raw needs a question and an answer, and there is {formed!r}; leave format out"
            )


class Writer:
    """Rows in the form of an algorithm, for one tokenizer. A prompt that already is in a chat template is refused:
    it would be put into the template once more."""

    def __init__(self, tokenizer: Any, *, chat: bool) -> None:
        self._marks = [t for t in getattr(tokenizer, "all_special_tokens", ()) if len(t) > 3]
        self._end = "" if chat else str(tokenizer.eos_token or "")

    def sft(self, rows: Iterable[Row]) -> list[Row]:
        """``prompt`` and ``completion``, or ``messages`` as they are."""
        return [self._sft(row, f"row {n}") for n, row in enumerate(rows, 1)]

    def _sft(self, row: Row, where: str) -> Row:
        if "messages" in row:
            return {k: v for k, v in row.items() if k in ("messages", "tools")}
        if "completion" in row:
            completion = _text(row["completion"], f"{where}: completion")
        else:
            completion = _text(row[column(row, ANSWERS, "answer", where)], f"{where}: the answer")
        # A turn's end is the renderer's to write; plain text has none but the tokenizer's own.
        written = MARKS.sub("", without_end_tokens(completion)) + self._end
        return {"prompt": self._asked(row, where), "completion": written}

    def rl(self, rows: Iterable[Row]) -> list[Row]:
        """``prompt`` and ``ground_truth``; every other column stays for reward functions."""
        return [self._rl(row, f"row {n}", n) for n, row in enumerate(rows, 1)]

    def _rl(self, row: Row, where: str, number: int) -> Row:
        prompt = self._asked(row, where)
        name = "ground_truth" if "ground_truth" in row else column(row, ANSWERS, "answer", where)
        solution = _text(row[name], f"{where}: {name}")
        gold = solution if name == "ground_truth" else final_answer(solution)
        if gold is None:
            raise DataError(f"{where}: no answer in {solution[-60:]!r}: end it with '#### ANSWER' or a box")
        used = {"prompt", "ground_truth", name, "id", *TAKEN}
        rest = {k: v for k, v in row.items() if k not in used}
        full = {} if name == "ground_truth" else {"full_answer": solution}
        return {**rest, **full, "id": str(row.get("id", number)), "prompt": prompt, "ground_truth": gold}

    def pairs(self, rows: Iterable[Row]) -> list[Row]:
        """``prompt``, ``chosen`` and ``rejected``, checked."""
        found = list(rows)
        for number, row in enumerate(found, 1):
            row_to_preference(row, f"row {number}")
            if isinstance(row.get("prompt"), str):
                self._refuse_template(row["prompt"], f"row {number}")
        return found

    def _asked(self, row: Row, where: str) -> str:
        names = ("question", *QUESTIONS)
        asked = _text(row[column(row, names, "question", where)], f"{where}: the question")
        self._refuse_template(asked, where)
        return asked

    def _refuse_template(self, asked: str, where: str) -> None:
        mark = next((m for m in self._marks if m in asked), None)
        if mark is not None:
            raise DataError(
                f"{where}: the prompt holds {mark}, so it is in a chat template already, which is applied here; give "
                "the plain question, as `question` or as `prompt`"
            )


def _text(value: Any, where: str) -> str:
    if isinstance(value, str | int | float) and str(value).strip():
        return str(value)
    raise DataError(f"{where} is {value!r}; give a text")


def format_math_dataset(dataset: Any, format_type: str = "sft", model_name: str | None = None) -> list[Row]:
    """Any table of questions and answers in the form ``sft`` (``prompt``, ``completion``, ``text``, ``question``) or
    ``rl`` (``prompt``, ``ground_truth``, ``question``, ``full_answer``).

    model_name: writes prompts through this model's own chat template; without it they are the plain questions.

    >>> format_math_dataset([{"question": "2+2?", "answer": "<<2+2=4>>4\\n#### 4"}], format_type="sft")[0]["text"]
    '2+2?4\\n#### 4'
    """
    if format_type not in ("sft", "rl"):
        raise ConfigError(unknown("format_type", format_type, ("sft", "rl")))
    rows = rows_of(dataset, "the data set")
    tokenizer: Any = None
    if model_name is not None:
        from palestra.model.loading import load_model

        tokenizer = load_model(model_name, device="cpu").tokenizer
        if not tokenizer.chat_template:
            raise ConfigError(f"model {model_name!r} has no chat template; leave model_name out for plain prompts")
    found = tables.format_math_dataset(rows, format_type, tokenizer=tokenizer)
    if format_type == "rl":
        return found
    asked = tables.format_math_dataset(rows, "raw")
    end = tokenizer.eos_token if tokenizer is not None else ""
    return [
        {"prompt": row["prompt"], "completion": row["completion"] + end, "question": raw["question"]}
        | {"text": row["prompt"] + row["completion"] + end}
        for row, raw in zip(found, asked, strict=True)
    ]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """One object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows), encoding="utf-8")
