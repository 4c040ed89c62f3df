# SPDX-License-Identifier: Apache-2.0
"""New rows keep their answers: checked by another evaluation than the one that made them, and on GSM8K itself."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from fractions import Fraction
from itertools import islice
from pathlib import Path

import pytest
from typer.testing import CliRunner

from palestra import cli
from palestra.data.augment import NAMES, ask_first, augment, rename, reword
from palestra.data.curriculum import read_pass_rates
from palestra.data.renumber import evaluate, renumbered, steps_of
from palestra.errors import ConfigError, DataError
from palestra.rollout.dump import write_rollouts
from palestra.types import Episode, Group, RewardTerm, StopReason, Task, Trajectory

QUESTION = "Ann sold 48 clips for $1.50 each in April, and half as many in May. How much did she earn in all?"
SOLUTION = (
    "In May she sold 48/2 = <<48/2=24>>24 clips.\n"
    "In all 48 + 24 = <<48+24=72>>72.\n"
    "She earned 72 x $1.50 = $<<72*1.50=108>>108.\n#### 108"
)


def numbers(text: str) -> list[Fraction]:
    return [Fraction(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def made(question: str, solution: str, seed: int = 0) -> tuple[str, str] | None:
    return renumbered(question, solution, random.Random(seed))


def test_the_new_solution_is_what_the_new_numbers_give() -> None:
    for seed in range(30):
        new = made(QUESTION, SOLUTION, seed)
        assert new is not None
        sold, price = numbers(new[0])
        assert 24 <= sold <= 96 and Fraction("0.75") <= price <= 3
        answer = (sold + sold / 2) * price  # worked out from the story, not from the steps
        assert Fraction(new[1].rpartition("####")[2].strip()) == answer
        assert new[0].replace(str(sold), "N", 1).startswith("Ann sold N clips for $")
        assert new[1].startswith(f"In May she sold {sold}/2 = <<{sold}/2={sold / 2}>>{sold / 2} clips.")


def test_the_same_seed_makes_the_same_problem_and_numbers_stay_written_as_they_were() -> None:
    assert made(QUESTION, SOLUTION, 3) == made(QUESTION, SOLUTION, 3) != made(QUESTION, SOLUTION, 4)
    question = "A mill makes 1,200 boards a day, 20% of them oak. How many oak boards is that in 3 days?"
    solution = "It makes 1,200*.20=<<1200*.20=240>>240 a day.\nThat is 240*3=<<240*3=720>>720\n#### 720"
    new = made(question, solution, 1)
    assert new is not None
    boards, percent, days = numbers(new[0])
    assert numbers(new[1])[-1] == boards * percent / 100 * days and boards % 100 == 0 and percent % 5 == 0
    assert f"{int(boards):,} boards" in new[0] and f"{int(boards):,}*" in new[1]
    assert (
        made(question, solution.replace("240*3=720>>720", "240*5=1200>>1,200").replace("#### 720", "#### 1,200"))
        is None
    )


@pytest.mark.parametrize(
    ("question", "solution"),
    [
        ("48 and half of it?", "<<48/2=25>>25\n#### 25"),  # a step that is wrong
        ("48 and half of it?", "<<48/2=24>>24\n#### 25"),  # an answer that is not the last step
        ("10 apples for 3 children?", "<<10/3=3>>3\n#### 3"),  # a step that was rounded
        ("How many is 5 and 2 less?", "<<7-2=5>>5\n#### 5"),  # 7 is nowhere in the story
        ("He has 5 pens and 5 pencils. All?", "<<5+5=10>>10\n#### 10"),  # which of the two fives?
        ("Two of 9 are red. The rest?", "9-<<9-2=7>>7\n#### 7, as 3 said"),  # no number behind the marker
        ("She has 2 cats and twice as many dogs.", "<<2*2=4>>4\n#### 4"),  # which 2 is "twice"?
        ("A day has 24 hours. Two of them?", "<<24*2=48>>48\n#### 48"),  # a constant of nature
        ("x is 4. Twice?", "<<4x*2=8>>8\n#### 8"),  # no plain arithmetic
        ("No marks at all with 4?", "4\n#### 4"),
        ("6 and 7 more, less 36?", "<<6+7=13>>13, not 99\n#### 13"),  # 99 comes from nowhere
    ],
)
def test_what_is_in_doubt_is_refused(question: str, solution: str) -> None:
    assert made(question, solution) is None


@pytest.mark.parametrize(
    ("question", "kept"),
    [
        ("He packs {a} boxes a day. How many boxes is that in {b} days?", (8, 7)),
        ("He packs {a} boxes an hour. How many is that in {b} hours?", (8, 24)),
        ("He packs {a} boxes a month. How many is that in {b} months?", (8, 12)),
        ("He packs {a} boxes a minute. How many is that in {b} minutes?", (8, 60)),
        ("He works {b} hours a day for {a} kids. How many hours is that?", (11, 9)),
        ("He works {b} days per week for {a} shops. How many days is that?", (11, 5)),
        ("He sold {a} pens in April with {b} days in the month. How many?", (11, 26)),
        ("{a} shops open at {b} pm. What is their product?", (11, 8)),
        ("On May {b} he sold {a} pens to each. What is their product?", (11, 8)),
        ("In room {b} there are {a} pens in each box. What is their product?", (11, 8)),
    ],
)
def test_what_the_world_or_the_calendar_gives_keeps_its_number(question: str, kept: tuple[int, int]) -> None:
    a, b = kept
    text, solution = question.format(a=a, b=b), f"<<{a}*{b}={a * b}>>{a * b}\n#### {a * b}"
    changed = 0
    for seed in range(10):
        new = made(text, solution, seed)
        assert new is not None, "the other number can be changed"
        one, other = numbers(new[0])
        assert b in (one, other), f"{b} was changed: {new[0]}"
        changed += a not in (one, other)
    assert changed


def test_arithmetic_is_exact_and_nothing_but_arithmetic() -> None:
    assert evaluate("0.1+0.2") == Fraction(3, 10)
    assert evaluate("-(2+3)*.5/007") == Fraction(-5, 14)
    for text in ("", "2**3", "2//1", "1/0", "__import__('os')", "(1", "1 2"):
        assert evaluate(text) is None
    assert [s.result for s in steps_of(SOLUTION) or []] == [24, 72, 108]


def test_names_are_exchanged_everywhere_for_names_of_the_same_list() -> None:
    new = rename("Karen and Tom are friends. Karen's cat likes Tom.", "Tom has <<3+1=4>>4.\n#### 4", random.Random(2))
    assert new is not None
    she, he = re.findall(r"^(\w+) and (\w+) ", new[0])[0]
    assert she in NAMES[0] and he in NAMES[1] and not {she, he} & {"Karen", "Tom"}
    assert new == (f"{she} and {he} are friends. {she}'s cat likes {he}.", f"{he} has <<3+1=4>>4.\n#### 4")
    assert rename("Tomorrow Benjamin pays.", "4", random.Random(0)) is None  # no name inside a word
    assert not set(NAMES[0]) & set(NAMES[1])


@pytest.mark.parametrize(
    "text",
    [
        "San Jose has 3 parks.",
        "He carves 5 Jack-o'-lanterns.",
        "Santa Barbara is 90 miles away.",
        "King Henry has 9 wives.",
        "Tom Sawyer paints 3 fences.",
        "She buys 3 burgers at Wendy's on Monday.",
        "Dave's Single costs $5.",
    ],
)
def test_a_name_that_may_be_no_persons_is_left_alone(text: str) -> None:
    assert rename(text, "#### 1", random.Random(0)) is None


def test_the_question_moves_to_the_front_only_where_it_stands_alone() -> None:
    rng = random.Random(0)
    assert ask_first("A box holds 5 pens. How many pens do 4 boxes hold?", "20", rng) == (
        "How many pens do 4 boxes hold? A box holds 5 pens.",
        "20",
    )
    for story in ("A box holds 5 pens. How many are left in it?", "How many?", "A box. It is red."):
        assert ask_first(story, "1", rng) is None
    assert reword("2+2?", "4", rng) is not None


ROWS = [
    {"question": QUESTION, "answer": SOLUTION, "level": 2},
    {"id": "k", "question": "Karen has 3 pens. How many pens has Karen?", "answer": "3"},
]


def test_rows_are_made_by_seed_row_and_copy_and_keep_their_columns() -> None:
    new = list(augment(ROWS, ("numbers", "names", "order", "wording"), copies=2, seed=5))
    assert new == list(augment(ROWS, ("numbers", "names", "order", "wording"), copies=2, seed=5))
    assert [row for _, row in augment(ROWS[1:], ("names",), copies=2, seed=5)] == [r for k, r in new if k == "names"]
    assert {k: [r["id"] for kind, r in new if kind == k] for k in ("numbers", "names", "order")} == {
        "numbers": ["1/numbers-1", "1/numbers-2"],
        "names": ["k/names-1", "k/names-2"],
        "order": ["k/order-1"],  # the second copy would be the first again
    }
    assert all(row["level"] == 2 for _, row in new if row["id"].startswith("1/"))
    assert len({row["question"] for _, row in new} | {r["question"] for r in ROWS}) == len(new) + 2
    with pytest.raises(ConfigError, match="did you mean 'numbers'"):
        list(augment(ROWS, ("number",)))
    with pytest.raises(DataError, match=r"row 1: no field"):
        list(augment([{"text": "?"}]))


def call(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["data", *args])
    return result.exit_code, result.output


def test_the_verb_writes_old_and_new_rows(tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    code, said = call("augment", str(source), "--out", str(out), "--copies", "2")
    assert code == 0 and "2 rows of" in said and "names 2, numbers 2" in " ".join(said.split())
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows[:2] == ROWS and len(rows) == 6
    assert call("check", str(out))[0] == 0
    assert call("augment", str(source), "--out", str(out), "--no-originals", "--kinds", "wording")[0] == 0
    assert len(out.read_text().splitlines()) == 2
    assert call("augment", str(source), "--out", str(source))[0] == 2
    assert source.read_text().count("\n") == 2


def test_the_verb_counts_pass_rates_over_a_run(tmp_path: Path) -> None:
    def group(name: str, *values: float) -> Group:
        task = Task(name, "?")
        terms = [{"right": RewardTerm(v)} for v in values]
        return Group(
            task, 0, tuple(Episode(task, (Trajectory((), StopReason.ENV_TERMINATED, rewards=t),)) for t in terms)
        )

    write_rollouts(tmp_path / "run" / "rollouts" / "step_000001.jsonl.zst", [group("a", 1, 0), group("b", 0)])
    write_rollouts(tmp_path / "run" / "rollouts" / "step_000002.jsonl.zst", [group("a", 1, 1)])
    out = tmp_path / "rates.json"
    code, said = call("difficulty", str(tmp_path / "run"), "--out", str(out), "--part", "right")
    assert (code, "2 tasks, 1 never passed, 0 always" in " ".join(said.split())) == (0, True)
    assert read_pass_rates(out) == {"a": 0.75, "b": 0.0}
    assert call("difficulty", str(tmp_path / "run"), "--out", str(out))[0] == 2  # no part called accuracy


GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k" / "test.jsonl"


@pytest.mark.skipif(not GSM8K.is_file(), reason="the GSM8K files are not there")
def test_on_gsm8k_about_half_can_be_renumbered_and_every_step_holds() -> None:
    with GSM8K.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in islice(lines, 100)]
    kinds = Counter(kind for kind, _ in augment(rows, ("numbers", "names")))
    assert kinds["numbers"] > 30 and kinds["names"] > 30
    for _, row in augment(rows, ("numbers",)):
        body, _, gold = row["answer"].rpartition("####")
        marks = re.findall(r"<<([^=]+)=([^>]+)>>", body)
        assert all(eval(a) == pytest.approx(float(b)) for a, b in marks)  # Python's own arithmetic
        assert float(marks[-1][1]) == float(gold.replace(",", ""))
        unmarked = set(numbers(re.sub(r"<<.*?>>", " ", body)))
        results = {Fraction(b) for _, b in marks}
        assert results & unmarked  # results are written out behind their marks


@pytest.mark.skipif(not GSM8K.is_file(), reason="the GSM8K files are not there")
def test_on_gsm8k_no_week_gets_eight_days_and_no_name_hides_in_a_word() -> None:
    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    shares = re.compile(r"(\d+) (?:hours|days|weeks|months) (?:a|per|each|every) (?:day|week|month|year)")
    clocks = re.compile(r"(\d+) ?(?:am|pm|a\.m|p\.m)\b", re.IGNORECASE)
    of = {str(n): row for n, row in enumerate(rows, 1)}
    for kind, new in augment(rows, ("numbers", "names")):
        old = of[new["id"].partition("/")[0]]
        for pattern in (shares, clocks):
            assert pattern.findall(new["question"]) == pattern.findall(old["question"])
        if kind == "names":
            assert new["answer"].rpartition("####")[2] == old["answer"].rpartition("####")[2]
            assert numbers(new["question"]) == numbers(old["question"])
