# SPDX-License-Identifier: Apache-2.0
"""Files of rows become tasks, and what is wrong with a row is said with file and line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from palestra.data.dialogues import make_dialogues, row_to_dialogue
from palestra.data.gsm8k import gold, gsm8k_rows, rl_form, sft_form, steps
from palestra.data.rows import load_jsonl
from palestra.data.source import Cursor, make_source
from palestra.errors import ConfigError, DataError
from palestra.reward.answers import is_correct


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


def test_either_name_of_a_field_is_accepted_and_the_rest_is_meta(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    file = write(
        tmp_path / "a.jsonl",
        {"task_id": "x", "question": "2+2?", "answer": "4", "level": 1},
        "",
        {"prompt": messages, "ground_truth": 5},
        {"id": 7, "prompt": "p", "question": "kept as a column"},
    )
    first, second, third = load_jsonl(file)
    assert (first.id, first.prompt, first.answer, first.meta) == ("x", "2+2?", "4", {"level": 1})
    assert (second.id, second.messages(), second.answer) == ("3", tuple(messages), 5)  # named by its line
    assert (third.id, third.answer, third.meta) == ("7", None, {"question": "kept as a column"})


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "p"}, {"text": "q"}], ["a.jsonl:2", "prompt", "question", "text"]),
        ([{"prompt": "p"}, '{"prompt": '], ["a.jsonl:2", "not valid JSON"]),
        (["[1, 2]"], ["a.jsonl:1", "list instead of an object"]),
        ([{"prompt": "  "}], ["a.jsonl:1", "'prompt' is empty"]),
        ([{"prompt": 5}], ["a.jsonl:1", "is a int"]),
        ([{"prompt": [{"role": "user"}]}], ["a.jsonl:1", "message 0", "content"]),
        ([{"prompt": [{"role": "usr", "content": "x"}]}], ["a.jsonl:1", "message 0", "role"]),
        ([{"id": 1, "prompt": "p"}, {"id": "1", "prompt": "q"}], ["a.jsonl:2", "'1'", "line 1"]),
        ([], ["a.jsonl", "empty"]),
    ],
)
def test_a_bad_row_is_told_with_file_and_line(tmp_path: Path, rows: list[Any], words: list[str]) -> None:
    with pytest.raises(DataError) as error:
        load_jsonl(write(tmp_path / "a.jsonl", *rows))
    assert all(w in str(error.value) for w in words), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": [{"role": "user", "content": 5}, {"role": "assistant", "content": "x"}]}, "message 0.*not a int"),
        ({"prompt": [{"role": "user", "content": "?"}], "completion": ["x"]}, "message 1: a str instead of a message"),
        ({"prompt": "?", "completion": 4}, "message 1: its content must be a text, not a int"),
    ],
    ids=["number", "no message", "completion"],
)
def test_a_dialogue_whose_content_is_no_text_is_told(row: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=rf"a.jsonl:3, {told}"):
        row_to_dialogue(row, "a.jsonl:3")


def test_a_missing_field_names_what_is_there_and_what_is_needed_da_002(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"questionn": "q"})
    with pytest.raises(ValueError, match=r"prompt.*questionn"):
        load_jsonl(file)
    file = write(tmp_path / "b.jsonl", {"question": "q"})
    with pytest.raises(ValueError, match=r"b.jsonl:1.*'answer' or 'ground_truth'.*question"):
        load_jsonl(file, needs={"answer": "reward 'accuracy'"})


NEEDS = {"answer": "reward 'accuracy'", "level": "reward 'my:f'"}


@pytest.mark.parametrize("name", ["jsonl", "stream", "table", "curriculum"])
def test_a_row_without_a_field_that_a_reward_reads_is_told_with_file_line_field_and_reward(
    name: str, tmp_path: Path
) -> None:
    def source(*rows: Any, needs: dict[str, str] = NEEDS) -> Any:
        file = str(write(tmp_path / "a.jsonl", *rows))
        if name == "curriculum":
            return make_source(name, needs, source={"name": "jsonl", "path": file}, by="steps")
        return make_source(name, needs, path=file)

    row = {"question": "2+2?", "answer": "4", "level": 1, "steps": 2}
    source(row, row)
    unlevelled = {"question": "2+2?", "answer": "4", "steps": 2}
    with pytest.raises(DataError, match=r"a.jsonl:2: no field 'level', which reward 'my:f' reads; .*answer"):
        source(row, unlevelled)
    source(row, unlevelled, needs={"answer": NEEDS["answer"]})
    if name != "table":  # which is a table of answers
        unanswered = {"question": "2+2?", "level": 1, "steps": 2}
        told = r"a.jsonl:2: no field 'answer' or 'ground_truth', which reward 'accuracy' reads; there is: q"
        with pytest.raises(DataError, match=told):
            source(row, unanswered)
        source(row, unanswered, needs={"level": NEEDS["level"]})


@pytest.mark.parametrize("name", ["jsonl", "stream"])
def test_a_row_may_say_that_it_has_no_answer_but_not_all_of_them(name: str, tmp_path: Path) -> None:
    none, four = {"question": "2+2?", "answer": None}, {"question": "2+2?", "answer": "4"}
    needs = {"answer": "reward 'accuracy'"}
    mixed = make_source(name, needs, path=str(write(tmp_path / "a.jsonl", none, four, none)))
    assert sorted(str(t.answer) for t in mixed.take(Cursor(), 3)[0]) == ["4", "None", "None"]
    file = str(write(tmp_path / "b.jsonl", none, none))
    with pytest.raises(DataError, match=r"b.jsonl: none of 2 tasks has an answer.*reward 'accuracy' reads"):
        make_source(name, needs, path=file)
    assert make_source(name, path=file).size == 2


def test_what_a_row_gives_as_its_prompt_is_no_column_as_well(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"question": "2+2?", "answer": "4"})
    with pytest.raises(DataError, match=r"no field 'question', which .* there is: question \(the prompt\), answer"):
        make_source("jsonl", {"question": "reward 'f'"}, path=str(file))


def test_generated_tasks_are_asked_for_their_fields_too() -> None:
    make_source("arithmetic", {"answer": "reward 'accuracy'", "shape": "reward 'f'"})
    with pytest.raises(DataError, match=r"data source 'arithmetic'.*no field 'hint', which reward 'f' reads; .*shape"):
        make_source("arithmetic", {"hint": "reward 'f'"})
    with pytest.raises(ConfigError, match="unknown option 'needs'"):  # no option of a config
        make_source("jsonl", path="a.jsonl", **{"needs": {}})


def test_a_file_that_is_not_there_or_not_text_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read"):
        load_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="does not exist"):
        make_source("jsonl", path=str(tmp_path / "none"))
    (tmp_path / "bin.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(DataError, match="not UTF-8"):
        load_jsonl(tmp_path / "bin.jsonl")
    write(tmp_path / "train.jsonl", {"prompt": "p"})
    with pytest.raises(DataError, match=r"has no test.jsonl; there is: bin.jsonl, train.jsonl"):
        make_source("jsonl", split="test", path=str(tmp_path))


def test_training_rows_are_shuffled_by_the_seed_and_test_rows_are_not(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path / f"{split}.jsonl", *({"prompt": f"{split} {i}"} for i in range(20)))

    def order(split: str, seed: int) -> list[str]:
        return [t.id for t in make_source("jsonl", split=split, seed=seed, path=str(tmp_path)).take(Cursor(), 20)[0]]

    assert order("test", 0) == order("test", 1) == [str(i) for i in range(1, 21)]
    assert order("train", 0) == order("train", 0) != order("train", 1)


ROW = {
    "question": "Natalia sold 48 clips and then half as many. How many in all?",
    "answer": "She sold 48/2 = <<48/2=24>>24 more.\nThat makes 48+24 = <<48+24=1072>>1,072.\n#### 1,072",
}


def test_gsm8k_gold_drops_the_separator_and_marks() -> None:
    assert gold(ROW["answer"]) == "1072"
    assert gold("no marker") is None
    assert gold("####  ") is None


def test_gsm8k_has_a_raw_an_sft_and_an_rl_form(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROW)
    assert gsm8k_rows("train", tmp_path) == [(1, ROW)]
    assert sft_form(ROW) == {
        "prompt": ROW["question"],
        "completion": "She sold 48/2 = 24 more.\nThat makes 48+24 = 1,072.\n#### 1,072",
    }
    boxed = sft_form(ROW, boxed=True)["completion"]
    assert boxed.endswith("= 1,072.\nThe answer is \\boxed{1,072}.")
    assert is_correct(boxed, gold(ROW["answer"]), "boxed")
    assert rl_form(ROW) == {
        "prompt": ROW["question"],
        "ground_truth": "1072",
        "question": ROW["question"],
        "full_answer": ROW["answer"],
    }
    task = make_source("gsm8k", path=str(tmp_path)).take(Cursor(), 1)[0][0]
    assert (task.id, task.answer, task.meta["steps"]) == ("gsm8k/train/1", "1072", 2)
    (shown,) = make_dialogues("gsm8k", seed=0, path=str(tmp_path), boxed=True)
    assert shown.task == task, "so that an environment shows the task in its own words"
    assert [m["content"] for m in shown.messages] == [ROW["question"], boxed]


def test_difficulty_falls_back_to_lines_where_a_solution_has_no_marks() -> None:
    assert steps("Two and two.\nThat is four.\n#### 4") == 2
    assert steps("#### 4") == 1


def test_a_gsm8k_row_without_its_answer_is_told(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", ROW, {"question": "q"})
    with pytest.raises(DataError, match=r"test.jsonl:2: no text in field 'answer'; the row has: question"):
        make_source("gsm8k", split="test", path=str(tmp_path))
    write(tmp_path / "test.jsonl", {"question": "q", "answer": "four"})
    with pytest.raises(DataError, match=r"test.jsonl:1: the answer has no '#### number'"):
        make_source("gsm8k", split="test", path=str(tmp_path))


def test_without_the_hub_package_gsm8k_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'palestra\[hub\]'.*data\.path=DIR"):
        make_source("gsm8k")
