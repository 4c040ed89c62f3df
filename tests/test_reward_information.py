# SPDX-License-Identifier: Apache-2.0
"""An intrinsic process reward: what each turn found out, as the policy itself or a fixed observer sees it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from small_models import make_model, plain_logprobs
from test_train_rl import config, logged, quiet

from palestra.errors import ConfigError
from palestra.learn.advantage import AdvantageConfig
from palestra.learn.batch import rows
from palestra.learn.turns import turn_group_mean
from palestra.model.loading import LoadedModel, load_model
from palestra.model.lora import LoraConfig, add_lora
from palestra.reward.base import PerTurn
from palestra.reward.build import make_rubric
from palestra.reward.information import InformationGain, Seen, information_gain
from palestra.train.rl import train_rl
from palestra.types import Author, Episode, Group, Span, StopReason, Task, Trajectory, Turn


class Letters:
    """One token per character, in a vocabulary of 61."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(c) % 61 for c in text]


def ids(text: str) -> list[int]:
    return Letters().encode(text)


def walk(*steps: tuple[str, str]) -> Trajectory:
    """(what was shown, what the model said) per turn; ``>`` is what the template writes before the model speaks."""
    turns = []
    for seen, said in steps:
        spans = (
            Span(np.array(ids(seen)), Author.ENV, "user", seen),
            Span(np.array(ids(">")), Author.TEMPLATE, "assistant", ">"),
            Span(np.array(ids(said)), Author.MODEL, "assistant", said, np.zeros(len(said)), 0),
        )
        turns.append(Turn(spans, ({"role": "user", "content": seen},), {"role": "assistant", "content": said}, "eos"))
    return Trajectory(tuple(turns), StopReason.ENV_TERMINATED)


def played(*trajectories: Trajectory, answer: object = "Ada") -> Group:
    task = Task("t", "who?", answer)
    return Group(task, 0, tuple(Episode(task, (t,), member=i) for i, t in enumerate(trajectories)))


SEARCHED = walk(("who?", "search"), ("it was Ada", "Ada"))
WANDERED = walk(("who?", "search"), ("no result", "Bob"))
GUESSED = walk(("who?", "Ada"))
Pairs = Sequence[tuple[Seen, str]]


def knows(pairs: Pairs) -> list[float]:
    """An observer that gives the answer 0.8 where the dialogue names it, and 0.1 where not."""
    return [math.log(0.8 if any(a in m["content"] for m in seen.messages) else 0.1) for seen, a in pairs]


# What a turn gains ----------------------------------------------------------------------------------------


def test_what_was_found_out_pays_the_turn_that_asked_and_what_was_guessed_pays_nothing() -> None:
    searched, wandered, guessed = cast(
        list[PerTurn], InformationGain(knows)(trajectories=[SEARCHED, WANDERED, GUESSED], answer=["Ada"] * 3)
    )
    assert searched.values == pytest.approx((0.7, 0.0))
    assert wandered.values == (0.0, 0.0)
    assert guessed.values == (0.0,)
    (in_nats,) = cast(list[PerTurn], InformationGain(knows, nats=True)(trajectories=[SEARCHED], answer=["Ada"]))
    assert in_nats.values == pytest.approx((math.log(8), 0.0))


def test_turn_by_turn_or_in_one_sum() -> None:
    clues = walk(("?", "a"), ("one clue", "b"), ("two clue clue", "c"), ("three clue", "d"))
    seen: list[list[str]] = []

    def belief(pairs: Pairs) -> list[float]:
        seen.extend([m["content"] for m in s.messages] for s, _ in pairs)
        return [math.log(0.1 + 0.2 * sum(m["content"].count("clue") for m in s.messages)) for s, _ in pairs]

    (by_turn,) = cast(list[PerTurn], InformationGain(belief)(trajectories=[clues], answer=["x"]))
    # Before actions 1 … 4: 0, 1, 3 and 4 clues, so 0.1, 0.3, 0.7 and 0.9.
    assert by_turn.values == pytest.approx((0.2, 0.4, 0.2, 0.0))
    seen.clear()
    assert InformationGain(belief, per_turn=False)(trajectories=[clues], answer=["x"]) == [pytest.approx(0.8)]
    assert seen == [["?"], ["?", "a", "one clue", "b", "two clue clue", "c", "three clue"]], (
        "the last action is not read"
    )


def test_a_turn_that_leads_away_from_the_answer_pays() -> None:
    def belief(pairs: Pairs) -> list[float]:
        return [math.log(0.2 if "lie" in str(s.messages) else 0.5) for s, _ in pairs]

    (gain,) = cast(list[PerTurn], InformationGain(belief)(trajectories=[walk(("?", "a"), ("lie", "b"))], answer=["x"]))
    assert gain.values == pytest.approx((-0.3, 0.0))


def test_members_that_begin_alike_are_asked_about_once_and_none_abstains() -> None:
    asked: list[int] = []

    def belief(pairs: Pairs) -> list[float | None]:
        asked.append(len(pairs))
        return [None if len(s.messages) > 1 else -1.0 for s, _ in pairs]

    gains = InformationGain(belief)(
        trajectories=[SEARCHED, WANDERED, GUESSED, GUESSED, walk()], answer=["Ada", "Ada", "Ada", None, "Ada"]
    )
    assert gains == [None, None, PerTurn((0.0,)), None, None]  # too long, too long, one action, no gold, no turn
    assert asked == [3]


# Who measures ---------------------------------------------------------------------------------------------


def mean_logprob(model: Any, text: str, answer: str) -> float:
    """By one plain forward pass of the whole sequence."""
    with torch.no_grad():
        return float(plain_logprobs(model, ids(text + answer))[-len(answer) :].mean())


def policy(seed: int = 0) -> LoadedModel:
    return LoadedModel(make_model("llama", torch.float64, seed=seed), cast(Any, Letters()), "made here", (2,))


def values(found: Any) -> list[tuple[float, ...]]:
    return [score.values for score in found]


def test_the_policys_own_gain_by_hand() -> None:
    mine, plain = policy(), make_model("llama", torch.float64)
    reward = information_gain(scale="nats", lead="so ", policy=mine)
    long = walk(("who?", "a"), ("hm", "b"), ("it was Ada", "Ada"))
    # On the very tokens, the template's included; the space at the end of the lead is the answer's.
    before = [mean_logprob(plain, text + "so", " Ada") for text in ("who?>", "who?>ahm>", "who?>ahm>bit was Ada>")]
    searched = [mean_logprob(plain, text + "so", " Ada") for text in ("who?>", "who?>searchit was Ada>")]
    found = values(reward(trajectories=[long, GUESSED, SEARCHED], answer=["Ada"] * 3))
    assert found[0] == pytest.approx((before[1] - before[0], before[2] - before[1], 0.0), abs=1e-9)
    assert found[1] == (0.0,)
    assert found[2] == pytest.approx((searched[1] - searched[0], 0.0), abs=1e-9)

    chances = values(information_gain(lead="so ", policy=mine)(trajectories=[SEARCHED], answer=["Ada"]))
    assert chances[0] == pytest.approx((math.exp(searched[1]) - math.exp(searched[0]), 0.0), abs=1e-9)


def test_it_is_the_same_however_the_batch_is_cut() -> None:
    long = walk(("who?", "a"), ("hm", "b"), ("it was Ada", "Ada"))
    whole, cut = (
        values(
            information_gain(policy=policy(), micro_batch_tokens=n)(trajectories=[long, SEARCHED], answer=["Ada"] * 2)
        )
        for n in (8192, 1)
    )
    assert [g for row in cut for g in row] == pytest.approx([g for row in whole for g in row], abs=1e-12)


def test_it_follows_the_policy_as_it_learns_and_a_fixed_observer_does_not() -> None:
    mine = policy()
    reward = information_gain(scale="nats", lead="so ", policy=mine)
    (first,) = values(reward(trajectories=[SEARCHED], answer=["Ada"]))
    with torch.no_grad():
        for new, old in zip(
            make_model("llama", torch.float64, seed=1).parameters(), mine.model.parameters(), strict=True
        ):
            old.copy_(new)
    (second,) = values(reward(trajectories=[SEARCHED], answer=["Ada"]))
    plain = make_model("llama", torch.float64, seed=1)
    by_hand = [mean_logprob(plain, text + "so", " Ada") for text in ("who?>", "who?>searchit was Ada>")]
    assert second == pytest.approx((by_hand[1] - by_hand[0], 0.0), abs=1e-9)
    assert abs(second[0] - first[0]) > 1e-3


def test_an_adapter_that_is_put_on_later_counts() -> None:
    mine = policy()
    reward = information_gain(scale="nats", lead="so ", policy=mine)  # a run makes its rewards before its adapter
    adapted = add_lora(mine.model, LoraConfig(r=2))
    (before,) = values(reward(trajectories=[SEARCHED], answer=["Ada"]))
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.fill_(0.5)
    (after,) = values(reward(trajectories=[SEARCHED], answer=["Ada"]))
    (plain,) = values(
        information_gain(scale="nats", lead="so ", policy=policy())(trajectories=[SEARCHED], answer=["Ada"])
    )
    assert before == pytest.approx(plain, abs=1e-9)
    assert abs(after[0] - before[0]) > 1e-3
    assert all(p.grad is None for p in adapted.parameters())


def test_measuring_leaves_the_policys_modes_as_they_were() -> None:
    mine = policy()
    mine.model.train()
    information_gain(policy=mine)(trajectories=[SEARCHED], answer=["Ada"])
    assert all(m.training for m in mine.model.modules())


def test_what_is_longer_than_the_context_or_has_no_tokens_is_not_scored() -> None:
    reward = information_gain(policy=policy())  # 128 positions
    untold = replace(GUESSED, turns=tuple(replace(t, spans=()) for t in GUESSED.turns))
    assert reward(trajectories=[walk(("?" * 130, "x")), untold], answer=["Ada", "Ada"]) == [None, None]
    assert reward(trajectories=[GUESSED], answer=["A" * 130]) == [None]
    assert reward(trajectories=[GUESSED], answer=["Ada"]) == [PerTurn((0.0,))]


def test_a_fixed_observers_belief_is_the_mean_log_probability_of_the_answers_tokens() -> None:
    reward = information_gain("builtin:calculator", scale="nats", lead=" so ", renderer="plain", device="cpu")
    one = walk(("2+3", "add"), ("5", "6"))
    (gain,) = values(reward(trajectories=[one], answer=["51"]))
    loaded = load_model("builtin:calculator", device="cpu")

    def mean(text: str) -> float:
        head, gold = (loaded.tokenizer.encode(t, add_special_tokens=False) for t in (text + " so", " 51"))
        tokens = torch.tensor([[loaded.tokenizer.bos_token_id, *head, *gold]])
        with torch.no_grad():
            logp = loaded.model(input_ids=tokens).logits[0, :-1].log_softmax(-1)
        return float(logp.gather(-1, tokens[0, 1:, None])[-len(gold) :].mean())

    assert gain == pytest.approx((mean("2+3add5") - mean("2+3"), 0.0), abs=1e-5)
    assert reward(trajectories=[walk(("9" * 300, "x"), ("9", "x"))], answer=["5"]) == [None]


def test_mistakes_are_told_before_a_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="scale is 'bits'"):
        information_gain("no/such/model", scale="bits")
    with pytest.raises(ConfigError, match="no model whose weights stand still is at hand"):
        make_rubric({"information_gain": 1.0}, chat=True)
    with pytest.raises(ConfigError, match="unknown option 'policy'"):
        make_rubric({"information_gain": {"policy": "x"}}, chat=True, policy=policy())


# In a run -------------------------------------------------------------------------------------------------


def test_each_turn_is_credited_with_its_own_gain() -> None:
    """Two members: one looked and was told, one looked and was not; both answer alike."""
    told, untold = walk(("who?", "s"), ("it was Ada", "Ada")), walk(("who?", "s"), ("no result", "Ada"))
    rubric = make_rubric({"information_gain": {"weight": 0.5, "scale": "nats"}}, chat=True, policy=policy())
    scored = asyncio.run(rubric.score(played(told, untold)))
    plain = make_model("llama", torch.float64)
    texts = ("who?>", "who?>sit was Ada>", "who?>sno result>")
    start, with_clue, without = (mean_logprob(plain, text + "The answer is", " Ada") for text in texts)
    gains = (with_clue - start, without - start)
    for episode, gain in zip(scored.episodes, gains, strict=True):
        assert episode.trajectories[0].rewards["information_gain"].value == pytest.approx(gain, abs=1e-9)
        assert episode.reward == pytest.approx(0.5 * gain, abs=1e-9)
        assert [t.rewards["information_gain"] for t in episode.trajectories[0].turns] == pytest.approx([gain, 0.0])

    made = rows([scored])
    assert [s.turn_rewards for s in made.samples] == [pytest.approx((0.5 * g, 0.0), abs=1e-9) for g in gains]
    advantages = turn_group_mean(made, AdvantageConfig())
    half = 0.5 * (gains[0] - gains[1]) / 2  # each first turn less the mean of both; the second turns gained alike
    for sample, values_, sign in zip(made.samples, advantages, (1, -1), strict=True):
        first, second = sample.turn_ends
        assert values_[first] == pytest.approx(sign * half, abs=1e-9)
        assert values_[second] == pytest.approx(0.0, abs=1e-12)


def test_a_run_is_paid_by_what_its_own_policy_learned_from_each_turn(tmp_path: Path) -> None:
    """With the weights of the moment, and so that a run repeats."""
    rewards = {"information_gain": 1.0}
    for name in ("a", "b"):
        train_rl(config(tmp_path / name, "eval.size=0", "train.steps=2", rewards=rewards), progress=quiet())
    first, second = (
        [{k: v for k, v in row.items() if not k.startswith(("time", "speed"))} for row in logged(tmp_path / name)]
        for name in ("a", "b")
    )
    assert first == second
    assert any(row["reward/information_gain"] != 0.0 for row in first)


def test_weights_that_change_while_rewards_are_paid_measure_nothing(tmp_path: Path) -> None:
    rewards = {"information_gain": 1.0}
    with pytest.raises(ConfigError, match=r"max_staleness above 0\); name a model as `path`"):
        train_rl(config(tmp_path / "a", "train.max_staleness=1", rewards=rewards), progress=quiet())
    assert not (tmp_path / "a").exists()
