# SPDX-License-Identifier: Apache-2.0
"""Written equations are checked, a true one is never called false, and the rule behind each verdict is shown."""

from __future__ import annotations

import json
import random
import re
from fractions import Fraction
from pathlib import Path

import pytest

from palestra.eval.equations import NUMBER, equations, numbers, operations, plain
from palestra.eval.mistakes import Reply, classify, difficulty, gold_operations
from palestra.types import Task

GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k" / "test.jsonl"
CLIPS = Task(
    "clips",
    "Natalia sold clips to 48 friends in April, and half as many in May. How many in all?",
    "72",
    {"full_answer": "In May 48/2 = <<48/2=24>>24.\nIn all 48+24 = <<48+24=72>>72.\n#### 72", "steps": 2},
)


@pytest.mark.parametrize(
    ("text", "true"),
    [
        ("48/2 = 24", [True]),
        ("48/2 = 25 clips", [False]),
        ("so 3*4 = 12 + 5 = 17", [True, True]),
        ("so 3*4 = 12 + 5 = 18", [True, False]),
        ("5 + 3 = 2 * 4", [True]),
        ("25% of 80 = 20", [True]),
        ("20/80 = 25%, and 100% - 80% = 20", [True, True]),
        ("10/3 = 3.33 and 10/3 = 3.43", [True, False]),
        ("2/4 = 0.6", [False]),
        ("$1,200 × 2 = $2,400", [True]),
        (r"\frac{3}{4} \times 8 = 6", [True]),
        ("5/2 = 2 1/2", [True]),
        ("3 apples + 4 apples = 8 apples", [False]),
        ("(3 + 4) * 5 = 35", [True]),
        ("He gets **7 * 8 = 54**.", [False]),
    ],
)
def test_equations_are_read_and_checked(text: str, true: list[bool]) -> None:
    assert [e.true for e in equations(text)] == true


@pytest.mark.parametrize(
    "text",
    [
        "2x + 3 = 7",
        "n - 3 + 4 = 8",
        "10 - 3^2 + 1 = 2",
        "at 6:30 - 1 = 5",
        "25 / 1/3 = 75",
        "4 pounds - 6 ounces = 58 ounces",
        "weeks 1-2 = 96 - 70",
        "2(50+100) = 300",
        "$2.50 - $2.24 = 26 cents",
        "20 minutes = 60 + 20",
        "no numbers at all",
    ],
)
def test_what_arithmetic_would_misread_is_left_alone(text: str) -> None:
    assert [e.text for e in equations(text) if not e.true] == []


def test_the_equations_of_gsm8ks_own_solutions_are_true_and_planted_faults_are_found() -> None:
    rows = [json.loads(line)["answer"] for line in GSM8K.read_text(encoding="utf-8").splitlines()[:300]]
    found = [e for row in rows for e in equations(row)]
    assert len(found) > 900
    assert [e.text for e in found if not e.true] == []
    whole = [e for e in found if e.written.denominator == 1 and e.value == e.written][:200]
    planted = [f"{e.text.split('=')[0]}= {int(e.written) + 1}" for e in whole]
    assert all(not e.true for text in planted for e in equations(text))


def test_a_long_row_of_digits_is_read_once() -> None:
    """A million digits: read again from each of them, this would take hours."""
    digits = "7" * 1_000_000
    assert plain(digits) == digits
    assert re.findall(NUMBER, f"{digits}x 12") == ["12"]
    assert numbers(f"{digits}x 12") == [12]


def test_numbers_are_those_that_an_attempt_from_every_character_finds() -> None:
    def slow(text: str) -> list[str]:
        found, at = [], 0
        while at < len(text):
            match = re.match(r"\d+(?:\.\d+)?|\.\d+", text[at:])
            if match is not None and not re.match("[A-Za-z0-9]", text[at + match.end() :]):
                found.append(match[0])
                at += match.end()
            else:
                at += 1
        return found

    rng = random.Random(0)
    texts = ["".join(rng.choices("127.,x% -", k=rng.randint(1, 12))) for _ in range(5000)]
    assert [t for t in texts if re.findall(NUMBER, t) != slow(t)] == []


def test_operations_come_from_equations_and_from_calls_in_text() -> None:
    said = "<call>mul(8,711)</call> then (3+4)*5 = 35"
    assert [str(o) for o in operations(said)] == ["8 * 711", "3 + 4", "7 * 5"]
    assert operations("1/0 = 3") == []
    assert numbers("1,200 and .5") == [Fraction(1200), Fraction(1, 2)]


def test_gold_operations_and_difficulty_come_from_the_solution_or_from_an_arithmetic_question() -> None:
    assert [str(o) for o in gold_operations(CLIPS)] == ["48 / 2", "48 + 24"]
    assert [str(o) for o in gold_operations(Task("t", "(64*96)+69\n", 6213))] == ["64 * 96", "6144 + 69"]
    assert (difficulty(CLIPS), difficulty(Task("t", "(64*96)+69\n", 6213)), difficulty(Task("t", "Who?"))) == (
        2,
        2,
        None,
    )


@pytest.mark.parametrize(
    ("said", "read", "kind", "rule"),
    [
        ("48/2 = 25. 48 + 25 = 73", "73", "calculation", "48/2 = 25 is written; it is 24"),
        ("48*2 = 96. 48 + 96 = 144", "144", "reasoning", "48 * 2 is computed where the gold solution has 48 / 2"),
        ("48/2 = 24. 48 - 24 = 24", "24", "comprehension", "24 answers step 1 of 2"),
        ("48/2 = 24", "24", "comprehension", "a part of what was asked"),
        ("49/2 = 24.5. 49 + 24.5 = 73.5", "73.5", "comprehension", "49 is neither in the question nor the result"),
        ("2 * 12 = 24 in May, 24 + 12 = 36", "36", "comprehension", "48, which the gold solution needs, is never used"),
        ("48/2 = 24. 48 + 24 = 72. #### 27", "27", "format", "72, the right answer, was computed last"),
        ("It is 72, I am sure of it: 5", "5", "format", "the right answer, 72, is in the text"),
        ("seventy-two", "72", "format", "72, is right, but not in the form that counts"),
        ("I do not know", None, "format", "no answer could be read"),
        ("It must be 50.", "50", "reasoning", "no step is written; the gold solution has 2"),
    ],
)
def test_each_mistake_has_its_class_and_the_rule_that_decided(said: str, read: str, kind: str, rule: str) -> None:
    found = classify(CLIPS, Reply(said, read))
    assert (found.kind, rule in found.rule) == (kind, True), found.rule


def test_an_episode_without_an_end_is_a_format_mistake_and_says_how_it_ended() -> None:
    found = classify(CLIPS, Reply("48/2 =", None, ended="the reply was cut off by the length limit"))
    assert (found.kind, found.rule) == ("format", "there is no answer: the reply was cut off by the length limit")


def test_without_a_gold_solution_only_what_the_question_tells_is_decided() -> None:
    task = Task("t", "Ann has 5 bags of 6 shells and loses 4. How many are left?", "26")
    assert classify(task, Reply("5*6 = 30, 30+4 = 34", "34")).kind == "reasoning"
    assert "17 is neither" in classify(task, Reply("17*6 = 102", "102")).rule
    assert classify(task, Reply("Some of them.", "3")).kind == "undecided"
    assert classify(Task("t", "Who wrote it?", "Ann"), Reply("Bob did", "Bob")).kind == "undecided"


@pytest.mark.parametrize(
    "text", ["It is " + "1" * 399 + ".", "9" * 399 + " * 9 = 7", "mul(" + "1" * 190 + ", " + "1" * 190 + ")"]
)
def test_numbers_beyond_every_float_are_read_like_others(text: str) -> None:
    gold = Task("t", "What is 2 + 3?", answer="5")
    assert classify(gold, Reply(text, "7")).kind in ("undecided", "calculation", "comprehension")
