# SPDX-License-Identifier: Apache-2.0
"""Planted faults: each is reported with its rows, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from palestra import cli
from palestra.data.check import Report, check_files
from palestra.data.duplicates import near_pairs, plain_words
from palestra.errors import ConfigError, DataError
from palestra.reward.validate import validate

STORY = "Ann has {} apples and buys {} more at the market. How many has she now?"
GOOD = [{"id": f"g{n}", "question": STORY.format(n, n + 3), "answer": str(2 * n + 3)} for n in range(1, 8)]


def write(path: Path, *rows: Any) -> Path:
    text = "\n".join(r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in rows)
    path.write_bytes(text.encode("utf-8", "surrogateescape") + b"\n")
    return path


def spoken(*texts: str) -> list[dict[str, Any]]:
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def check(train: Path, test: Path | None = None, **options: Any) -> Report:
    return check_files(
        train, test, verify=lambda task: validate([task], str(task.meta.get("mode", "numeric"))), **options
    )


def found(report: Report) -> list[tuple[str, list[int]]]:
    """Kind and line numbers of each finding."""
    return [(f.kind, [int(r.rpartition(":")[2]) for r in f.rows]) for f in report.findings]


def test_a_good_file_has_no_fault(tmp_path: Path) -> None:
    report = check(write(tmp_path / "a.jsonl", *GOOD))
    assert (found(report), report.rows, report.errors) == ([], {str(tmp_path / "a.jsonl"): 7}, 0)


def test_every_planted_fault_is_reported_with_its_rows_and_nothing_else(tmp_path: Path) -> None:
    rows = [
        *GOOD,  # lines 1–7
        '{"question": "cut off',  # 8
        '"just a text"',  # 9
        '{"question": "\udcff", "answer": "1"}',  # 10, not UTF-8
        {"answer": "5"},  # 11
        {"question": "What is missing here?"},  # 12
        {"question": "  ", "answer": "5"},  # 13
        {"question": "How many hours has a day?", "answer": None},  # 14
        {**GOOD[0], "question": "Is this id taken?", "answer": "6"},  # 15
        {"question": GOOD[1]["question"].upper() + "!!", "answer": "7"},  # 16: as line 2
        {"question": GOOD[2]["question"], "answer": "8"},  # 17: as line 3, whose answer is 9
        {"question": GOOD[3]["question"].replace("Ann", "Eve"), "answer": GOOD[3]["answer"]},  # 18: nearly line 4
        {"question": "What colour is the sky?", "answer": "unknown"},  # 19
        {"question": "And what is left of it?", "answer": "cut off in its \\boxed{5"},  # 20
        {"question": "A long story. " * 60 + "How long?", "answer": "60"},  # 21
    ]
    report = check(write(tmp_path / "a.jsonl", *rows), limit=500)
    assert found(report) == [
        ("unreadable", [8]),
        ("unreadable", [9]),
        ("unreadable", [10]),
        ("missing", [11]),
        ("missing", [12]),
        ("empty", [13]),
        ("empty", [14]),
        ("duplicate_id", [1, 15]),
        ("contradiction", [3, 17]),
        ("bad_gold", [19]),
        ("bad_gold", [20]),
        ("duplicate", [2, 16]),
        ("near_duplicate", [4, 18]),
        ("too_long", [21]),
    ]
    assert report.errors == 11
    said = {f.kind: f.message for f in reversed(report.findings)}
    assert said["missing"] == "no prompt or question or problem or query or instruction or input; the row has: answer"
    assert said["contradiction"] == "one question, two answers: '9' and '8'"
    assert said["bad_gold"] == "the gold answer 'unknown' fails its own verifier"


def test_test_questions_in_the_training_file_are_found_equal_or_nearly_so(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", *GOOD)
    leak = {"question": GOOD[4]["question"].lower(), "answer": GOOD[4]["answer"]}
    near = {"question": GOOD[5]["question"].replace("market", "shop"), "answer": GOOD[5]["answer"]}
    own = {"question": "A train has 9 cars with 40 seats. How many seats?", "answer": "360"}
    test = write(tmp_path / "test.jsonl", own, leak, near)
    assert found(check(train, test)) == [("overlap", [5, 2]), ("near_overlap", [6, 3])]
    assert found(check(train, test, near=False)) == [("overlap", [5, 2])]
    assert found(check(train, write(tmp_path / "own.jsonl", own))) == []


def test_new_numbers_or_another_answer_make_a_new_problem() -> None:
    texts = ["Ann buys 3 red apples", "Ann buys 4 red apples", "Ann buys 3 red pears", "(3+4)*5", "3+(4*5)"]
    assert [(i, j) for i, j, _ in near_pairs([plain_words(t) for t in texts], near=0.7)] == [(0, 2)]
    assert plain_words("(3+4)*5") != plain_words("3+(4*5)")
    assert plain_words("???") != plain_words("!!!")


def test_one_question_asked_about_two_things_is_no_near_duplicate(tmp_path: Path) -> None:
    base = "A shelf holds 12 red and 5 blue books, all of them about the sea. How many {} books are there?"
    rows = [{"question": base.format(c), "answer": a} for c, a in (("red", "12"), ("blue", "5"))]
    assert found(check(write(tmp_path / "a.jsonl", *rows))) == []


@pytest.mark.parametrize(
    ("form", "good", "faults"),
    [
        (
            "sft",
            {"prompt": "p", "completion": "c"},
            [({"prompt": "p", "completion": "d"}, None), ({"prompt": "p", "completion": "c"}, "duplicate"),
             ({"prompt": "q", "completion": " "}, "empty"), ({"prompt": "q"}, "missing")],
        ),
        (
            "preference",
            {"prompt": "p", "chosen": "a", "rejected": "b"},
            [({"prompt": "q", "chosen": "b", "rejected": "a"}, None),
             ({"prompt": "p", "chosen": "b", "rejected": "a"}, "reversed"),
             ({"prompt": "p", "chosen": "a", "rejected": "a"}, "no_preference"),
             ({"prompt": "p", "chosen": "a"}, "missing")],
        ),
        (
            "dialogue",
            {"messages": spoken("hi", "hello")},
            [({"messages": spoken("ho", "hello")}, None), ({"messages": []}, "empty"),
             ({"messages": spoken("hi", "hello")}, "duplicate")],
        ),
        (
            "rl",
            {"prompt": "p", "tests": ["assert f()"]},
            [({"prompt": "q"}, None), ({"tests": ["assert g()"]}, "missing"),
             ({"prompt": "q", "tests": []}, "empty")],
        ),
    ],
)  # fmt: skip
def test_each_form_of_rows_has_its_own_needs(
    tmp_path: Path, form: str, good: dict[str, Any], faults: list[tuple[dict[str, Any], str | None]]
) -> None:
    alone = write(tmp_path / "good.jsonl", good)
    assert check(alone).forms == {str(alone): form}  # told from the fields
    for row, kind in faults:
        path = write(tmp_path / "a.jsonl", good, {"id": "x", **good, **row} if kind is None else row)
        report = check(path, near=False, form=form)
        assert [f.kind for f in report.findings] == ([] if kind is None else [kind])


def test_lengths_are_counted_as_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"question": "w " * n + "?", "answer": "1"} for n in (3, 9, 24)))
    report = check(path, length=lambda text: len(text.split()), unit="words", limit=20)
    assert (report.longest, found(report)) == (25, [("too_long", [3])])
    assert [b for b in report.histogram if b[2]] == [(3, 5, 1), (9, 11, 1), (24, 26, 1)]
    assert sum(n for *_, n in report.histogram) == 3


def test_what_is_being_done_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    check(write(tmp_path / "train.jsonl", *GOOD), write(tmp_path / "test.jsonl", GOOD[0]), told=said.append)
    assert said == [
        "reading train.jsonl",
        "checking 7 rows of train.jsonl",
        "comparing 7 rows of train.jsonl",
        "reading test.jsonl",
        "checking 1 rows of test.jsonl",
        "comparing 1 rows of test.jsonl",
        "comparing the test rows with the training rows",
        "measuring lengths",
    ]


def call(*args: str) -> Any:
    return CliRunner().invoke(cli.app, ["data", "check", *args])


def test_the_verb_checks_a_file_or_the_splits_of_a_directory(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", *GOOD, {"question": "x?", "answer": "\\sqrt{x}"})
    good = call(str(tmp_path / "train.jsonl"))
    assert (good.exit_code, "nothing wrong was found" in good.output) == (0, True)
    write(tmp_path / "test.jsonl", GOOD[0], {"question": "y?", "answer": "many"})
    bad = call(str(tmp_path), "--json")
    counts = json.loads(bad.output)["counts"]
    assert (bad.exit_code, counts) == (1, {"bad_gold": 1, "overlap": 1})
    shown = call(str(tmp_path), "--examples", "0")
    assert "bad gold: 1" in shown.output and "2 errors, 0 warnings" in shown.output
    assert call(str(tmp_path / "train.jsonl"), "--mode", "numeric").exit_code == 1  # a root of x is no number
    tokens = json.loads(call(str(tmp_path / "train.jsonl"), "--model", "builtin:calculator", "--json").output)
    assert tokens["prompt_length"]["unit"] == "tokens"


@pytest.mark.parametrize(
    ("config", "row", "longest", "limit", "said"),
    [
        # The calculator shows "(3+4)*5\\n" to a model of single characters: 8 tokens and <bos>.
        (
            "env: calculator\ndata: arithmetic\nrewards: {accuracy: {function: calculator_accuracy}}\n"
            "sampling: {max_new_tokens: 250}",
            {"prompt": "(3+4)*5\n", "answer": "35"},
            9,
            6,
            "a context of 256 less 250 for a reply",
        ),
        (
            "sft: {data: arithmetic, max_length: 8}",
            {"prompt": "(3+4)*5\n", "completion": "35"},
            11,
            8,
            "sft.max_length",
        ),
        (
            "prefer: {data: arithmetic, max_length: 10}",
            {"prompt": "3*5\n", "chosen": "15", "rejected": "150"},
            8,
            10,
            "prefer.max_length",
        ),
    ],
)
def test_prompts_are_measured_against_the_limits_of_a_config(
    tmp_path: Path, config: str, row: dict[str, Any], longest: int, limit: int, said: str
) -> None:
    (tmp_path / "c.yaml").write_text(f"model: builtin:calculator\nrenderer: plain\n{config}\n", encoding="utf-8")
    path = write(tmp_path / "a.jsonl", row)
    told = json.loads(call(str(path), "--config", str(tmp_path / "c.yaml"), "--json").output)
    length = told["prompt_length"]
    assert (length["unit"], length["longest"], length["limit"]) == ("tokens", longest, limit)
    assert told["counts"] == ({"too_long": 1} if longest > limit else {})
    shown = " ".join(call(str(path), "--config", str(tmp_path / "c.yaml")).output.split())
    assert f"longest {longest}, limit {limit} ({said})" in shown
    assert call(str(path), "--config", str(tmp_path / "c.yaml"), "--model", "builtin:calculator").exit_code == 2


def test_mistakes_in_what_is_asked_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *GOOD)
    with pytest.raises(ConfigError, match="did you mean 'sft'"):
        check(path, form="stf")
    with pytest.raises(DataError, match="cannot read"):
        check(tmp_path / "none.jsonl")
    assert call(str(path), "--mode", "maths").exit_code == 2


GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k"


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not there")
def test_nothing_is_invented_about_gsm8k() -> None:
    report = check(GSM8K / "test.jsonl")
    assert (sum(report.rows.values()), report.findings) == (1319, ())


@pytest.mark.slow  # ten seconds of comparing texts
@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not there")
def test_all_of_gsm8k_has_one_near_duplicate_and_no_error() -> None:
    report = check(GSM8K / "train.jsonl", GSM8K / "test.jsonl")
    assert (sum(report.rows.values()), report.errors) == (8792, 0)
    assert [f.kind for f in report.findings] == ["near_duplicate"]
