# SPDX-License-Identifier: Apache-2.0
"""The calculator's text protocol."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.env import CalculatorEnv, StepResult
from palestra.env.base import Action
from palestra.errors import ConfigError
from palestra.types import Task

TASK = Task("t", "(3+4)*5\n", 35)


def fresh(max_steps: int = 4) -> CalculatorEnv:
    env = CalculatorEnv(max_steps)
    env.reset(TASK, seed=0)
    return env


def act(env: CalculatorEnv, text: str) -> StepResult:
    return env.step(Action({"role": "assistant", "content": text}, text))


def seen(result: StepResult) -> str:
    (message,) = result.observation.messages
    assert message["role"] == "tool"
    return message["content"]


def test_the_prompt_is_the_tasks_and_the_tags_end_a_turn() -> None:
    shown = CalculatorEnv().reset(TASK, seed=0)
    assert shown.messages == ({"role": "user", "content": "(3+4)*5\n"},)
    assert shown.stop == ("</call>", "</answer>")


@pytest.mark.parametrize(
    ("text", "observation", "calls"),
    [
        ("<call>add(3,4)</call>", "<obs>7</obs>", 1),
        ("<call>mul( -3 , 4 )</call>", "<obs>-12</obs>", 1),
        ("<call>add(1,1)</call><call>add(2,2)</call>", "<obs>2</obs>", 1),
        ("<call>sub(3,4)</call>", "<obs>error: unknown op sub</obs>", 0),
        ("<call>add(3)</call>", "<obs>error: invalid args 3</obs>", 0),
        ("<call>add(a,b)</call>", "<obs>error: invalid args a,b</obs>", 0),
        ("<call>add(1.5,2)</call>", "<obs>error: invalid args 1.5,2</obs>", 0),
        ("<call>add(" + "9" * 5000 + ",1)</call>", "<obs>error: invalid args " + "9" * 20 + "</obs>", 0),
        ("seven", "<obs>error: no call or answer</obs>", 0),
        ("<call>add(3,4)", "<obs>error: no call or answer</obs>", 0),
        ("<answer>35</answer>", "<obs>error: no call or answer</obs>", 0),
        (r"<answer>\boxed{3.5}</answer>", "<obs>error: no call or answer</obs>", 0),
        ("", "<obs>error: no call or answer</obs>", 0),
    ],
)
def test_whatever_is_no_answer_leads_to_an_observation(text: str, observation: str, calls: int) -> None:
    result = act(fresh(), text)
    assert seen(result) == observation
    assert result.tool_calls == calls
    assert (result.terminated, result.truncated) == (False, False)
    assert result.observation.stop == ("</call>", "</answer>")


def test_an_answer_ends_the_episode_right_or_wrong_and_nothing_is_paid() -> None:
    for text, final in ((r"<answer>\boxed{35}</answer>", 35), (r"<answer>\boxed{-2}</answer>", -2)):
        result = act(fresh(), text)
        assert (result.terminated, result.truncated) == (True, False)
        assert result.info == {"final": final}
        assert result.reward is None


def test_an_answer_wins_over_a_call_in_the_same_text() -> None:
    result = act(fresh(), r"<call>add(3,4)</call><answer>\boxed{7}</answer>")
    assert result.terminated
    assert result.info == {"final": 7}
    assert result.tool_calls == 0


def test_failed_calls_count_towards_the_limit() -> None:
    env = fresh(max_steps=4)
    texts = ["<call>add(3,4)</call>", "<call>pow(3,4)</call>", "nothing", "<call>add(3)</call>"]
    assert [act(env, text).truncated for text in texts] == [False, False, False, True]


def test_an_answer_at_the_limit_terminates() -> None:
    env = fresh(max_steps=2)
    act(env, "<call>add(3,4)</call>")
    result = act(env, r"<answer>\boxed{35}</answer>")
    assert (result.terminated, result.truncated) == (True, False)


def test_a_reset_starts_the_count_again() -> None:
    env = fresh(max_steps=1)
    assert act(env, "x").truncated
    env.reset(TASK, seed=1)
    assert env.steps == 0


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_steps is 0"):
        CalculatorEnv(max_steps=0)


_PIECES = [
    "<call>",
    "</call>",
    "add(",
    "mul(",
    "(",
    ")",
    ",",
    "7",
    "-",
    "x",
    "<answer>",
    "</answer>",
    r"\boxed{",
    "}",
    "٣",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(_PIECES), max_size=12))
def test_no_text_raises(pieces: list[str]) -> None:
    result = act(fresh(), "".join(pieces))
    assert result.terminated == bool("final" in result.info)
