# SPDX-License-Identifier: Apache-2.0
"""Answer, hear that it was wrong, try again."""

from __future__ import annotations

from typing import Any

import pytest

from palestra.env import SelfRefineEnv, StepResult
from palestra.env.base import Action
from palestra.env.self_refine import FEEDBACK
from palestra.errors import ConfigError
from palestra.types import Task

TASK = Task("t", "What is 70+2?", "72")


def fresh(**options: Any) -> SelfRefineEnv:
    env = SelfRefineEnv(**options)
    env.reset(TASK, seed=0)
    return env


def say(env: SelfRefineEnv, text: str) -> StepResult:
    return env.step(Action({"role": "assistant", "content": text}, text))


def test_a_right_answer_is_paid_and_ends_the_episode() -> None:
    result = say(fresh(), r"It is \boxed{72}.")
    assert (result.reward, result.terminated, result.truncated) == (1.0, True, False)


def test_a_wrong_answer_with_turns_left_brings_feedback() -> None:
    result = say(fresh(), r"\boxed{71}")
    assert (result.reward, result.terminated, result.truncated) == (0.0, False, False)
    assert result.observation.messages == ({"role": "user", "content": FEEDBACK},)


def test_the_last_wrong_answer_ends_the_episode_as_the_tasks_own_end() -> None:
    env = fresh(max_turns=2)
    say(env, r"\boxed{71}")
    result = say(env, r"\boxed{70}")
    assert (result.reward, result.terminated, result.truncated) == (0.0, True, False)
    assert result.observation.messages == ()


def test_a_later_right_answer_is_paid_in_full() -> None:
    env = fresh()
    assert [say(env, text).reward for text in (r"\boxed{1}", r"\boxed{72}")] == [0.0, 1.0]


def test_boxed_mode_reads_the_box_only() -> None:
    assert say(fresh(), "72").reward == 0.0
    assert say(fresh(mode="numeric"), "So it is 72.").reward == 1.0


def test_garbage_is_wrong_and_raises_nothing() -> None:
    for text in ("", r"\boxed{", r"\boxed{}", "\\boxed{7" * 50, "=" * 1000):
        assert say(fresh(), text).reward == 0.0


def test_the_question_is_shown_with_system_text_and_instruction() -> None:
    shown = SelfRefineEnv(system="Be brief.", instruction="Box it.").reset(TASK, seed=0)
    assert shown.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 70+2?\nBox it."},
    )
    assert SelfRefineEnv(instruction="").reset(TASK, seed=0).messages == TASK.messages()


def test_mistakes_of_configuration_and_data_are_told() -> None:
    with pytest.raises(ConfigError, match="max_turns is 0"):
        SelfRefineEnv(max_turns=0)
    with pytest.raises(ConfigError, match="did you mean 'boxed'"):
        SelfRefineEnv(mode="box")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'q' has no answer"):
        SelfRefineEnv().reset(Task("q", "?"), seed=0)
