# SPDX-License-Identifier: Apache-2.0
"""Hostile model texts: whatever reads a reply comes to an end soon and never raises."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from palestra.chat.plain import PlainRenderer
from palestra.chat.toolcalls import parse_reply
from palestra.env.arithmetic import ArithmeticToolEnv, PocketCalculatorEnv
from palestra.env.base import Action
from palestra.env.calculator import CalculatorEnv
from palestra.env.self_question import SelfQuestionEnv
from palestra.env.self_refine import SelfRefineEnv
from palestra.env.tool_env import ToolEnv
from palestra.eval.equations import equations, numbers, operations
from palestra.eval.examples import example_of
from palestra.eval.mistakes import Reply, classify
from palestra.model.testing import ByteTokenizer
from palestra.reward.answers import MODES, extract_answer, is_correct, normalise, to_number
from palestra.reward.code import extract_code
from palestra.reward.formats import boxed_format, think_answer_format, without_end_tokens
from palestra.reward.functions import count_steps
from palestra.reward.judge import Judge, JudgeError
from palestra.reward.novelty import normalised
from palestra.types import Author, Episode, RewardTerm, Span, StopReason, Task, Trajectory, Turn

LENGTH, BOUND_S = 6000, 2.0
"""Characters of a hostile text, and the processor seconds that reading it once may take."""
TASK = Task("t", "Tom has 3 pens and buys 4. How many now?", "7")


class TooLong(Exception):
    """A reader is still at it."""


@contextmanager
def bounded() -> Iterator[None]:
    """At most BOUND_S of this process's own time: how busy the machine is does not count."""

    def late(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, BOUND_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def concat(a: str, b: int) -> str:
    """Text and a number, joined."""
    return f"{a}{b}"


def acted(make: Callable[[], Any]) -> Callable[[str], Any]:
    """The text as one turn of an environment, calls read by the chat renderer's parser."""

    def step(text: str) -> Any:
        env, parsed = make(), parse_reply(text)
        env.reset(TASK, seed=0)
        result = env.step(Action(parsed.message(), text, parsed.malformed, "stop"))
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    return step


def judged(text: str) -> None:
    for ask in (lambda j: j.score("q", "a"), lambda j: j.compare("q", "a", "b")):
        with suppress(JudgeError):
            ask(Judge(lambda messages: text))


def played(text: str) -> Any:
    """The text as the only reply of an episode, as an evaluation looks at it."""
    parsed = parse_reply(text)
    said = Span([1], Author.MODEL, "assistant", text, logprobs=[-0.1], version=0)
    turn = Turn((said,), TASK.messages(), parsed.message(), "stop")
    trajectory = Trajectory((turn,), StopReason.ENV_TERMINATED, rewards={"accuracy": RewardTerm(0.0)})
    return example_of(TASK, Episode(TASK, (trajectory,)), "accuracy")


PLAIN = PlainRenderer(ByteTokenizer())
READERS: dict[str, Callable[[str], Any]] = {
    **{f"extract_answer {mode}": lambda t, m=mode: extract_answer(t, m) for mode in MODES},
    "is_correct": lambda t: is_correct(t, "7"),
    "normalise": normalise,
    "to_number": to_number,
    "chat": parse_reply,
    "chat thinking": lambda t: parse_reply(t, thinking=True),
    "plain": lambda t: PLAIN.parse_response(list(t.encode("utf-8", "replace"))),
    "calculator": acted(CalculatorEnv),
    "self_refine": acted(lambda: SelfRefineEnv(mode="numeric")),
    "self_question": acted(SelfQuestionEnv),
    "pocket_calculator": acted(PocketCalculatorEnv),
    "calculator_tools": acted(ArithmeticToolEnv),
    "tool_env": acted(lambda: ToolEnv([concat])),
    "judge": judged,
    "code": extract_code,
    "format": lambda t: think_answer_format([t]),
    "boxed_format": lambda t: boxed_format([t]),
    "steps": count_steps,
    "novelty": normalised,
    "equations": lambda t: (equations(t), [str(o) for o in operations(t)], numbers(t)),
    "mistakes": lambda t: classify(TASK, Reply(t, None)),
    "evaluation": played,
}

PIECES = [
    *(
        " ",
        "\n",
        "1",
        "1,",
        "1 ",
        "-",
        "(",
        "{",
        "[",
        "[[",
        "$",
        "%",
        "^",
        "²",
        "½",
        "!",
        "é",
        "\u0301",
        "\ud800",
        "\0",
    ),
    *("\\boxed{", "\\boxed{1", "\\boxed ", "\\frac{1}", "\\sqrt[", "\\text{", "\\(", "\\[", "<answer>", "</answer> "),
    *("<think>", "</think>", "<tool_call>", "<tool_call>{", "</tool_call>", '{"a":', "<call>add(", "<call>a(1,"),
    *("</s>", " <|a|>", "<|", "#### ", "answer ", "the answer is ", "final answer is 1 or ", "1 and ", "Question: "),
    *("Question: a\nSolution: ", "step 1", "1) ", "1=", "1+1=", "1/", "1 1/2 ", "x", "a ", "one ", "twenty-", "二"),
    *("答案是", "```\n", "``` ", "<<1=", "<<1=1>>", "add(1,", "Score: ", "verdict ", "* ", "1e9", "9" * 50, "1/2/"),
]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


ODD_CALLS = [
    call("add", a=True, b=1),
    call("add", a=float("nan"), b=1),
    call("add", a=float("inf"), b=float("-inf")),
    call("divide", a=1, b=0),
    call("divide", a=1e308, b=1e-308),
    call("multiply", a=10**400, b=10**400),
    call("add", a=[1], b={"x": None}),
    call("add", a="1" * 5000, b="\ud800"),
    call("concat", a="\ud800\0", b=10**30),
    call("calculate", expression="9" * 5000 + " * 2"),
    call("calculate", expression="1 / 0"),
    call("", a=1),
    "<tool_call>" + '{"name": "add", "arguments": ' + "[" * 5000,
    '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + ', "b": 1}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": "' + "[" * 50_000 + '"}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1e999, "b": -1e999}}</tool_call>',
    f"<call>mul({'9' * 5000},2)</call>",
    "add(" + "9" * 5000 + ", 1)",
    "9" * 330 + "/7 = 3",
    "1" * 5000,
]


def read_by_all(text: str) -> None:
    for name, read in READERS.items():
        try:
            with bounded():
                read(text)
        except TooLong:
            pytest.fail(f"{name} takes more than {BOUND_S} s for {text[:40]!r}… of {len(text)} characters")
        except Exception as error:
            raise AssertionError(f"{name} raises {type(error).__name__} for {text[:80]!r}") from error


def a_text(chance: random.Random) -> str:
    """Pieces, each repeated once or very often."""
    text = ""
    while len(text) < LENGTH and chance.random() < 0.8:
        piece = chance.choice(PIECES)
        text += piece * chance.choice([1, 1, 1, 3, chance.randint(1, LENGTH // len(piece))])
    return text[:LENGTH]


@pytest.mark.parametrize("text", ODD_CALLS, ids=range(len(ODD_CALLS)))
def test_odd_calls_and_numbers_are_answered(text: str) -> None:
    read_by_all(text)


@pytest.mark.parametrize("piece", ["1", " ", " <|a|>", "<answer>", "\\boxed{", "<tool_call>{", "<call>a(1,", "1+1="])
def test_one_piece_again_and_again_is_read_in_time(piece: str) -> None:
    read_by_all(piece * (LENGTH // len(piece)) + "Z")


def test_random_texts_are_read_in_time() -> None:
    for seed in range(25):
        read_by_all(a_text(random.Random(seed)))


@pytest.mark.slow  # thousands of texts, each read in two dozen ways
def test_thousands_of_texts_are_read_in_time() -> None:
    for piece in PIECES:
        for end in ("", "Z"):
            read_by_all(piece * (LENGTH // len(piece)) + end)
    for seed in range(2000):
        read_by_all(a_text(random.Random(seed)))


def test_end_tokens_are_taken_off_in_linear_time() -> None:
    text = "done " + "<|im_end|> " * 20_000
    begin = time.thread_time()
    assert without_end_tokens(text) == "done"
    assert without_end_tokens(text + "Z") == text + "Z"
    assert without_end_tokens("<|a|") == "<|a|" and without_end_tokens("<eos>\n") == ""
    assert time.thread_time() - begin < BOUND_S
