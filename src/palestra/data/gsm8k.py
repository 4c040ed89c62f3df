# SPDX-License-Identifier: Apache-2.0
"""GSM8K (Cobbe et al., arXiv:2110.14168; MIT licence): grade-school word problems.

Solutions carry calculator marks, ``<<48/2=24>>``, and end with ``#### 72``.
"""

from __future__ import annotations

import os
from typing import Any

from palestra.data.rows import Row, read_jsonl, split_file
from palestra.data.source import SOURCES, ListSource, check_split
from palestra.data.tables import MARKS, final_answer, format_math_dataset, hub_rows
from palestra.errors import DataError
from palestra.types import Task

HUB_ID = "openai/gsm8k"
HINT = "or give a local copy: data.path=DIR with train.jsonl and test.jsonl"


def gold(solution: str) -> str | None:
    """The number behind ``####``, without separators; None when the solution has none.

    >>> gold("Half of 96 is <<96/2=48>>48.\\n#### 1,080")
    '1080'
    """
    return final_answer(solution) if "####" in solution else None


def rl_form(row: Row) -> dict[str, Any]:
    """``prompt``, ``ground_truth``, ``question``, ``full_answer``.

    >>> rl_form({"question": "2+2?", "answer": "<<2+2=4>>4\\n#### 4"})["ground_truth"]
    '4'
    """
    return format_math_dataset([row], "rl", question="question", answer="answer")[0]


def sft_form(row: Row, *, boxed: bool = False) -> dict[str, Any]:
    r"""``prompt`` and ``completion``: the solution without calculator marks, closed by its answer; ``boxed``: in a box
    in place of behind ``####``, as environments want it that read boxes.

    >>> row = {"question": "2+2?", "answer": "It is <<2+2=4>>4.\n#### 4"}
    >>> sft_form(row)["completion"], sft_form(row, boxed=True)["completion"]
    ('It is 4.\n#### 4', 'It is 4.\nThe answer is \\boxed{4}.')
    """
    form = format_math_dataset([row], "sft", question="question", answer="answer")[0]
    if boxed:
        work, _, answer = form["completion"].rpartition("####")
        form["completion"] = f"{work}The answer is \\boxed{{{answer.strip()}}}."
    return form


def steps(solution: str) -> int:
    """Difficulty by number of steps: the ``<<…>>`` calculations; for the 113 solutions without one, their lines.

    >>> steps("a <<1+1=2>>2\\nb <<2*2=4>>4\\n#### 4"), steps("Two and two.\\n#### 4")
    (2, 1)
    """
    marks = len(MARKS.findall(solution))
    lines = [line for line in solution.split("####")[0].splitlines() if line.strip()]
    return marks or max(1, len(lines))


def gsm8k_rows(split: str, path: str | os.PathLike[str] | None = None) -> list[tuple[int, Row]]:
    """The raw rows (``question``, ``answer``) with line numbers, from ``path`` or the Hugging Face Hub."""
    check_split(split)
    if path is None:
        return list(enumerate(hub_rows(HUB_ID, "main", split, HINT), 1))
    file = split_file(path, split)
    rows = list(read_jsonl(file))
    for line, row in rows:
        for field in ("question", "answer"):
            if not isinstance(row.get(field), str):
                there = ", ".join(map(str, row)) or "no field at all"
                raise DataError(f"{file}:{line}: no text in field {field!r}; the row has: {there}")
        if gold(row["answer"]) is None:
            raise DataError(f"{file}:{line}: the answer has no '#### number' at its end")
    return rows


def task_of(row: Row, split: str, line: int) -> Task:
    """A raw row as a task; ``line`` is its place in the file."""
    form = rl_form(row)
    meta = {"question": form["question"], "full_answer": form["full_answer"], "steps": steps(form["full_answer"])}
    return Task(f"gsm8k/{split}/{line}", form["prompt"], form["ground_truth"], meta)


@SOURCES.register("gsm8k")
def gsm8k(split: str = "train", seed: int = 0, path: str | None = None, shuffle: bool | None = None) -> ListSource:
    """GSM8K as tasks: prompt the question, answer the number as text, meta ``question``, ``full_answer``, ``steps``.

    ``path``: a directory with train.jsonl and test.jsonl, or one file; without it the Hub. Training data is
    shuffled, the test set keeps its order.
    """
    tasks = tuple(task_of(row, split, line) for line, row in gsm8k_rows(split, path))
    shuffled = split == "train" if shuffle is None else shuffle
    return ListSource(tasks, seed if shuffled else None)
