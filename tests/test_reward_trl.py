# SPDX-License-Identifier: Apache-2.0
"""Functions written for TRL's trainers run unchanged, and what a function does wrong is told by its name."""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Any

import numpy as np
import pytest

from palestra.errors import ConfigError, RewardError
from palestra.reward.build import make_rubric
from palestra.reward.rubric import RESERVED, REWARD_ERRORS, Rubric
from palestra.reward.trl import EXTRAS, NOTES, TrainerState
from palestra.types import Author, Episode, Group, Span, StopReason, Task, Trajectory, Turn


def group(prompt: Any = "2+2?", count: int = 2, **meta: Any) -> Group:
    task = Task("t", prompt, "4", meta)
    return Group(
        task, 0, tuple(Episode(task, (Trajectory((), StopReason.ENV_TERMINATED),), member=i) for i in range(count))
    )


def score(function: Any, scored: Group, *state: TrainerState) -> Group:
    return asyncio.run(Rubric({"f": (function, 1.0)}, chat=False).score(scored, *state))


def rewards(scored: Group) -> list[float | None]:
    return [e.reward for e in scored.episodes]


def format_reward_func(completions, **kwargs):  # type: ignore[no-untyped-def]
    """TRL's example for conversational completions."""
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(pattern, content) else 0.0 for content in contents]


def reward_func(completions, ground_truth, **kwargs):  # type: ignore[no-untyped-def]
    """TRL's example with a column of the data, for plain completions."""
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]  # noqa: B905


def math_reward_func(prompts, completions, task, log_metric=None, **kwargs):  # type: ignore[no-untyped-def]
    """TRL's example of a function that abstains from other tasks, which logs too."""
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task):  # noqa: B905
        asked, said = prompt[-1]["content"], completion[0]["content"]
        rewards.append(float(str(eval(asked)) in said) if t == "math" else None)
    if log_metric:
        log_metric("accuracy", sum(r for r in rewards if r is not None))
    return rewards


async def slow_reward_func(prompts, completions, **kwargs):  # type: ignore[no-untyped-def]
    """TRL's example of an asynchronous function."""
    await asyncio.sleep(0)
    return [float(len(completion[0]["content"])) for completion in completions]


def reward_len(completion_ids, **kwargs):  # type: ignore[no-untyped-def]
    return [float(len(ids)) for ids in completion_ids]


def spoken(chat: bool, *texts: str, **meta: Any) -> Group:
    prompt: Any = [{"role": "system", "content": "Think."}, {"role": "user", "content": "2+2"}] if chat else "2+2"
    task, episodes = Task("t", prompt, "4", meta), []
    for member, text in enumerate(texts):
        span = Span(np.arange(3), Author.MODEL, "assistant", text, np.zeros(3), 0)
        turn = Turn((span,), tuple(task.messages()), {"role": "assistant", "content": text}, "eos")
        episodes.append(Episode(task, (Trajectory((turn,), StopReason.ENV_TERMINATED),), member=member))
    return Group(task, 0, tuple(episodes))


def test_trls_own_examples_run_as_they_are_printed_on_messages_and_on_texts() -> None:
    def by(function: Any, chat: bool, *texts: str, **meta: Any) -> Group:
        return asyncio.run(Rubric({"f": (function, 1.0)}, chat=chat).score(spoken(chat, *texts, **meta)))

    talk = "<think>2+2</think><answer>4</answer>", "5"
    assert rewards(by(format_reward_func, True, *talk)) == [1.0, 0.0]
    assert rewards(by(reward_func, False, "\\boxed{4}", "\\boxed{5}")) == [1.0, 0.0]
    solved = by(math_reward_func, True, *talk, task="math")
    assert rewards(solved) == [1.0, 0.0] and [e.info[NOTES]["accuracy"] for e in solved.episodes] == [1.0, 1.0]
    assert rewards(by(math_reward_func, True, *talk, task="code")) == [None, None]
    assert rewards(by(slow_reward_func, True, *talk)) == [36.0, 1.0]
    assert rewards(by(reward_len, True, *talk)) == rewards(by(reward_len, False, *talk)) == [3.0, 3.0]


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
