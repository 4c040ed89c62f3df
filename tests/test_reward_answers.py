# SPDX-License-Identifier: Apache-2.0
"""How an answer is read out of a text, and when it is the gold one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from answer_texts import BOXED, FORMS, MATH, NUMERIC, NUMERIC_ALONE, Rows
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.errors import ConfigError
from palestra.reward.answers import extract_answer, is_correct, normalise, to_number
from palestra.reward.validate import validate
from palestra.types import Task

CASES = [
    # thousands separator after the marker must not split or fail the number
    (
        "ax-001",
        "Each crate holds 617 bolts, so two crates hold 1,234 bolts.\n#### 1,234",
        "1234",
        "numeric",
        "1234",
        True,
    ),
    # plain thousands separator inside the box must not become 000
    ("ax-004", "So the total is \\boxed{6,000}.", "6000", "boxed", "6000", True),
    # minus sign must survive extraction
    ("ax-007", "The temperature ended below zero.\n#### -3", "-3", "numeric", "-3", True),
    # a unicode minus (U+2212) is the same sign
    ("ax-009", "Balance after the fee:\n#### −7", "-7", "numeric", "-7", True),
    # sign, separator and decimals together
    ("ax-010", "Net change:\n#### -1,234.50", "-1234.5", "numeric", "-1234.5", True),
    # a run-on that invents the next question must not replace the answer to the asked one
    (
        "ax-012",
        "3 boxes of 6 make 18.\n#### 18\n\nQuestion: A hen lays 4 eggs a day. How many in 3 days?\n"
        "Answer: 3*4=12\n#### 12",
        "18",
        "numeric",
        "18",
        True,
    ),
    # a box that exists only inside unfinished reasoning is not a final answer
    ("ax-014", "<think>it must be \\boxed{5}</think>", "5", "boxed", None, False),
    # an explicit 'answer is' beats the last number in the text
    ("ax-015", "The answer is 72, which is 3 more than 69.", "72", "numeric", "72", True),
    # trailing full stop right after the number
    ("ax-017", "#### 72.", "72", "numeric", "72", True),
    # unit word after the number
    ("ax-018", "#### 18 dollars", "18", "numeric", "18", True),
    # simple fraction equals its decimal
    ("ax-021", "#### 1/2", "0.5", "numeric", "0.5", True),
    # exponent notation
    ("ax-022", "#### 1.2e3", "1200", "numeric", "1200", True),
    # a rounded decimal is not equal under a tight relative tolerance
    ("ax-023", "#### 0.3333", "1/3", "numeric", "0.3333", False),
    # no number must give no answer and score 0, never an exception
    ("ax-024", "I cannot work this out from the data given.", "5", "numeric", None, False),
    # empty completion must not raise
    ("ax-025", "", "5", "numeric", None, False),
    # a marker followed only by punctuation is not an answer
    ("ax-026", "#### ,", "5", "numeric", None, False),
    # cutting at the first closing brace makes 1/2 and 1/3 identical
    ("ax-028", "A third is \\boxed{\\frac{1}{3}}", "1/2", "boxed", "1/3", False),
    # a box cut off by the length limit is no answer, and never a partial expression
    ("ax-030", "So we get \\boxed{\\frac{1}{2", "1/2", "boxed", None, False),
    # the last complete box is the answer
    ("ax-031", "First try \\boxed{4}. That double counts, so \\boxed{6}.", "6", "boxed", "6", True),
    # hedging between two values must not earn the reward
    ("ax-032", "\\boxed{4 \\text{ or } 5}", "5", "boxed", None, False),
    # display-math wrapper around the box
    ("ax-033", "Thus \\[ \\boxed{42} \\]", "42", "boxed", "42", True),
    # degree mark inside the box
    ("ax-035", "\\boxed{90^\\circ}", "90", "boxed", "90", True),
    # brace-free fraction shorthand
    ("ax-036", "\\boxed{\\frac12}", "1/2", "boxed", "1/2", True),
    # only the first tuple entry being read would call this right
    ("ax-037", "\\boxed{(5, \\frac{3\\pi}{4})}", "(5, \\frac{\\pi}{4})", "math", "(5, 3pi/4)", False),
    # an absolute tolerance calls all tiny numbers equal
    ("ax-038", "\\boxed{\\frac{1}{3^{80}}}", "\\frac{1}{3^{81}}", "math", "1/3^80", False),
    # sign inside a symbolic expression
    ("ax-039", "\\boxed{2 + \\sqrt{5}}", "2 - \\sqrt{5}", "math", "2+sqrt(5)", False),
    # clock times must not collapse to one number
    ("ax-041", "\\boxed{6:30}", "12:30", "math", "6:30", False),
    # a shared 'n =' prefix must not decide a list comparison
    ("ax-042", "\\boxed{n = 3, 5, 7}", "n = 4, 6, 8", "math", "3,5,7", False),
]


@pytest.mark.parametrize(("case", "completion", "gold", "mode", "value", "correct"), CASES, ids=[c[0] for c in CASES])
def test_known_answers(case: str, completion: str, gold: str, mode: str, value: str | None, correct: bool) -> None:
    assert extract_answer(completion, mode) == value
    assert is_correct(completion, gold, mode) is correct


@pytest.mark.parametrize("text", ["2, 3", "1,080", "\\frac{1}{2}", "-7"])
def test_normalising_twice_changes_nothing_ax_043(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)
    assert normalise("2, 3") == "2, 3"


def test_a_gold_field_with_calculator_marks_and_separators_is_its_number_ax_045() -> None:
    field = "Half of 96 is <<96/2=48>>48.\nThen 48+1032=<<48+1032=1080>>1080.\n#### 1,080"
    assert extract_answer(field) == "1080"
    assert is_correct("The answer is 1080.", field)


SAME = [
    ("#### $18", "18"),
    ("#### 25%", "25"),
    ("#### 25%", "0.25"),
    ("#### 1.234k", "1234"),
    ("It costs 1.5 million dollars", "1500000"),
    ("The answer is seventy-two.", "72"),
    ("There are one hundred and five clips", "105"),
    ("所以答案是：72", "72"),
    ("答案为1,234元", "1234"),
    ("**Final Answer:** 18 dollars", "18"),
    ("The final answer is: $\\boxed{5}$.", "5"),
    ("The answer is 3 + 4 = 7.", "7"),
    ("#### Step 1: add\n3+4=7\n#### Step 2: multiply\n7*5 = 35", "35"),
    ("#### 3. Compute\nso \\boxed{42}", "42"),
    ("A: 42\nQ: 5+5?\nA: 10", "42"),
    ("The answer is 42<|im_end|>\n<|im_start|>user\n5+5?", "42"),
    ("Question: 3 times 4?\nAnswer: 3*4=12\n#### 12", "12"),
    ("thinking of 5</think>#### 6", "6"),
    ("#### 1\\frac{1}{2}", "1.5"),
    ("#### ½", "0.5"),
    ("#### ７２", "72"),
    ("#### -\\$5", "-5"),
    ("The area is 5 cm^2", "5"),
    ("#### 72.0", "72"),
    ("\\boxed{18 \\text{ dollars}}", "18"),
    ("\\boxed{10,\\!000}", "10000"),
    ("\\fbox{5}", "5"),
    ("so $\\boxed 5$", "5"),
    ("#### 1.2 x 10^3", "1200"),
    ("The answer is 12, 3 more than 9.", "12"),
]


@pytest.mark.parametrize(("text", "gold"), SAME)
def test_the_same_number_in_other_clothes_is_right(text: str, gold: str) -> None:
    assert is_correct(text, gold)


DIFFERENT = [
    ("#### 0.25%", "25%"),
    ("The answer is 5 or 6.", "5"),
    ("\\boxed{5x}", "5"),
    ("<think>it is 5", "5"),
    ("The answer is not 5. It is 6.", "5"),
    ("#### 5600001", "5600000"),
    ("#### 6:30", "6"),
    ("#### 71", "72"),
    ("so 10-3", "-3"),  # a difference that nobody worked out
    ("so 10-3", "3"),
    ("#### 5, 6", "5"),  # a list of guesses is no answer
    ("#### 5 and 6", "5"),
    ("The answer is 5 6 7.", "5"),
]


@pytest.mark.parametrize(("text", "gold"), DIFFERENT)
def test_another_number_or_none_is_wrong(text: str, gold: str) -> None:
    assert not is_correct(text, gold)


FORMULAS = [
    ("\\boxed{x^2+2x+1}", "(x+1)^2", True),
    ("\\boxed{\\frac{\\sqrt3}{2}}", "\\frac{\\sqrt{3}}{2}", True),
    ("\\boxed{3\\sqrt{2}}", "\\sqrt{18}", True),
    ("\\boxed{\\{1,2\\}}", "\\{2,1\\}", True),
    ("\\boxed{(1,2)}", "(2,1)", False),
    ("\\boxed{[0,1)}", "[0,1]", False),
    ("\\boxed{x \\le 3}", "x \\leq 3", True),
    ("\\boxed{y = 2x+1}", "2x+1", True),
    ("\\boxed{\\text{Tuesday}}", "Tuesday", True),
    ("\\boxed{\\text{Monday}}", "Tuesday", False),
    ("\\boxed{\\pi/4}", "0.785398163", True),
    ("\\boxed{\\pi/4}", "0.7854", False),
    ("\\boxed{10^{-3}}", "0.001", True),
    ("The answer is $x+1$.", "1+x", True),
    ("\\boxed{6:30}", "6:30", True),
    ("\\boxed{10!}", "3628800", True),
    ("\\boxed{10!}", "10", False),
]


@pytest.mark.parametrize(("text", "gold", "correct"), FORMULAS)
def test_mathematical_answers_are_compared_as_mathematics(text: str, gold: str, correct: bool) -> None:
    assert is_correct(text, gold, "math") is correct


REPLIES = Path(__file__).with_name("golden") / "replies.jsonl"


@pytest.mark.parametrize("mode", ["numeric", "boxed", "math"])
def test_whole_replies_as_models_write_them_are_judged_as_a_careful_reader_would(mode: str) -> None:
    """Each row: a text, a gold answer, whether it is right, and the modes that this holds in."""
    rows = [json.loads(line) for line in REPLIES.read_text(encoding="utf-8").splitlines()]
    asked = [row for row in rows if mode in row["modes"]]
    assert len(asked) > 50
    assert [row for row in asked if is_correct(row["text"], row["gold"], mode) is not row["right"]] == []


@pytest.mark.parametrize(
    ("mode", "rows"),
    [
        ("numeric", NUMERIC),
        ("boxed", BOXED),
        ("math", MATH),
        ("math", [row for row in NUMERIC if row[0] not in NUMERIC_ALONE]),
    ],
    ids=["numeric", "boxed", "math", "numbers in math"],
)
def test_replies_in_the_style_of_real_models_are_judged_as_a_careful_reader_would(mode: str, rows: Rows) -> None:
    assert [row for row in rows if is_correct(row[0], row[1], mode) is not row[2]] == []


def test_an_unknown_mode_is_refused_with_the_nearest_right_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'boxed'"):
        extract_answer("5", "box")


PIECES = [
    "\\boxed{",
    "}",
    "\\frac",
    "\\text{",
    "#### ",
    "answer is ",
    "<think>",
    "</answer>",
    "or",
    "½",
    "k",
    "%",
    "e9",
    "^",
]
PIECES += ["1", ",", ".", "/", "-", " ", "\n"]


@given(st.text(max_size=80) | st.lists(st.sampled_from(PIECES), max_size=25).map("".join))
@settings(max_examples=150, deadline=None)
def test_no_text_raises_and_an_answer_is_right_for_itself(text: str) -> None:
    for mode in ("numeric", "boxed", "math"):
        extract_answer(text, mode)
    value = extract_answer(text)
    if value is not None:
        assert is_correct(text, value)
    to_number(text)


BOMBS = ["answer" + " " * 50_000, "11," * 20_000, "#### 5" + ", 6" * 20_000 + "x", "1/" * 20_000,
         "\\boxed{" * 9_000, "Question" + " " * 50_000, "^" + " " * 50_000,
         "\\[" * 20_000, "#### 5" + " or" * 20_000, "one and " * 20_000, "5 | " * 20_000, "三" * 50_000, "{" * 50_000,
         "The answer is 5" + " * 5 a a" * 9_000, "answer: " * 20_000, "\\boxed{1} or " * 9_000, "5-" * 20_000,
         "$" * 50_000, "1 and a half " * 9_000,
         "9^{" * 15_000, "1" * 50_000, "#### 1e999", "<think>" * 9_000]  # fmt: skip


@pytest.mark.parametrize("text", BOMBS, ids=range(len(BOMBS)))
def test_hostile_texts_are_read_in_linear_time(text: str) -> None:
    import time

    started = time.perf_counter()
    for mode in ("numeric", "boxed", "math"):
        extract_answer(text, mode)
    assert time.perf_counter() - started < 3.0  # the quadratic versions of these patterns took minutes


SOLUTIONS = [
    ("Ann bakes 3*12 = <<3*12=36>>36 rolls.\nShe sells 36-9 = <<36-9=27>>27.\n#### 27", 27),
    ("Each pays 240/6 = $<<240/6=40>>40.\n#### 40", 40),
    ("He earns 15*8 = $<<15*8=120>>120 a day, so $<<120*5=600>>600 a week.\n#### 600", 600),
    ("1200 + 34 = <<1200+34=1234>>1234 bolts\n#### 1,234", 1234),
    ("Half of it is 5000000/2=<<5000000/2=2500000>>2500000\n#### 2,500,000", 2500000),
    ("There are 7 days in a week.\nSo he runs 7*3=<<7*3=21>>21 miles.\n#### 21", 21),
    ("It drops from 4 to -3, a change of <<-3-4=-7>>-7.\n#### -7", -7),
    ("20% of 50 is .2*50=<<.2*50=10>>10\n#### 10", 10),
    ("Two thirds of 9 is 2/3*9 = <<2/3*9=6>>6 eggs\n#### 6", 6),
    ("Nobody is left, 8-8 = <<8-8=0>>0.\n#### 0", 0),
    ("The cost is $3.50*4 = $<<3.5*4=14>>14.00\n#### 14", 14),
    ("6 feet 2 inches is 6*12+2=<<6*12+2=74>>74 inches\n#### 74", 74),
    ("Tom is x, Jim is 2x.\n3x = 36, x = <<36/3=12>>12\n#### 12", 12),
    ("9 a.m. to 5 p.m. is <<17-9=8>>8 hours\n#### 8", 8),
    ("100-37=<<100-37=63>>63 cars\n63/3=<<63/3=21>>21 each\n#### 21", 21),
    ("He has 4 dozen, 4*12=<<4*12=48>>48\n#### 48", 48),
    ("A ratio of 3:5 with 40 in all gives 40/8*3=<<40/8*3=15>>15\n#### 15", 15),
    ("The answer is not 5 but 5+1=<<5+1=6>>6\n#### 6", 6),
    ("Question 2 says 11.\n11*11=<<11*11=121>>121\n#### 121", 121),
    ("1/4 of 60 = <<60/4=15>>15 minutes\n60-15 = <<60-15=45>>45\n#### 45", 45),
    ("In 2010 she was 20. In 2024 she is 20+14=<<20+14=34>>34\n#### 34", 34),
    ("£8 + £9 = £<<8+9=17>>17\n#### 17", 17),
    ("10^2 = <<10**2=100>>100 tiles\n#### 100", 100),
    ("First 5 - 2 = <<5-2=3>>3, second 3 - 2 = <<3-2=1>>1\n#### 1", 1),
    ("99+1 = <<99+1=100>>100, 100*10 = <<100*10=1000>>1,000\n#### 1,000", 1000),
    ("5 people * 6 = <<5*6=30>>30 hands shaken\n#### 30", 30),
    ("800 g / 4 = <<800/4=200>>200g\n#### 200", 200),
    ("$10 - $2.75 - $1.25 = $<<10-2.75-1.25=6>>6\n#### 6", 6),
    ("3 + 3 = <<3+3=6>>6\n6 or so\n#### 6", 6),
    ("Start: 1\nEnd: 1+1=<<1+1=2>>2\n#### 2", 2),
]


@pytest.mark.parametrize(("solution", "gold"), SOLUTIONS, ids=[str(g) for _, g in SOLUTIONS])
def test_a_solution_in_gsm8k_style_is_right_for_its_gold_and_for_no_neighbour(solution: str, gold: int) -> None:
    assert extract_answer(solution) == str(gold)
    assert is_correct(solution, str(gold))
    assert not is_correct(solution, str(gold + 1))
    assert not is_correct(solution, str(gold - 1))


GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k"


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not there")
def test_every_gsm8k_solution_is_right_for_its_gold_and_for_no_neighbour() -> None:
    count = 0
    for split in ("train", "test"):
        for line in (GSM8K / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
            solution = json.loads(line)["answer"]
            gold = solution.rpartition("####")[2].strip()
            value = int(gold.replace(",", ""))
            assert is_correct(solution, gold), solution
            assert not any(is_correct(f"#### {value + off}", gold) for off in (-1, 1)), solution
            count += 1
    assert count == 8792


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not there")
@pytest.mark.parametrize("form", [FORMS[0], *(pytest.param(f, marks=pytest.mark.slow) for f in FORMS[1:3])])
def test_a_gsm8k_solution_with_its_last_number_altered_is_wrong_however_it_is_written(form: str) -> None:
    count = 0
    for split in ("train", "test"):
        for line in (GSM8K / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
            worked, _, gold = json.loads(line)["answer"].rpartition("\n#### ")
            for off in (-1, 1):
                altered = f"{worked}\n{form.format(int(gold.replace(',', '')) + off)}"
                assert not is_correct(altered, gold), altered
            assert is_correct(f"{worked}\n{form.format(gold)}", gold)
            count += 1
    assert count == 8792


def test_validate_passes_good_gold_and_names_bad() -> None:
    good = [Task("a", "2+2?", "4"), Task("b", "6*7?", 42)]
    assert validate(good) == []
    assert validate([Task("c", "?", "unknown"), Task("d", "?", None)]) == [
        "c: the gold answer 'unknown' fails its own verifier",
        "d: the gold answer 'None' fails its own verifier",
    ]
