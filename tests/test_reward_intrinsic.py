# SPDX-License-Identifier: Apache-2.0
"""An intrinsic reward: success where success is changing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from palestra.errors import ConfigError, RewardError
from palestra.reward.base import Stateful
from palestra.reward.build import make_rubric
from palestra.reward.progress import LearningProgress, learning_progress
from palestra.types import Author, Episode, Group, Message, Span, StopReason, Task, Trajectory, Turn


def walk(*steps: tuple[str, str]) -> Trajectory:
    """(what was shown, what the model said) per turn."""
    turns = []
    for seen, said in steps:
        span = Span(np.zeros(1), Author.MODEL, "assistant", said, np.zeros(1), 0)
        shown: tuple[Message, ...] = ({"role": "user", "content": seen},)
        turns.append(Turn((span,), shown, {"role": "assistant", "content": said}, "eos"))
    return Trajectory(tuple(turns), StopReason.ENV_TERMINATED)


def group(*right: float, level: object = 1) -> dict[str, Any]:
    texts = [f"#### {4 if r else 5}" for r in right]
    return {"completions": texts, "answer": ["4"] * len(texts), "level": [level] * len(texts)}


def test_the_averages_and_what_they_pay_by_hand() -> None:
    reward = learning_progress("level", fast=0.5, slow=0.25)
    assert reward(**group(0, 1)) == [0.0, 0.0]  # both averages begin at 0.5, the first group's mean
    assert reward.rates == {"1": (0.5, 0.5)}
    assert reward(**group(1, 1)) == [0.0, 0.0]  # paid by what was known before this group
    assert reward.rates == {"1": (0.75, 0.625)}
    assert reward(**group(1, 0)) == [0.125, 0.0]  # a failure is paid nothing
    assert reward.rates["1"] == pytest.approx((0.625, 0.59375))


def test_mastered_and_hopeless_kinds_fade_and_changing_ones_pay_most() -> None:
    reward = learning_progress("level")
    for i in range(200):
        reward(**group(1, 1, level="easy"))
        reward(**group(0, 0, level="hopeless"))
        reward(**group(i >= 190, i >= 190, level="new"))
        reward(**group(i < 190, i < 190, level="forgotten"))
    assert reward.progress("easy") == reward.progress("hopeless") == reward.progress("never seen") == 0.0
    assert reward.progress("new") == pytest.approx(reward.progress("forgotten")) != 0.0
    assert reward.progress("new") > 0.5


def test_its_state_survives_json_and_goes_on_alike() -> None:
    first = learning_progress("level")
    for right in (0.0, 1.0, 1.0):
        first(**group(right))
    again = learning_progress("level")
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert isinstance(first, Stateful)
    assert again(**group(1, 0)) == first(**group(1, 0)) != [0.0, 0.0]
    assert again.state_dict() == first.state_dict()


def test_abstentions_stay_and_do_not_count() -> None:
    reward = LearningProgress("level", lambda completions, **_: [None, 1.0], fast=0.5, slow=0.25)
    reward.load_state_dict({"1": [0.8, 0.5]})
    assert reward(**group(1, 1)) == [None, pytest.approx(0.3)]
    assert reward.rates["1"] == pytest.approx((0.9, 0.625))


def test_mistakes_are_told() -> None:
    with pytest.raises(ConfigError, match="0 < slow < fast"):
        learning_progress("level", fast=0.1, slow=0.1)
    with pytest.raises(ConfigError, match="did you mean 'accuracy'"):
        learning_progress("level", success="acuracy")
    with pytest.raises(RewardError, match=r"no column 'kind'.*level"):
        learning_progress("kind")(**group(1))


def test_a_rubric_pays_it_and_knows_that_it_remembers() -> None:
    rewards: dict[str, Any] = {"learning": {"function": "learning_progress", "kind": "level", "weight": 0.5}}
    rubric = make_rubric(rewards, chat=True)
    rubric.stateful["learning"].load_state_dict({"3": [0.7, 0.5]})
    task = Task("t", "2+2?", "4", {"level": 3})
    members = tuple(
        Episode(
            task,
            (
                walk(
                    ("2+2?", f"#### {n}"),
                ),
            ),
            member=n,
        )
        for n in (4, 5)
    )
    scored = asyncio.run(rubric.score(Group(task, 0, members)))
    assert [e.reward for e in scored.episodes] == [pytest.approx(0.1), 0.0]
    # one of two was right: 0.7 + 0.1 · (0.5 − 0.7), 0.5 + 0.01 · 0
    assert rubric.stateful["learning"].state_dict() == {"3": [pytest.approx(0.68), 0.5]}
