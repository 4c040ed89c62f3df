# SPDX-License-Identifier: Apache-2.0
"""Boundaries and counts of the learning room: what holds exactly at a limit, and what a metric is a share of."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from small_models import eight_samples, sample

from palestra.learn.batch import Rows, Sample, micro_batches, pack, token_weights
from palestra.learn.loss import LOSSES, LossConfig, LossInputs
from palestra.learn.offpolicy import importance_weights
from palestra.learn.payments import turn_rewards
from palestra.learn.value import critic_loss
from palestra.types import Author, Episode, RewardTerm, Span, StopReason, Task, Trajectory, Turn

DOUBLE = torch.float64


# Shares ----------------------------------------------------------------------------------------------------


def test_cispo_says_what_share_of_the_weights_it_cut() -> None:
    new = torch.tensor([9.0, 1.0, 1.2, 0.5, 1.1], dtype=DOUBLE).log()
    one = torch.ones(5, dtype=DOUBLE)
    inputs = LossInputs(new, torch.zeros_like(new), one, one, torch.arange(5))
    metrics = LOSSES["cispo"](inputs, LossConfig(clip_low=0.2, clip_high=0.25)).metrics
    assert metrics["train/clip_fraction"] == (2.0, 5.0), "9 and 0.5 are cut, the others are not"


def test_by_turns_the_share_of_clipped_values_is_of_turns_and_not_of_tokens() -> None:
    """Two turns of two tokens: the first turn's value moved further than the clip, the second's did not."""
    rows = Rows(
        (sample([5, 6, 7, 8, 9, 10], [0, 1, 1, 0, 1, 1]),),
        values=(np.zeros(6),),
        returns=(np.array([0, 1.0, 0, 0, 1.0, 0]),),
        value_counts=(np.array([0, 2.0, 0, 0, 2.0, 0]),),
    )
    batch = pack(rows, token_weights(rows.samples, "token_mean"), [0], dtype=DOUBLE)
    out = critic_loss(torch.tensor([0.5, 9.0, 0.1, 9.0], dtype=DOUBLE), batch, clip=0.2)
    # max(0.5², 0.8²) and 0.9², each for two of four tokens: ½ · (½ · 0.64 + ½ · 0.81).
    assert float(out.loss) == pytest.approx(0.3625, abs=1e-12)
    assert out.metrics["train/value_clip_fraction"] == (1.0, 2.0)


# Limits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("importance", ["token_mask", "sequence_mask"])
def test_a_ratio_that_equals_the_floor_or_the_cap_is_within_them(importance: str) -> None:
    """Ratios of exactly 1: the floor and the cap are the last that count."""
    rows = Rows((sample([5, 6, 7], [0, 1, 1], logprobs=[0, -1.5, -0.5]),), old=(np.array([0, -1.5, -0.5]),))
    weights, metrics = importance_weights(rows, importance, cap=1.0, floor=1.0)  # type: ignore[arg-type]
    assert weights[0].tolist() == [0.0, 1.0, 1.0] and metrics["train/sampler_ratio_cut"] == 0.0


def test_micro_batches_may_fill_their_budget_to_the_last_token() -> None:
    # The first group: 15 tokens, 20 more, one more, 36 in all; the next sample has 17.
    samples = eight_samples()
    assert next(micro_batches(samples, range(8), 36)) == [0, 1, 2]
    assert next(micro_batches(samples, range(8), 35)) == [0, 1]
    assert next(micro_batches(samples, range(8), 36 + 17)) == [0, 1, 2, 3]


def stored(*samples: Sample) -> int:
    """How many tokens a micro-batch of the samples is computed on."""
    batch = pack(Rows(samples), [np.zeros(len(s.tokens)) for s in samples], range(len(samples)))
    return batch.tokens.shape[1]


def written(prompt: list[int], *own: int, group: str = "g", episode: str = "a") -> Sample:
    return sample([*prompt, *own], [0] * len(prompt) + [1] * len(own), group=group, episode=episode)


@pytest.mark.parametrize(("common", "tokens"), [(31, 2 * (31 + 2)), (32, 32 + 2 * 2)])
def test_what_all_groups_begin_with_is_stored_once_from_32_tokens_on(common: int, tokens: int) -> None:
    prompt = list(range(3, 3 + common))
    assert stored(written(prompt, 50, 51, group="A"), written(prompt, 52, 53, group="B")) == tokens


@pytest.mark.parametrize(("alike", "tokens"), [(15, 2 + 1 + 2 * (15 + 1)), (16, 2 + 1 + 16 + 2 * 1)])
def test_what_two_of_a_group_wrote_alike_is_stored_once_where_it_saves_16_tokens(alike: int, tokens: int) -> None:
    beginning = range(10, 10 + alike)
    members = (written([3, 4], *beginning, 50, episode="a"), written([3, 4], *beginning, 51, episode="b"))
    assert stored(*members, written([3, 4], 52, episode="c")) == tokens


# What turns were paid --------------------------------------------------------------------------------------


def paid(terms: dict[str, RewardTerm]) -> tuple[tuple[float, ...], ...]:
    """What two turns earned that the environment paid 1 and 2 for a clue, where the episode's reward is ``terms``."""
    own = Span(np.array([9]), Author.MODEL, "assistant", logprobs=np.array([-0.5]), version=0)
    turns = tuple(Turn((own,), (), {"role": "assistant"}, "eos", {"clue": value}) for value in (1.0, 2.0))
    return turn_rewards(Episode(Task("t", "?"), (Trajectory(turns, StopReason.ENV_TERMINATED, rewards=terms),)))


@pytest.mark.parametrize(
    "terms", [{"accuracy": RewardTerm(1.0)}, {"accuracy": RewardTerm(1.0), "clue": RewardTerm(None, 0.5)}],
    ids=["no part of the reward", "not scored"],
)  # fmt: skip
def test_what_does_not_count_in_the_reward_pays_no_turn(terms: dict[str, RewardTerm]) -> None:
    assert paid(terms) == ((0.0, 1.0),)


def test_what_counts_in_the_reward_pays_its_turn_with_its_weight() -> None:
    ((first, last),) = paid({"accuracy": RewardTerm(1.0), "clue": RewardTerm(3.0, 0.1)})
    assert first == pytest.approx(0.1) and math.isclose(first + last, 1.3)
