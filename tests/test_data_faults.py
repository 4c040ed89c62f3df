# SPDX-License-Identifier: Apache-2.0
"""Each form of data file, clean and with planted faults: nothing is said about the one, and every fault of the other
is reported with its line, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_data_check import check, found, spoken, write

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
OTHER = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 5, "b": 7}'}}


def called(call: dict[str, Any], result: str) -> list[dict[str, Any]]:
    """A dialogue with a tool, whose call has no text."""
    asked = {"role": "user", "content": "Use the tool."}
    return [
        asked,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": "Done."},
    ]


# A table of questions ---------------------------------------------------------------------------------------

TABLE: list[Any] = [
    {"question": "What is 3 - 4?", "answer": "-1"},
    {"question": "What is 3 + 4?", "answer": 7},
    {"question": "What is 5! ?", "answer": "120"},
    {"question": "What is 5 ?", "answer": "5"},
    {"question": "How much is it in dollars?", "answer": "$1,250.50"},
    {"question": "Which share is left?", "answer": "3/4", "note": None},
    {"question": "Which share is gone, in percent?", "answer": "25%"},
    {"question": "Columns that are null are none.", "ground_truth": None, "answer": "8"},
    {"question": "A root of x, as mathematics?", "answer": "\\sqrt{x}", "mode": "math"},
    {"question": "¿Cuántos años tiene 小明?", "answer": "12"},
    {"question": "Zero is an answer. Is it 0?", "answer": 0},
    {"question": "How old is René, Ângela, SÃO or JOÃO?", "answer": "4"},
    {"question": "1+1? #### 2\n2+2?", "answer": "4"},
    {"question": "1+1? #### 2\n0+2?", "answer": "2"},
]
TABLE_FAULTS: list[tuple[Any, str]] = [
    ('{"question": "not closed', "unreadable"),
    ("[1, 2]", "unreadable"),
    ("question,answer", "unreadable"),
    ({}, "missing"),
    ({"question": "Where is the answer?"}, "missing"),
    ({"answer": "3"}, "missing"),
    ({"question": "", "answer": "3"}, "empty"),
    ({"question": "\n \t", "answer": "3"}, "empty"),
    ({"question": "Is null an answer?", "answer": None}, "empty"),
    ({"question": "Is a blank an answer?", "answer": " "}, "empty"),
    ({"question": 17, "answer": "3"}, "malformed"),
    ({"question": {"text": "nested"}, "answer": "3"}, "malformed"),
    ({"question": "Is an object an answer?", "answer": {"value": 3}}, "malformed"),
    ({"question": [{"content": "Who says so?"}], "answer": "3"}, "malformed"),
    ({"question": [{"role": "usr", "content": "Who?"}], "answer": "3"}, "malformed"),
    ({"question": "Who knows?", "answer": "nobody"}, "bad_gold"),
    ({"question": "Is not a number one?", "answer": float("nan")}, "bad_gold"),
    ({"question": "What is in the box?", "answer": "so \\boxed{5"}, "bad_gold"),
    ({"question": "What does caf\ufffd mean?", "answer": "4"}, "garbled"),
    ({"question": "How old is RenÃ©?", "answer": "4"}, "garbled"),
    ({"question": "What is Bobâ€™s share?", "answer": "4"}, "garbled"),
    ('{"question": "Half a \\ud800 character?", "answer": "1"}', "unreadable"),
    ({"question": "What is given away? #### 72", "answer": "72"}, "leak"),
]

# GSM8K ------------------------------------------------------------------------------------------------------

GSM8K: list[Any] = [
    {"question": f"Ann sold {2 * n} clips and then {'half' if n % 2 else '1/2'} as many. How many did she sell?",
     "answer": f"Then {2 * n}/2 = <<{2 * n}/2={n}>>{n}.\nIn all <<{2 * n}+{n}={3 * n}>>{3 * n:,}.\n#### {3 * n:,}"}
    for n in (3, 8, 12, 700)
] + [{"question": "A third of 10 pies, about?", "answer": "<<10/3=3.33>>3.33, so 3 whole ones\n#### 3"}]  # fmt: skip
GSM8K_FAULTS: list[tuple[Any, str]] = [
    ({"question": "Where is the mark?", "answer": "Half of 96 is <<96/2=48>>48, and that is all."}, "bad_gold"),
    ({"question": "What is behind the mark?", "answer": "<<96/2=48>>48\n#### "}, "bad_gold"),
    ({"question": "Words behind the mark?", "answer": "<<96/2=48>>48\n#### see above"}, "bad_gold"),
    ({"question": "Is 96/2 47?", "answer": "<<96/2=47>>47\n#### 47"}, "bad_step"),
    ({"question": "Is 3*4 7?", "answer": "<<3*4=7>>7\n<<7+1=8>>8\n#### 8"}, "bad_step"),
    ({"question": "", "answer": "<<1+1=2>>2\n#### 2"}, "empty"),
    ({"question": "No answer at all?", "answer": ""}, "empty"),
    ({"problem": "Another name for the answer?", "lösung": "#### 2"}, "missing"),
]

# Messages ---------------------------------------------------------------------------------------------------

MESSAGES: list[Any] = [
    {"messages": spoken("hi", "hello")},
    {"messages": [{"role": "system", "content": "Be brief."}, *spoken("hi", "hello")]},
    {"messages": spoken("hi", "hello", "and now?", "good bye")},
    {"messages": called(CALL, "3"), "tools": [{"name": "add"}]},
    {"messages": called(OTHER, "3"), "tools": None},
    {"messages": called(CALL, "")},
    {"messages": spoken("Is it yes, or no?", "Yes"), "answer": None, "prompt": None},
]
MESSAGES_FAULTS: list[tuple[Any, str]] = [
    ({"messages": "user: hi\nassistant: hello"}, "malformed"),
    ({"messages": {"role": "user", "content": "hi"}}, "malformed"),
    ({"messages": ["hi", "hello"]}, "malformed"),
    ({"messages": [{"content": "hi"}, {"role": "assistant", "content": "ho"}]}, "malformed"),
    ({"messages": [{"role": None, "content": "hi"}, {"role": "assistant", "content": "ho"}]}, "malformed"),
    ({"messages": [{"role": "human", "content": "hi"}, {"role": "assistant", "content": "ho"}]}, "malformed"),
    ({"messages": [{"role": "user", "content": 5}, {"role": "assistant", "content": "ho"}]}, "malformed"),
    ({"messages": [*spoken("hi"), {"role": "assistant", "content": [{"type": "text", "text": "ho"}]}]}, "malformed"),
    ({"messages": [*spoken("hi"), {"role": "assistant", "tool_calls": "add(1, 2)"}]}, "malformed"),
    ({"messages": spoken("tools as text", "ok"), "tools": "add"}, "malformed"),
    ({"messages": spoken("nobody answers")}, "no_reply"),
    ({"messages": [{"role": "system", "content": "Nobody asks."}]}, "no_reply"),
    ({"messages": spoken("a blank reply", " \n")}, "empty"),
    ({"messages": [*spoken("no reply"), {"role": "assistant"}]}, "empty"),
    ({"messages": spoken("", "an answer to nothing")}, "empty"),
    ({"messages": spoken("first", "reply", "and nobody answers this")}, "unanswered"),
    ({"messages": []}, "empty"),
    ({"messages": None}, "empty"),
    ({"message": spoken("a typo", "ok")}, "missing"),
]

# Pairs ------------------------------------------------------------------------------------------------------

PAIRS: list[Any] = [
    {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
    {"prompt": "2+2?", "chosen": "4", "rejected": "3"},
    {"prompt": spoken("2+3?"), "chosen": spoken("", "5")[1:], "rejected": spoken("", "6")[1:]},
    {"chosen": spoken("2+4?", "6"), "rejected": spoken("2+4?", "7")},  # whole dialogues: the prompt is in them
    {"prompt": None, "chosen": spoken("2+5?", "7"), "rejected": spoken("2+5?", "8")},
    {"prompt": "2+6?", "chosen": spoken("2+6?", "8"), "rejected": spoken("2+6?", "9")},
    {"prompt": "Use it.", "chosen": called(CALL, "3")[1:], "rejected": called(OTHER, "3")[1:]},
    {"prompt": "Is it?", "chosen": "Yes.", "rejected": "Yes!", "answer": None},
]
PAIRS_FAULTS: list[tuple[Any, str]] = [
    ({"prompt": "p1", "chosen": "a"}, "missing"),
    ({"prompt": "p2", "rejected": "a"}, "missing"),
    ({"chosen": "p3", "rejected": "a"}, "missing"),
    ({"prompt": "p4", "chosen": "", "rejected": "a"}, "empty"),
    ({"prompt": "p5", "chosen": "a", "rejected": None}, "empty"),
    ({"prompt": "p6", "chosen": "a", "rejected": []}, "empty"),
    ({"prompt": " ", "chosen": "a", "rejected": "b"}, "empty"),
    ({"prompt": "p7", "chosen": spoken("", " ")[1:], "rejected": "b"}, "empty"),
    ({"prompt": "p8", "chosen": spoken("", "x")[1:], "rejected": [{"role": "assistant", "content": ""}]}, "empty"),
    ({"prompt": "p9", "chosen": "same", "rejected": "same"}, "no_preference"),
    ({"prompt": "p9b", "chosen": "same", "rejected": "same\n"}, "no_preference"),
    ({"chosen": spoken("q1", "same"), "rejected": spoken("q1", "same")}, "no_preference"),
    ({"chosen": spoken("one", "a"), "rejected": spoken("another", "b")}, "malformed"),
    ({"prompt": "not theirs", "chosen": spoken("q2", "a"), "rejected": spoken("q2", "b")}, "malformed"),
    ({"prompt": "p10", "chosen": {"role": "assistant", "content": "a"}, "rejected": "b"}, "malformed"),
    ({"prompt": "p11", "chosen": 4, "rejected": 5}, "malformed"),
    ({"prompt": "p12", "chosen": [{"content": "no role"}], "rejected": "b"}, "malformed"),
    ({"prompt": "p13", "completion": "c", "label": "good"}, "malformed"),
    ({"prompt": "p14", "completion": "c", "label": None}, "empty"),
]

# Prompt and completion --------------------------------------------------------------------------------------

COMPLETIONS: list[Any] = [
    {"prompt": "2+2?", "completion": "4"},
    {"prompt": spoken("2+3?"), "completion": spoken("", "5")[1:]},
    {"prompt": "2+2?", "completion": "It is 4.", "answer": None},
]
COMPLETIONS_FAULTS: list[tuple[Any, str]] = [
    ({"prompt": "p1"}, "missing"),
    ({"question": "p2", "completion": "c"}, "missing"),
    ({"prompt": "p3", "completion": " "}, "empty"),
    ({"prompt": "", "completion": "c"}, "empty"),
    ({"prompt": "p4", "completion": None}, "empty"),
    ({"prompt": 4, "completion": "c"}, "malformed"),
    ({"prompt": "p5", "completion": ["c"]}, "malformed"),
    ({"prompt": [{"role": "user", "content": ""}], "completion": "c"}, "empty"),
    ({"prompt": "p\x006", "completion": "c"}, "garbled"),
]

FORMS = {
    "table": ("rl", TABLE, TABLE_FAULTS),
    "gsm8k": ("rl", GSM8K, GSM8K_FAULTS),
    "messages": ("dialogue", MESSAGES, MESSAGES_FAULTS),
    "pairs": ("preference", PAIRS, PAIRS_FAULTS),
    "completions": ("sft", COMPLETIONS, COMPLETIONS_FAULTS),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "bom"])
def test_a_clean_file_has_no_fault(tmp_path: Path, name: str, mark: str) -> None:
    form, clean, _ = FORMS[name]
    path = write(tmp_path / "a.jsonl", *clean)
    path.write_text(mark + path.read_text())
    report = check(path, near=False)
    assert (found(report), report.forms) == ([], {str(path): form})


@pytest.mark.parametrize("name", FORMS)
def test_every_planted_fault_is_reported_at_its_line_and_none_is_invented(tmp_path: Path, name: str) -> None:
    form, clean, faults = FORMS[name]
    report = check(write(tmp_path / "a.jsonl", *clean, *(row for row, _ in faults)), near=False, form=form)
    planted = [(kind, [line]) for line, (_, kind) in enumerate(faults, len(clean) + 1)]
    assert sorted(found(report), key=lambda f: f[1]) == planted


@pytest.mark.parametrize("name", FORMS)
def test_a_fault_alone_among_clean_rows_does_not_change_what_the_file_is_taken_for(tmp_path: Path, name: str) -> None:
    _, clean, faults = FORMS[name]
    for row, kind in faults:
        report = check(write(tmp_path / "a.jsonl", *clean, row), near=False)
        assert found(report) == [(kind, [len(clean) + 1])], row


def test_one_question_with_two_answers_is_a_contradiction_only_if_it_is_one_question(tmp_path: Path) -> None:
    def kinds(*rows: tuple[str, Any]) -> list[str]:
        path = write(tmp_path / "a.jsonl", *({"question": q, "answer": a} for q, a in rows))
        return [f.kind for f in check(path, near=False).findings]

    assert kinds(("How many apples?", "3"), ("how many  apples?", "4")) == ["contradiction"]
    assert kinds(("What is 5!", "120"), ("What is 5", "5")) == [], "a sign makes another question"
    for same in (("1,000", "1000"), ("2", "2.0"), ("$4", 4), ("7", " 7 ")):
        assert kinds(*(("How many apples?", a) for a in same)) == ["duplicate"], same


@pytest.mark.parametrize("content", ["", "\n\n  \n", "\ufeff"])
def test_a_file_without_rows_is_a_fault(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    report = check(tmp_path / "a.jsonl")
    assert [(f.kind, f.rows, f.message) for f in report.findings] == [
        ("empty", (str(tmp_path / "a.jsonl"),), "no row in the file")
    ]


def test_other_tables_are_read_the_same_way(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\ufeffquestion,answer\n2+2?,4\n2+3?,5,6\n2+4?\n", encoding="utf-8")
    assert found(check(tmp_path / "a.csv")) == [("malformed", [2]), ("empty", [3])]
    (tmp_path / "a.json").write_text("\ufeff" + json.dumps(TABLE[:2]), encoding="utf-8")
    assert found(check(tmp_path / "a.json")) == []


def test_tasks_with_messages_as_their_prompt_are_checked_too(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "system", "content": "Be brief."}, *spoken("2+2?")], "ground_truth": "4", "id": "a"},
        {"prompt": spoken("2+3?"), "ground_truth": "5", "id": "b"},
        {"prompt": [], "ground_truth": "6", "id": "c"},
        {"prompt": [{"role": "user"}], "ground_truth": "6", "id": "a"},
    ]
    assert found(check(write(tmp_path / "a.jsonl", *rows))) == [
        ("empty", [3]),
        ("empty", [4]),
        ("duplicate_id", [1, 4]),
    ]
