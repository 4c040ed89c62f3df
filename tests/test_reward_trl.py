# SPDX-License-Identifier: Apache-2.0
"""Functions written for TRL's trainers run unchanged, and what a function does wrong is told by its name."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np
import pytest

from palestra.errors import ConfigError, RewardError
from palestra.reward.build import make_rubric
from palestra.reward.rubric import RESERVED, REWARD_ERRORS, Rubric
from palestra.reward.trl import EXTRAS, NOTES, TrainerState
from palestra.types import Episode, Group, StopReason, Task, Trajectory


def group(prompt: Any = "2+2?", count: int = 2, **meta: Any) -> Group:
    task = Task("t", prompt, "4", meta)
    return Group(
        task, 0, tuple(Episode(task, (Trajectory((), StopReason.ENV_TERMINATED),), member=i) for i in range(count))
    )


def score(function: Any, scored: Group, *state: TrainerState) -> Group:
    return asyncio.run(Rubric({"f": (function, 1.0)}, chat=False).score(scored, *state))


def rewards(scored: Group) -> list[float | None]:
    return [e.reward for e in scored.episodes]


def test_the_trainers_state_is_one_object_for_the_call_required_or_among_the_rest() -> None:
    def asks(completions: list[str], trainer_state: Any) -> list[float]:
        return [float(trainer_state.global_step < trainer_state.max_steps)] * len(completions)

    async def rest(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(kwargs["trainer_state"].global_step)] * len(completions)

    assert rewards(score(asks, group(), TrainerState(3, 10))) == [1.0, 1.0]
    assert rewards(score(rest, group(), TrainerState(3, 10))) == [3.0, 3.0]
    assert rewards(score(rest, group())) == [0.0, 0.0]


def test_what_is_logged_stands_with_its_episode() -> None:
    def logs(completions: list[str], log_extra: Any, log_metric: Any) -> list[float]:
        log_extra("read", ["a", 5])
        log_metric("share", 0.5)
        return [0.0, 1.0]

    notes = [e.info[NOTES] for e in score(logs, group()).episodes]
    assert notes == [{"read": "a", "share": 0.5}, {"read": 5, "share": 0.5}]

    def too_few(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("read", ["a"])
        return [0.0, 1.0]

    with pytest.raises(RewardError, match=r"'read'.* 1 values for 2 completions"):
        score(too_few, group())


def test_numbers_are_logged_as_numbers_what_is_not_finite_as_none_and_a_failed_call_not_at_all() -> None:
    def logs(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("n", [np.int64(5), float("nan")])
        return [0.0, 1.0]

    def breaks(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("half", ["done"] * len(completions))
        raise ValueError("later")

    functions: Any = {"logs": (logs, 1.0), "breaks": (breaks, 1.0)}
    scored = asyncio.run(Rubric(functions, chat=False).score(group()))
    assert [e.info[NOTES] for e in scored.episodes] == [{"n": 5}, {"n": None}]


def test_one_failing_completion_among_others_keeps_the_state_whole() -> None:
    def fragile(task_id: list[str], n: list[int], trainer_state: Any) -> list[float]:
        if len(n) > 1:
            raise ValueError("one at a time")
        return [float(trainer_state.global_step)]

    assert rewards(score(fragile, group(n=1), TrainerState(7))) == [7.0, 7.0]


def test_the_question_is_the_prompt_unless_the_task_has_its_own() -> None:
    seen: list[Any] = []

    def reads(completions: list[str], question: list[str]) -> list[float]:
        seen.extend(question)
        return [0.0] * len(completions)

    score(reads, group(count=1))
    score(reads, group(({"role": "system", "content": "s"}, {"role": "user", "content": "3+3?"}), 1))
    score(reads, group(count=1, question="own"))
    assert seen == ["2+2?", "3+3?", "own"]


def test_a_callable_that_does_not_show_its_parameters_is_one_line_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="'builtins:dict' is 'dict', whose parameters cannot be read"):
        make_rubric({"builtins:dict": 1.0}, chat=False)


@pytest.mark.parametrize("waits", [False, True], ids=["plain", "async"])
def test_sys_exit_in_a_reward_is_a_failure_of_that_function_and_not_the_end_of_the_run(waits: bool) -> None:
    def plain(completions: list[str]) -> list[float]:
        sys.exit(3)

    async def later(completions: list[str]) -> list[float]:
        sys.exit(3)

    scored = score(later if waits else plain, group())
    said = "RuntimeError: reward function 'f' called sys.exit(3)"
    assert [e.info[REWARD_ERRORS] for e in scored.episodes] == [{"f": said}] * 2
    assert rewards(scored) == [None, None]


def test_what_we_give_beside_the_columns_is_no_column_of_a_task() -> None:
    assert set(EXTRAS) <= set(RESERVED)
    with pytest.raises(RewardError, match="'trainer_state'"):
        score(lambda completions: [0.0], group(count=1, trainer_state=1))
