# SPDX-License-Identifier: Apache-2.0
"""Generated problems: repeatable by index, splits apart, answers true, demonstrations wrong only in their choices."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from palestra.data import arithmetic, word_problems
from palestra.data.dialogues import make_dialogues
from palestra.data.noise import Noise, Slips
from palestra.data.phrasings import TEST, TRAIN
from palestra.data.source import Cursor, make_source
from palestra.errors import ConfigError
from palestra.eval.mistakes import difficulty
from palestra.reward.validate import validate
from palestra.types import Message, Task

CALLS = {"add": "+", "mul": "*"}


def test_the_answer_is_what_python_computes_and_the_bracket_is_always_written() -> None:
    for i in range(300):
        task = arithmetic.problem(i, seed=7)
        expr = task.meta["expr"]
        assert re.fullmatch(r"\(\d{1,2}[+*]\d{1,2}\)[+*]\d{1,2}|\d{1,2}[+*]\(\d{1,2}[+*]\d{1,2}\)", expr)
        assert task.prompt == expr + "\n"
        assert task.answer == eval(expr)
        assert task.meta["shape"].split("-")[0] == ("left" if expr.startswith("(") else "right")


def test_the_same_index_is_the_same_problem_and_another_seed_another() -> None:
    assert arithmetic.problem(5, seed=1) == arithmetic.problem(5, seed=1)
    assert arithmetic.problem(5, seed=1).prompt != arithmetic.problem(5, seed=2).prompt
    assert arithmetic.problem(5, seed=1).prompt != arithmetic.problem(6, seed=1).prompt


def test_train_and_test_share_no_expression() -> None:
    def some(split: str) -> set[str]:
        return {arithmetic.problem(i, 0, split, max_operand=9).meta["expr"] for i in range(1500)}

    train, test = some("train"), some("test")
    assert train.isdisjoint(test)
    assert len(test) > 300


def test_the_four_shapes_are_equally_frequent() -> None:
    shapes = Counter(arithmetic.problem(i, 3).meta["shape"] for i in range(2000))
    assert set(shapes) == {"left-add", "left-mul", "right-add", "right-mul"}
    assert all(400 < n < 600 for n in shapes.values())


LEFT = Task(
    "t", "(3+4)*5\n", 35, {"expr": "(3+4)*5", "shape": "left-add", "operations": ("add", "mul"), "operands": (3, 4, 5)}
)
RIGHT = Task(
    "t", "3*(4+5)\n", 27, {"expr": "3*(4+5)", "shape": "right-add", "operations": ("add", "mul"), "operands": (3, 4, 5)}
)


def said(task: Task, slips: Slips) -> list[str]:
    return [m["content"] for m in arithmetic.demonstration(task, random.Random(0), Noise(other=slips))[1:]]


def test_a_clean_demonstration_does_the_bracket_first() -> None:
    assert said(LEFT, Slips()) == [
        "<call>add(3,4)</call>",
        "<obs>7</obs>",
        "<call>mul(7,5)</call>",
        "<obs>35</obs>",
        "<answer>\\boxed{35}</answer>",
    ]
    assert said(RIGHT, Slips())[::2] == [
        "<call>add(4,5)</call>",
        "<call>mul(3,9)</call>",
        "<answer>\\boxed{27}</answer>",
    ]


def test_each_slip_is_a_choice_and_every_result_is_true() -> None:
    assert said(LEFT, Slips(wrong_first=1.0))[::2] == [
        "<call>mul(3,4)</call>",
        "<call>mul(12,5)</call>",
        "<answer>\\boxed{60}</answer>",
    ]
    assert said(LEFT, Slips(wrong_last=1.0))[::2] == [
        "<call>add(3,4)</call>",
        "<call>add(7,5)</call>",
        "<answer>\\boxed{12}</answer>",
    ]
    assert said(LEFT, Slips(stop_early=1.0))[::2] == ["<call>add(3,4)</call>", "<answer>\\boxed{7}</answer>"]
    assert said(LEFT, Slips(operand=1.0)) == ["<answer>\\boxed{3}</answer>"]
    assert said(LEFT, Slips(wrong_answer=1.0)) == [*said(LEFT, Slips())[:-1], "<answer>\\boxed{3}</answer>"]
    rng = random.Random(1)
    for i in range(200):
        messages = arithmetic.demonstration(arithmetic.problem(i), rng, Noise.default())
        for call, result in zip(messages[1::2], messages[2::2], strict=False):
            op, a, b = re.fullmatch(r"<call>(\w+)\((\d+),(\d+)\)</call>", call["content"]).groups()  # type: ignore[union-attr]
            assert result["content"] == f"<obs>{eval(a + CALLS[op] + b)}</obs>"


def test_default_noise_is_the_likelier_choice_on_half_of_the_shapes() -> None:
    rates = {s: Noise.default().slips(s).right for s in ("left-add", "left-mul", "right-add", "right-mul")}
    assert rates == {"left-add": 0.9, "left-mul": 0.4, "right-add": 0.4, "right-mul": 0.9}
    rng, right = random.Random(0), 0
    for i in range(1000):
        task = arithmetic.problem(i)
        last = arithmetic.demonstration(task, rng, Noise.default())[-1]["content"]
        right += last == f"<answer>\\boxed{{{task.answer}}}</answer>"
    assert 600 < right < 720  # 0.65 in expectation


def test_noise_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="sum to at most 1"):
        Slips(wrong_first=0.7, operand=0.4)
    with pytest.raises(ConfigError, match="did you mean 'stop_early'"):
        Noise.from_dict({"left-add": {"stop_erly": 0.5}})
    assert Noise.from_dict({"other": {"operand": 0.25}}).slips("anything") == Slips(operand=0.25)


@pytest.mark.parametrize(("source", "shape"), [("arithmetic", "lft-add"), ("word_problems", "2-steps")])
def test_noise_on_a_shape_that_no_problem_has_is_refused(source: str, shape: str) -> None:
    with pytest.raises(ConfigError, match=f"noise: .*shape '{shape}'.*did you mean"):
        make_dialogues(source, seed=0, count=1, noise={shape: {"wrong_answer": 0.5}})


def test_there_are_enough_phrasings_and_some_only_in_test() -> None:
    assert len(set(TRAIN)) == len(TRAIN) >= 24
    assert len(set(TEST) - set(TRAIN)) >= 5
    assert {len(ops) for ops, _ in TRAIN} == {len(ops) for ops, _ in TEST} == {1, 2, 3}


def test_phrasings_are_dealt_each_comes_once_before_any_comes_again() -> None:
    for split, known in (("train", TRAIN), ("test", TRAIN + TEST)):
        shown = [word_problems.problem(i, 1, split).meta["phrasing"] for i in range(3 * len(known))]
        rounds = [shown[at : at + len(known)] for at in range(0, len(shown), len(known))]
        assert [sorted(r) for r in rounds] == [list(range(len(known)))] * 3
        assert rounds[0] != rounds[1] != rounds[2] != rounds[0], "each round in an order of its own"


def test_word_problems_have_whole_bounded_answers_and_every_operand_stands_in_the_text() -> None:
    for i in range(500):
        task = word_problems.problem(i, 2, "test")
        ops, operands = task.meta["operations"], task.meta["operands"]
        value = operands[0]
        for op, operand in zip(ops, operands[1:], strict=True):
            assert op != "divide" or value % operand == 0
            value = {"add": value + operand, "subtract": value - operand, "multiply": value * operand}.get(
                op, value // operand
            )
            assert 0 <= value < 10_000
        assert value == task.answer
        assert all(2 <= n <= 99 for n in operands)
        assert Counter(map(int, re.findall(r"\d+", str(task.prompt)))) == Counter(operands)


def results_of(messages: list[Message]) -> list[str]:
    return [m["content"] for m in messages if m["role"] == "tool"]


@pytest.mark.parametrize(("least", "most", "found"), [(1, 3, {1, 2, 3}), (2, 3, {2, 3}), (2, 2, {2}), (1, 1, {1})])
def test_word_problems_have_as_many_operations_as_asked_for(least: int, most: int, found: set[int]) -> None:
    source = make_source("word_problems", min_operations=least, operations=most)
    assert {len(task.meta["operations"]) for task in source.take(Cursor(), 200)[0]} == found


@pytest.mark.parametrize(
    ("options", "said"), [({"min_operations": 0}, "1 to 3"), ({"min_operations": 3, "operations": 2}, "1 to 2")]
)
def test_fewer_than_one_operation_or_more_than_the_most_is_refused(options: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.min_operations is \d: choose {said}"):
        make_source("word_problems", **options)


def test_a_word_problem_is_shown_one_call_a_turn_in_the_openai_shape() -> None:
    task = Task("w", "?", 17, {"operations": ("multiply", "add"), "operands": (3, 4, 5), "shape": "2-step"})
    messages = word_problems.demonstration(task, random.Random(0), Noise.clean())
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    function = {"name": "calculate", "arguments": {"expression": "3 * 4"}}
    assert messages[1]["tool_calls"] == [{"id": "call_0", "type": "function", "function": function}]
    assert messages[2] == {"role": "tool", "tool_call_id": "call_0", "name": "calculate", "content": "12"}
    assert results_of(messages) == ["12", "17"]
    assert messages[-1] == {"role": "assistant", "content": "The answer is 17."}


def test_word_problem_slips_are_choices_too() -> None:
    task = Task("w", "?", 17, {"operations": ("multiply", "add"), "operands": (3, 4, 5), "shape": "2-step"})

    def shown(slips: Slips) -> list[str]:
        messages = word_problems.demonstration(task, random.Random(0), Noise(other=slips))
        return [*results_of(messages), messages[-1]["content"]]

    assert shown(Slips(stop_early=1.0)) == ["12", "The answer is 12."]
    assert shown(Slips(wrong_first=1.0)) == ["7", "12", "The answer is 12."]
    assert shown(Slips(wrong_last=1.0)) == ["12", "60", "The answer is 60."]
    assert shown(Slips(operand=1.0)) == ["The answer is 3."]
    assert shown(Slips(wrong_answer=1.0)) == ["12", "17", "The answer is 3."]
    one = Task("w", "?", 7, {"operations": ("add",), "operands": (3, 4), "shape": "1-step"})
    with pytest.raises(ConfigError, match="one step cannot stop early"):
        word_problems.demonstration(one, random.Random(0), Noise(other=Slips(stop_early=0.5)))


@pytest.mark.parametrize("name", ["arithmetic", "word_problems"])
def test_gold_passes_its_verifier_and_garbage_fails(name: str) -> None:
    tasks, _ = make_source(name, split="test", seed=1).take(Cursor(), 200)
    assert validate(tasks) == []


def test_generated_problems_say_how_many_steps_they_take() -> None:
    assert {arithmetic.problem(i).meta["steps"] for i in range(9)} == {2}
    tasks = [word_problems.problem(i) for i in range(60)]
    assert {t.meta["steps"] for t in tasks} == {1, 2, 3}
    assert all(difficulty(t) == len(t.meta["operations"]) for t in tasks)
