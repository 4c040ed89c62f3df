# SPDX-License-Identifier: Apache-2.0
"""Process rewards by function: a function that says which turn earned what, from the rubric to the turn's credit."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from palestra.errors import RewardError
from palestra.learn.payments import turn_rewards
from palestra.reward.base import PerTurn
from palestra.reward.build import make_rubric
from palestra.reward.inspection import score_again
from palestra.rollout.dump import group_from_dict, group_to_dict
from palestra.types import Author, Episode, Group, Span, StopReason, Task, Trajectory, Turn

TASK = Task("t", "?", "4")


def turn(said: str, **paid: float) -> Turn:
    span = Span(np.array([1]), Author.MODEL, "assistant", said, np.zeros(1), 0)
    return Turn((span,), ({"role": "user", "content": "?"},), {"role": "assistant", "content": said}, "eos", paid)


def view(*turns: Turn) -> Trajectory:
    return Trajectory(turns, StopReason.ENV_TERMINATED)


def group(*episodes: tuple[Trajectory, ...]) -> Group:
    return Group(TASK, 0, tuple(Episode(TASK, views, member=i) for i, views in enumerate(episodes)))


def polite(trajectories: Sequence[Trajectory], **_: Any) -> list[PerTurn | None]:
    """1 for each turn that says please; abstains where nothing was said."""
    return [PerTurn(tuple(float("please" in t.text) for t in v.turns)) if v.turns else None for v in trajectories]


def scored(played: Group, rewards: dict[str, Any], **functions: Any) -> Group:
    return asyncio.run(make_rubric(rewards, chat=True, functions=functions).score(played))


def test_a_part_that_is_paid_by_turn_is_the_sum_and_stands_on_the_turns() -> None:
    played = group((view(turn("please"), turn("now"), turn("please")),), (view(turn("now")),), (view(),))
    found = scored(played, {"polite": 0.1}, polite=polite)
    parts = [e.trajectories[0].rewards["polite"] for e in found.episodes]
    assert [(p.value, p.weight) for p in parts] == [(2.0, 0.1), (0.0, 0.1), (None, 0.1)]
    assert [t.rewards["polite"] for t in found.episodes[0].trajectories[0].turns] == [1.0, 0.0, 1.0]
    assert turn_rewards(found.episodes[0]) == (pytest.approx((0.1, 0.0, 0.1)),)


def test_it_adds_to_what_the_environment_paid_and_what_is_due_at_the_end() -> None:
    played = group((view(turn("please", hint=0.5), turn("#### 4")),))
    found = scored(played, {"polite": 1.0, "accuracy": 2.0, "env/hint": 1.0}, polite=polite)
    assert found.episodes[0].reward == 3.5
    assert turn_rewards(found.episodes[0]) == ((1.5, 2.0),)


def test_behind_a_closed_gate_its_turns_earn_nothing() -> None:
    played = group((view(turn("please"), turn("#### 5")),))
    rewards = {"accuracy": 1.0, "polite": {"weight": 1.0, "gate": "accuracy"}}
    found = scored(played, rewards, polite=polite)
    assert found.episodes[0].trajectories[0].rewards["polite"].value == 1.0
    assert turn_rewards(found.episodes[0]) == ((0.0, 0.0),)


def test_a_turn_kept_in_a_rewritten_context_stays_one_turn_and_is_paid_once() -> None:
    kept, dropped = turn("please"), turn("please")
    found = scored(group((view(kept, dropped), view(kept, turn("now")))), {"polite": 1.0}, polite=polite)
    first, last = found.episodes[0].trajectories
    assert first.turns[0] is last.turns[0]
    assert last.rewards["polite"].value == 1.0  # functions see the last context, and so its turns
    assert turn_rewards(found.episodes[0]) == ((1.0, 0.0), (0.0, 0.0))


def test_one_trajectory_of_two_members_is_paid_as_each_member_is() -> None:
    both = view(turn("a"))
    found = scored(group((both,), (both,)), {"p": 1.0}, p=lambda **_: [PerTurn((1.0,)), PerTurn((2.0,))])
    assert [e.trajectories[0].turns[0].rewards for e in found.episodes] == [{"p": 1.0}, {"p": 2.0}]


def test_recorded_episodes_are_scored_again_as_the_environment_left_them() -> None:
    played = group((view(turn("please", hint=0.5), turn("please")),))
    once = scored(played, {"polite": 1.0, "env/hint": 1.0}, polite=polite)
    read = group_from_dict(group_to_dict(once))
    (again,) = score_again(
        make_rubric({"polite": 0.1, "env/hint": 1.0}, chat=True, functions={"polite": polite}), [read]
    )
    assert {n: (t.value, t.weight) for n, t in again.episodes[0].trajectories[0].rewards.items()} == {
        "hint": (0.5, 1.0),
        "polite": (2.0, 0.1),
    }
    (without,) = score_again(make_rubric({"accuracy": 1.0}, chat=True), [read])
    assert sorted(without.episodes[0].trajectories[0].rewards) == ["accuracy", "hint"]
    turns = without.episodes[0].trajectories[0].turns
    assert [(dict(t.rewards), dict(t.info)) for t in turns] == [({"hint": 0.5}, {}), ({}, {})]


def test_mistakes_are_told() -> None:
    with pytest.raises(RewardError, match="'p' paid 1 turns of an episode that has 2"):
        scored(group((view(turn("a"), turn("b")),)), {"p": 1.0}, p=lambda **_: [PerTurn((1.0,))])
    with pytest.raises(RewardError, match="must be finite"):
        PerTurn((math.nan,))
    with pytest.raises(RewardError, match="the environment pays a part named 'p'"):
        scored(group((view(turn("a", p=1.0)),)), {"p": 1.0}, p=lambda **_: [PerTurn((1.0,))])


def test_one_that_fails_does_not_take_the_others_with_it() -> None:
    def brittle(trajectories: Sequence[Trajectory], **_: Any) -> list[Any]:
        return [ValueError("odd") if v.turns[0].text == "odd" else PerTurn((1.0,)) for v in trajectories]

    def thrower(trajectories: Sequence[Trajectory], **_: Any) -> list[PerTurn]:
        if any(v.turns[0].text == "odd" for v in trajectories):
            raise ValueError("odd")
        return [PerTurn((1.0,)) for _ in trajectories]

    for function in (brittle, thrower):
        found = scored(group((view(turn("odd")),), (view(turn("even")),)), {"p": 1.0}, p=function)
        assert [e.trajectories[0].rewards["p"].value for e in found.episodes] == [None, 1.0]
        assert [dict(e.trajectories[0].turns[0].rewards) for e in found.episodes] == [{}, {"p": 1.0}]
