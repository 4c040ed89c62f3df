# SPDX-License-Identifier: Apache-2.0
"""Novelty: what was seldom seen pays more, and no order or spelling changes it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from palestra.errors import ConfigError
from palestra.reward.novelty import Novelty, novelty, states
from palestra.types import Author, Message, Span, StopReason, Trajectory, Turn


def walk(*steps: tuple[str, str]) -> Trajectory:
    turns = []
    for seen, said in steps:
        span = Span(np.zeros(1), Author.MODEL, "assistant", said, np.zeros(1), 0)
        shown: tuple[Message, ...] = ({"role": "user", "content": seen},)
        turns.append(Turn((span,), shown, {"role": "assistant", "content": said}, "eos"))
    return Trajectory(tuple(turns), StopReason.ENV_TERMINATED)


HALL = walk(("start", "north"), ("A hall.", "stop"))
ATTIC = walk(("start", "up"), ("An attic.", "stop"))


def test_a_state_is_where_an_action_led_and_the_prompt_is_none() -> None:
    assert states(HALL) == ["a hall", "stop"]
    assert states(walk()) == []


def test_a_state_pays_one_over_the_root_of_its_visits() -> None:
    reward = novelty(reduce="sum")
    assert reward(trajectories=[HALL], task_id=["t"]) == [2.0]
    # "a hall" and "stop" for the second time; an attic for the first, "stop" for the second
    root = 1 / math.sqrt(2)
    assert reward(trajectories=[HALL, ATTIC], task_id=["t", "t"]) == [pytest.approx(2 * root), pytest.approx(1 + root)]
    # by now "a hall" was seen 2 times and "stop" 3 times
    assert reward(trajectories=[HALL], task_id=["t"]) == [pytest.approx(1 / math.sqrt(3) + 1 / math.sqrt(4))]


def test_members_of_a_group_are_paid_alike_in_any_order() -> None:
    first, second = novelty(), novelty()
    a = first(trajectories=[HALL, HALL, ATTIC], task_id=["t"] * 3)
    b = second(trajectories=[ATTIC, HALL, HALL], task_id=["t"] * 3)
    assert a == [1.0, 1.0, 1.0] == b
    assert first.visits == second.visits


def test_pacing_up_and_down_pays_once_and_spelling_is_no_discovery() -> None:
    paces = walk(("start", "north"), ("A hall.", "south"), ("a HALL!", "north"), ("A  hall", "a hall"))
    assert novelty(reduce="sum")(trajectories=[paces], task_id=["t"]) == [1.0]


def test_counts_are_per_task_or_per_run_and_survive_a_restart() -> None:
    apart, together = novelty(), novelty(scope="run")
    for reward in (apart, together):
        reward(trajectories=[HALL], task_id=["t"])
    assert apart(trajectories=[HALL], task_id=["u"]) == [1.0]
    assert together(trajectories=[HALL], task_id=["u"]) == [pytest.approx(1 / math.sqrt(2))]
    again = Novelty()
    again.load_state_dict(apart.state_dict())
    assert again(trajectories=[HALL], task_id=["t"]) == apart(trajectories=[HALL], task_id=["t"])


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="scope"):
        novelty(scope="world")
    with pytest.raises(ConfigError, match="reduce"):
        novelty(reduce="max")
