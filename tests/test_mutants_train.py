# SPDX-License-Identifier: Apache-2.0
"""What a step's numbers are means of, when a schedule moves on, and how old an episode is."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from fakes import run
from small_models import make_model, sample

from palestra.learn.batch import Rows, rows
from palestra.learn.policy import Policy
from palestra.learn.preference_step import unit_batches
from palestra.learn.update import UpdateConfig, train_step
from palestra.rollout.collect import collect
from palestra.rollout.refill import select
from palestra.train.metrics import rollout_metrics
from palestra.types import Author, Episode, Group, RewardTerm, Span, StopReason, Task, Trajectory, Turn

TASK = Task("t", "?")


def said(tokens: int, version: int = 0) -> Span:
    return Span(np.full(tokens, 5), Author.MODEL, "assistant", "", np.full(tokens, -1.0), version)


def episode(member: int, value: float, *tokens: int, stop: StopReason = StopReason.ENV_TERMINATED) -> Episode:
    """One turn, with one token shown and one tool call, for each of ``tokens``."""
    shown = Span(np.array([4]), Author.ENV, "user")
    turns = tuple(Turn((shown, said(n)), (), {"role": "assistant"}, "eos", tool_calls=1) for n in tokens)
    return Episode(TASK, (Trajectory(turns, stop, rewards={"accuracy": RewardTerm(value)}),), member=member)


# A step's numbers ------------------------------------------------------------------------------------------


def test_the_numbers_of_a_step_are_of_the_episodes_that_did_not_fail() -> None:
    failed = Episode(TASK, error="env.step: OSError", member=3, info={"failure": "env.step"})
    whole = Group(
        TASK, 0, (episode(0, 1.0, 2, 4), episode(1, 0.5, 3, stop=StopReason.MAX_TOKENS), episode(2, 0.0, 3), failed)
    )
    flat = Group(TASK, 1, (episode(0, 1.0, 1), episode(1, 1.0, 1)))
    metrics = rollout_metrics(
        [whole, flat], rows([whole, flat]), "accuracy", {"time/rollout_s": 2.0, "time/update_s": 10.0}
    )
    want = {
        "rollout/episodes": 6.0,
        "rollout/groups": 2.0,
        "rollout/errors": 1.0,
        "rollout/error/env.step": 1.0,
        "rollout/sampled_tokens": 6.0 + 3 + 3 + 1 + 1,
        "rollout/sampled_tokens_mean": 14 / 5,
        "rollout/turns_mean": 6 / 5,
        "rollout/tool_calls_mean": 6 / 5,
        "rollout/truncated_share": 1 / 5,
        "rollout/stop/env_terminated": 4 / 5,
        "rollout/stop/max_tokens": 1 / 5,
        "rollout/groups_zero_variance": 1.0,
        "rollout/success_rate": 3 / 5,
        "reward/accuracy": 3.5 / 5,
        "train/reward": 0.7,
        "train/reward_std": 0.4,  # deviations 0.3, −0.2, −0.7, 0.3, 0.3: their squares add up to 0.8, of five
        "train/row_tokens": 14.0 + 6,
        "speed/sampled_tokens_per_s": 7.0,
        "speed/trained_tokens_per_s": 2.0,
    }
    assert {name: metrics[name] for name in want} == pytest.approx(want)
    sampled = rollout_metrics([whole, flat], select([whole, flat], dynamic_sampling=True), "accuracy", {})
    names = ("rollout/groups_zero_variance", "rollout/groups_discarded", "train/row_tokens")
    assert [sampled[name] for name in names] == [1.0, 1.0, 12.0 + 4], "a group that is left out is still one of those"


# Steps -----------------------------------------------------------------------------------------------------


def stepped(policy: Policy, data: Rows, **options: Any) -> tuple[dict[str, float], int]:
    """A step's metrics, and how far the schedule went on."""
    sgd = torch.optim.SGD(policy.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 1 / (1 + step))
    seed, config = options.pop("seed", 0), UpdateConfig(kl_coef=0.0, **options)
    metrics = train_step(policy, sgd, schedule, data, config, temperature=1.0, seed=seed)
    return metrics, schedule.last_epoch


def data(*advantages: float, stale: int = 0) -> Rows:
    """One row with one trained token per advantage, and ``stale`` more that do not train."""
    samples = [sample([7, 8, 9 + i], [0, 0, 1], episode=str(i)) for i in range(len(advantages))]
    samples += [sample([7, 8, 40 + i], [0, 0, 1], episode=f"stale {i}", trained=False) for i in range(stale)]
    values = tuple(np.array([0, 0, a]) for a in (*advantages, *[0.0] * stale))
    return Rows(tuple(samples), advantages=values, old=tuple(np.array([0, 0, -3.0]) for _ in samples))


def test_a_schedule_counts_the_steps_that_moved_the_weights() -> None:
    policy = Policy(make_model())
    assert [stepped(policy, data(a, -1.0))[1] for a in (1.0, float("nan"))] == [1, 0]
    assert stepped(policy, data(0.0, 0.0))[1] == 0, "no signal, no update"


def test_episodes_that_do_not_train_are_dealt_to_no_minibatch() -> None:
    """Two that train and six that do not, dealt to two: each update has one, whatever the seed."""
    policy = Policy(make_model())
    for seed in range(6):
        metrics, _ = stepped(policy, data(1.0, -1.0, stale=6), minibatches=2, seed=seed)
        assert metrics["train/updates"] == 2.0


def test_units_may_fill_their_budget_to_the_last_token() -> None:
    """Two pairs: a prompt of 3 and replies of 2 and 4 tokens are 9, a prompt of 1 and replies of 1 and 1 are 3."""
    samples = [sample([5] * (p + r), [0] * p + [1] * r) for p, r in ((3, 2), (3, 4), (1, 1), (1, 1))]
    units = [(0, 1), (2, 3)]
    assert list(unit_batches(samples, units, 12)) == [[0, 1]]
    assert list(unit_batches(samples, units, 11)) == [[0], [1]]


# Age -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("versions", [(5, 7), (7, 5)])
def test_an_episode_is_as_old_as_the_oldest_of_its_tokens(versions: tuple[int, int]) -> None:
    async def rollout(task: Task, draw: int, member: int) -> Episode:
        turns = tuple(Turn((said(1, v),), (), {"role": "assistant"}, "eos") for v in versions)
        return Episode(task, (Trajectory(turns, StopReason.ENV_TERMINATED),))

    async def gathered() -> list[Group]:
        found = collect([(0, TASK)], rollout, group_size=1, min_group=1, max_staleness=1, version=lambda: 7)
        async with contextlib.aclosing(found) as groups:
            return [group async for group in groups]

    ((one,),) = (group.episodes for group in run(gathered()))
    assert (one.info["staleness"], one.info["stale"]) == (2, True)
