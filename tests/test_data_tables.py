# SPDX-License-Identifier: Apache-2.0
"""Tables of questions and answers, whatever their columns are called and however they are stored."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from palestra.data.boxes import boxed_contents
from palestra.data.source import Cursor, make_source
from palestra.data.tables import final_answer, format_math_dataset, read_table
from palestra.errors import ConfigError, DataError
from palestra.reward.validate import validate
from palestra.types import Task

ROW = {"question": "48 and half of it?", "answer": "Half is <<48/2=24>>24.\n<<48+24=1072>>1,072.\n#### 1,072"}
MATH = {"problem": "What is 1/2 + 1/3?", "level": "Level 2", "type": "Algebra",
        "solution": "We get \\boxed{\\frac{4}{6}}, no: $\\boxed{\\frac{5}{6}}$."}  # fmt: skip


def all_of(name: str, **options: Any) -> list[Task]:
    source = make_source(name, shuffle=False, **options)
    return source.take(Cursor(), source.size or 0)[0]


def test_the_three_forms_of_a_table() -> None:
    assert format_math_dataset([ROW], "raw") == [ROW]
    assert format_math_dataset([ROW], "sft") == [
        {"prompt": ROW["question"], "completion": "Half is 24.\n1,072.\n#### 1,072"}
    ]
    assert format_math_dataset([ROW], "rl") == [
        {
            "prompt": ROW["question"],
            "ground_truth": "1072",
            "question": ROW["question"],
            "full_answer": ROW["answer"],
        }
    ]


def test_prompts_may_have_a_system_text_or_go_through_the_models_own_template() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ROW["question"]}]
    assert format_math_dataset([ROW], system="Be brief.")[0]["prompt"] == messages

    class Tokenizer:
        def apply_chat_template(self, given: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
            assert (tokenize, add_generation_prompt) == (False, True)
            return "".join(f"<{m['role']}>{m['content']}" for m in given) + "<assistant>"

    prompt = format_math_dataset([ROW], system="Be brief.", tokenizer=Tokenizer())[0]["prompt"]
    assert prompt == f"<system>Be brief.<user>{ROW['question']}<assistant>"


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("#### 1,234,567", "1234567"),
        ("#### (1,2)", "(1,2)"),
        ("#### ", None),
        ("\\boxed{1} and \\boxed{x^{2}}", "x^{2}"),
        ("so \\boxed 5$", "5"),
        ("so \\boxed{5", None),
        ("  forty ", "forty"),
        ("   ", None),
    ],
)
def test_the_answer_of_a_solution(solution: str, answer: str | None) -> None:
    assert final_answer(solution) == answer


def test_braces_in_boxes_nest_and_may_be_escaped() -> None:
    assert boxed_contents("\\boxed{\\{1, 2\\}} \\fbox{{a}}") == ["\\{1, 2\\}", "{a}"]


def test_unusual_columns_are_named_and_wrong_ones_told() -> None:
    rows = [{"Q": "2+2?", "A": 4}]
    assert format_math_dataset(rows, question="Q", answer="A")[0]["ground_truth"] == "4"
    with pytest.raises(DataError, match=r"row 1: no field 'prompt' or 'question'.*the row has: Q, A"):
        format_math_dataset(rows)
    with pytest.raises(DataError, match="field 'A' is empty"):
        format_math_dataset([{"Q": "?", "A": None}], question="Q", answer="A")
    with pytest.raises(DataError, match="no answer in"):
        format_math_dataset([{"question": "?", "answer": "cut \\boxed{5"}])
    with pytest.raises(ConfigError, match="did you mean 'sft'"):
        format_math_dataset(rows, "stf")


def write_as(path: Path) -> Path:
    if path.suffix == ".jsonl":
        path.write_text(json.dumps(ROW) + "\n", encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps([ROW]), encoding="utf-8")
    elif path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        import importlib

        importlib.import_module("pyarrow.parquet").write_table(pyarrow.Table.from_pylist([ROW]), path)
    else:
        comma = "\t" if path.suffix == ".tsv" else ","
        quoted = [v.replace('"', '""') for v in ROW.values()]
        path.write_text(comma.join(ROW) + "\n" + comma.join(f'"{v}"' for v in quoted) + "\n", encoding="utf-8-sig")
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_every_kind_of_file_gives_the_same_tasks(suffix: str, tmp_path: Path) -> None:
    write_as(tmp_path / f"train.{suffix}")
    (task,) = all_of("table", path=str(tmp_path), mode="numeric")
    assert (task.id, task.prompt, task.answer) == ("train/1", ROW["question"], "1072")
    assert task.meta == {"question": ROW["question"], "full_answer": ROW["answer"], "mode": "numeric"}


def test_files_that_are_no_tables_are_told(tmp_path: Path) -> None:
    for name, text, words in [
        ("a.json", "{", "not valid JSON"),
        ("b.json", "[1]", "list of objects"),
        ("c.txt", "x", "cannot tell what kind of table"),
    ]:
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=words):
            list(read_table(tmp_path / name))
    with pytest.raises(DataError, match="does not exist"):
        list(read_table(tmp_path / "none.csv"))
    with pytest.raises(DataError, match=r"has no train with .jsonl.*there is: a.json"):
        make_source("table", path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"either data.path or data.hub"):
        make_source("table")
    with pytest.raises(ConfigError, match="did you mean 'numeric'"):
        make_source("table", path=str(tmp_path), mode="numerics")


def test_rows_keep_their_id_and_further_columns_but_none_that_rewards_get_from_us(tmp_path: Path) -> None:
    row = {"id": 7, "problem": "?", "ground_truth": "5", "answer": "five", "topic": "sets", "completions": []}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (task,) = all_of("table", path=str(tmp_path / "a.jsonl"))
    assert (task.id, task.answer) == ("7", "5")
    assert task.meta == {"topic": "sets", "question": "?", "full_answer": "5"}


def test_a_set_on_the_hub_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    hub = types.ModuleType("datasets")
    vars(hub)["load_dataset"] = lambda *args, **kwargs: asked.append((args, kwargs)) or [ROW]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert [t.answer for t in all_of("table", hub="me/sums", subset="main", split="test")] == ["1072"]
    assert asked == [(("me/sums", "main"), {"split": "test"})]


def test_math_is_read_from_a_table_or_its_own_tree_and_compared_as_mathematics(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(json.dumps(MATH) + "\n" + json.dumps({**MATH, "level": "Level ?"}))
    folder = tmp_path / "train" / "algebra"
    folder.mkdir(parents=True)
    (folder / "3.json").write_text(json.dumps(MATH))
    first, second = all_of("math", split="test", path=str(tmp_path))
    (third,) = all_of("math", path=str(tmp_path))
    assert (first.id, first.answer, first.meta["level"]) == ("test/1", "\\frac{5}{6}", 2)
    assert "level" not in second.meta
    assert (third.id, third.meta["mode"], third.meta["type"]) == ("train/algebra/3", "math", "Algebra")
    assert validate([first, third], "math") == []
