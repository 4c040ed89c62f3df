# SPDX-License-Identifier: Apache-2.0
"""Which groups a step learns from, and what is drawn in the place of the others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from fakes import run

from palestra.data.source import Cursor, GeneratedSource, ListSource, TaskSource
from palestra.learn.batch import token_weights
from palestra.rollout.refill import Filled, fill, handed_out, select
from palestra.types import Author, Episode, Group, RewardTerm, Span, StopReason, Task, Trajectory, Turn

Rewards = Sequence[float | None]
SOURCE = GeneratedSource(lambda i: Task(f"t{i}", "?"))
BEGINNING = Cursor()


def group(draw: int, rewards: Rewards, *, tokens: int = 2, stops: Sequence[StopReason] = ()) -> Group:
    """One episode per reward; None is one that failed. Each samples ``tokens`` tokens."""
    task = Task(f"t{draw}", "?")

    def episode(member: int, reward: float | None) -> Episode:
        if reward is None:
            return Episode(task, error="env.step: OSError", member=member)
        said = Span(np.arange(tokens), Author.MODEL, "assistant", "", np.zeros(tokens), 0)
        stop = stops[member] if stops else StopReason.ENV_TERMINATED
        turn = Turn((said,), (), {"role": "assistant"}, "eos")
        return Episode(task, (Trajectory((turn,), stop, rewards={"accuracy": RewardTerm(reward)}),), member=member)

    return Group(task, draw, tuple(episode(i, r) for i, r in enumerate(rewards)))


def filled(
    rewards: Callable[[int], Rewards],
    wanted: int,
    *,
    source: TaskSource = SOURCE,
    cursor: Cursor = BEGINNING,
    equal: bool = True,
    **options: int,
) -> Filled:
    """Steps whose draw n gets ``rewards(n)``; groups come back in any order."""
    shuffled = random.Random(3)

    async def play(draws: Sequence[tuple[int, Task]]) -> list[Group]:
        done = [group(draw, rewards(draw)) for draw, _ in draws]
        shuffled.shuffle(done)
        return done

    def useful(one: Group) -> bool:
        return len(select([one], dynamic_sampling=equal)) > 0

    return run(fill(source, cursor, wanted, play, useful=useful, **options))


def every_third(draw: int) -> Rewards:
    return [1.0, 0.0] if draw % 3 == 0 else [1.0, 1.0]


def test_da_004_a_batch_that_can_never_be_filled_ends_after_the_last_allowed_round() -> None:
    step = filled(lambda draw: [0.0, 0.0], 4, max_batches=3)
    assert step.metrics() == {"rollout/gen_batches": 3, "rollout/groups_missing": 4}
    assert len(step.groups) == 12 and step.cursor == Cursor(0, 12)
    made = select(step.groups, dynamic_sampling=True)
    assert (len(made), made.counts["groups_equal"]) == (0, 12)


def test_groups_of_equal_rewards_are_replaced_until_enough_have_a_signal() -> None:
    # draws 0 … 3: 0 and 3 are kept, two are missing; 4 and 5: none; 6 and 7: one; 8: none; 9: the last one
    step = filled(every_third, 4, max_batches=10)
    assert [g.draw for g in step.groups] == list(range(10))
    assert (step.batches, step.missing, step.cursor) == (5, 0, Cursor(0, 10))
    made = select(step.groups, dynamic_sampling=True)
    assert [s.group for s in made.samples] == [f"{n}:t{n}" for n in (0, 0, 3, 3, 6, 6, 9, 9)]
    assert made.counts["groups_equal"] == 6


def test_no_more_is_drawn_than_is_missing_and_a_full_step_draws_once() -> None:
    step = filled(lambda draw: [1.0, 0.0], 4, max_batches=10)
    assert (len(step.groups), step.batches, step.missing) == (4, 1, 0)


def test_without_refill_a_step_goes_on_with_what_there_is() -> None:
    step = filled(every_third, 4)
    assert (len(step.groups), step.batches, step.missing) == (4, 1, 2)
    assert len(select(step.groups, dynamic_sampling=True)) == 4


def test_groups_below_their_minimum_are_refilled_by_the_same_means() -> None:
    step = filled(lambda draw: [1.0, None] if draw == 1 else [1.0, 1.0], 3, equal=False, max_batches=2)
    assert [g.draw for g in step.groups] == [0, 1, 2, 3] and step.missing == 0
    made = select(step.groups)
    assert (made.counts["groups_dropped"], len(made)) == (1, 6), "and groups of equal rewards are as good as others"
    assert "groups_equal" not in made.counts


def test_a_step_that_is_played_again_from_its_cursor_draws_the_same() -> None:
    first = filled(every_third, 4, max_batches=3)
    second = filled(every_third, 4, cursor=first.cursor, max_batches=3)
    assert {g.draw for g in first.groups}.isdisjoint({g.draw for g in second.groups})
    again = filled(every_third, 4, cursor=first.cursor, max_batches=3)
    assert [g.id for g in again.groups] == [g.id for g in second.groups]
    assert again.cursor == second.cursor == Cursor(0, len(first.groups) + len(second.groups))


def test_draw_numbers_go_on_over_the_end_of_an_epoch() -> None:
    source = ListSource(tuple(Task(str(i), "?") for i in range(3)))
    step = filled(lambda draw: [0.0, 0.0], 2, source=source, cursor=Cursor(4, 2), max_batches=3)
    assert [g.draw for g in step.groups] == [14, 15, 16, 17, 18, 19]
    assert handed_out(source, step.cursor) == 20


# What is learned from --------------------------------------------------------------------------------------


def test_ad_015_groups_of_nearly_equal_rewards_are_dropped_too() -> None:
    groups = [group(i, r) for i, r in enumerate([[1, 1], [1, 0], [0, 0], [1.0, 1.000000001]])]
    made = select(groups, dynamic_sampling=True)
    assert {s.group for s in made.samples} == {"1:t1"}
    assert made.counts["groups_equal"] == 3


def test_tokens_of_a_group_left_out_do_not_dilute_the_token_mean() -> None:
    groups = [group(0, [1.0, 0.0], tokens=2), group(1, [1.0, 1.0], tokens=50)]
    weights = token_weights(select(groups, dynamic_sampling=True).samples, "token_mean")
    assert [w.tolist() for w in weights] == [[0.25, 0.25], [0.25, 0.25]]


def test_mk_010_a_truncated_episode_loses_its_gradient_and_every_count_of_it() -> None:
    groups = [group(0, [1.0, 0.0], tokens=3, stops=(StopReason.ENV_TERMINATED, StopReason.MAX_TOKENS))]
    made = select(groups, mask_truncated=True)
    assert [s.trained_tokens for s in made.samples] == [3, 0]
    assert [s.reward for s in made.samples] == [1.0, 0.0], "its reward still counts in the baseline"
    weights = token_weights(made.samples, "token_mean")
    assert [w.sum() for w in weights] == [pytest.approx(1.0), 0.0]
    assert [s.trained_tokens for s in select(groups).samples] == [3, 3]
