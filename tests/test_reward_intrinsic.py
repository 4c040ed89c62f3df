# SPDX-License-Identifier: Apache-2.0
"""Intrinsic rewards beside novelty: what an episode found out, and where success is changing."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from palestra.errors import ConfigError, RewardError
from palestra.model.loading import load_model
from palestra.reward.base import Stateful
from palestra.reward.build import make_rubric
from palestra.reward.information import InformationGain, before_first_and_last_action, information_gain
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


SEARCHED = walk(("who?", "search"), ("it was Ada", "Ada"))
WANDERED = walk(("who?", "search"), ("no result", "Bob"))
GUESSED = walk(("who?", "Ada"))


# Information gain ------------------------------------------------------------------------------------------


def knows(pairs: Sequence[tuple[Sequence[Message], str]]) -> list[float]:
    """An observer that gives the answer 0.8 where the dialogue names it, and 0.1 where not."""
    return [math.log(0.8 if any(a in m["content"] for m in d) else 0.1) for d, a in pairs]


def test_what_was_found_out_pays_and_what_was_guessed_does_not() -> None:
    gains = InformationGain(knows)(trajectories=[SEARCHED, WANDERED, GUESSED], answer=["Ada"] * 3)
    assert gains == pytest.approx([0.7, 0.0, 0.0])
    assert InformationGain(knows, nats=True)(trajectories=[SEARCHED], answer=["Ada"]) == pytest.approx([math.log(8)])


def test_it_is_the_sum_of_the_gains_of_the_turns() -> None:
    clues = walk(("?", "a"), ("one clue", "b"), ("two clue clue", "c"), ("three clue", "d"))
    seen: list[list[str]] = []

    def belief(pairs: Sequence[tuple[Sequence[Message], str]]) -> list[float]:
        seen.extend([m["content"] for m in d] for d, _ in pairs)
        return [math.log(0.1 + 0.2 * sum(m["content"].count("clue") for m in d)) for d, _ in pairs]

    (gain,) = InformationGain(belief)(trajectories=[clues], answer=["x"])
    by_turn = [0.3 - 0.1, 0.7 - 0.3, 0.9 - 0.7]  # before actions 1 … 4: 0, 1, 3 and 4 clues
    assert gain == pytest.approx(sum(by_turn))
    assert seen == [["?"], ["?", "a", "one clue", "b", "two clue clue", "c", "three clue"]], (
        "the last action is not read"
    )


def test_members_that_begin_alike_are_asked_about_once_and_none_abstains() -> None:
    asked: list[int] = []

    def belief(pairs: Sequence[tuple[Sequence[Message], str]]) -> list[float | None]:
        asked.append(len(pairs))
        return [None if len(d) > 1 else -1.0 for d, _ in pairs]

    gains = InformationGain(belief)(
        trajectories=[SEARCHED, WANDERED, GUESSED, GUESSED, walk()], answer=["Ada", "Ada", "Ada", None, "Ada"]
    )
    assert gains == [None, None, 0.0, None, None]  # too long, too long, one action, no gold, no turn
    assert asked == [3]
    assert before_first_and_last_action(GUESSED)[0] == before_first_and_last_action(GUESSED)[1]


def test_the_observers_belief_is_the_mean_log_probability_of_the_answers_tokens() -> None:
    reward = information_gain("builtin:calculator", scale="nats", lead=" so", renderer="plain", device="cpu")
    one = walk(("2+3", "add"), ("5", "6"))
    (gain,) = reward(trajectories=[one], answer=["51"])  # type: ignore[misc]
    loaded = load_model("builtin:calculator", device="cpu")

    def mean(text: str) -> float:
        head, gold = (loaded.tokenizer.encode(t, add_special_tokens=False) for t in (text + " so", " 51"))
        ids = torch.tensor([[loaded.tokenizer.bos_token_id, *head, *gold]])
        with torch.no_grad():
            logp = loaded.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        return float(logp.gather(-1, ids[0, 1:, None])[-len(gold) :].mean())

    assert gain == pytest.approx(mean("2+3add5") - mean("2+3"), abs=1e-5)
    assert reward(trajectories=[walk(("9" * 300, "x"), ("9", "x"))], answer=["5"]) == [None]


def test_an_unknown_scale_is_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="scale"):
        information_gain("no/such/model", scale="bits")


# Learning progress -----------------------------------------------------------------------------------------


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
