# SPDX-License-Identifier: Apache-2.0
"""Rewards, curricula and selections exactly at their edges, and where there is nothing to judge by."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from palestra.data.curriculum import curriculum, write_pass_rates
from palestra.reward.base import RewardFunction
from palestra.reward.build import make_rubric
from palestra.reward.functions import accuracy, combined, length_penalty, partial_credit, step
from palestra.train.sample_config import PairSelection
from palestra.train.selection import Count, pairs
from palestra.types import Author, Episode, Group, Message, RewardTerm, Span, StopReason, Task, Trajectory, Turn

TASK = Task("t", "2+2?", "4")


def turn(text: str, **paid: float) -> Turn:
    said = Span(np.zeros(1), Author.MODEL, "assistant", text, logprobs=np.zeros(1), version=0)
    action: Message = {"role": "assistant", "content": text}
    return Turn((said,), ({"role": "user", "content": "?"},), action, "eos", paid)


def trajectory(*turns: Turn, **rewards: float) -> Trajectory:
    terms = {name: RewardTerm(value) for name, value in rewards.items()}
    return Trajectory(turns, StopReason.ENV_TERMINATED, rewards=terms)


# Edges -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "credit"), [("#### 71", 0.5), ("#### 73", 0.5), ("#### 67", 0.0), ("#### 77", 0.0)])
def test_an_error_of_just_1_or_5_is_outside_the_band_below_it(answer: str, credit: float) -> None:
    assert partial_credit()(completions=[answer], answer=["72"]) == [credit]


def test_an_answer_shorter_than_the_target_earns_nothing_for_that() -> None:
    for made in (length_penalty(target=200), combined(target=200)):
        assert made(completions=["#### 4", "#### 4".ljust(200)], answer=["4", "4"]) == [1.0, 1.0]


@pytest.mark.parametrize("made", [length_penalty(), step(), combined(), partial_credit()])
def test_without_a_gold_answer_every_reward_that_reads_one_abstains(made: RewardFunction) -> None:
    abstained, right = made(completions=["1. so\n#### 4"] * 2, answer=[None, "4"])
    assert abstained is None and right >= 1.0


def test_an_answer_counts_where_the_episode_ended_and_not_where_it_passed_by() -> None:
    right, wrong = turn("The answer is 4."), turn("The answer is 5.")
    ends = [trajectory(right, wrong), trajectory(wrong, right), trajectory()]
    assert accuracy(["The answer is 4."] * 3, answer=["4"] * 3, trajectories=ends) == [0.0, 1.0, 0.0]


def test_a_turn_that_stands_in_two_views_of_a_rewritten_context_was_paid_once() -> None:
    kept, last = turn("look", env=1.0), turn("4", env=2.0)
    episode = Episode(TASK, (trajectory(kept), trajectory(kept, last)))
    (scored,) = asyncio.run(make_rubric(None, chat=False).score(Group(TASK, 0, (episode,)))).episodes
    assert [t.rewards["env"].value for t in scored.trajectories] == [3.0, 3.0]


# Which tasks, which pairs ----------------------------------------------------------------------------------


def test_pass_rates_at_the_bounds_are_within_them(tmp_path: Path) -> None:
    rows = "\n".join(f'{{"id": "t{i}", "prompt": "?", "answer": "1", "steps": 1}}' for i in range(5))
    (tmp_path / "train.jsonl").write_text(rows)
    rates = tmp_path / "rates.json"
    write_pass_rates(rates, {"t0": 0.0, "t1": 0.25, "t2": 0.5, "t3": 0.75, "t4": 1.0}, "accuracy")

    def chosen(**bounds: float) -> list[str]:
        source = {"name": "jsonl", "path": str(tmp_path)}
        return sorted(t.id for t in curriculum(source, by="steps", pass_rates=str(rates), **bounds).pools[-1])

    assert chosen() == ["t0", "t1", "t2", "t3", "t4"]
    assert chosen(min_pass_rate=0.25, max_pass_rate=0.75) == ["t1", "t2", "t3"]


def paired(*rewards: float, **settings: float) -> tuple[list[tuple[int, int]], dict[str, int]]:
    episodes = tuple(
        Episode(TASK, (trajectory(turn(f"it is {i}"), accuracy=reward),), member=i) for i, reward in enumerate(rewards)
    )
    count = Count()
    made = pairs(Group(TASK, 0, episodes), PairSelection.model_validate(settings), count)
    return [(a.member, b.member) for a, b in made], dict(count.left_out)


def test_the_middle_one_of_an_odd_number_meets_nobody() -> None:
    assert paired(0.5, 1.0, 0.0, per_task=5) == ([(1, 2)], {})


def test_rewards_must_differ_by_more_than_the_margin() -> None:
    assert paired(1.0, 0.5, margin=0.5) == ([], {"margin": 1})
    assert paired(1.0, 0.5, margin=0.25) == ([(0, 1)], {})
