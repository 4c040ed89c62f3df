# SPDX-License-Identifier: Apache-2.0
"""What examples add up to, worked out by hand or by counting every case."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest

from palestra.eval.evaluate import result_of, value_of
from palestra.eval.examples import Example, error_of, example_of
from palestra.eval.metrics import pass_at_k, pass_hat_k, quantile, sign_test
from palestra.eval.summary import summarise
from palestra.reward.rubric import Rubric
from palestra.rollout.collect import collect
from palestra.types import Author, Episode, Group, RewardTerm, Span, StopReason, Task, Trajectory, Turn


def said(
    text: str,
    *,
    task: Task | None = None,
    stop: StopReason = StopReason.ENV_TERMINATED,
    member: int = 0,
    calls: int = 0,
    info: dict[str, int] | None = None,
    **rewards: float,
) -> Episode:
    """An episode of one turn with these reward parts."""
    span = Span([1, 2, 3], Author.MODEL, "assistant", text, [0.0] * 3, 0)
    action = {"role": "assistant", "content": text}
    finish = "length" if stop is StopReason.MAX_TOKENS else "eos"
    turn = Turn((span,), ({"role": "user", "content": "?"},), action, finish, {}, calls, info or {})
    terms = {name: RewardTerm(value) for name, value in rewards.items()}
    return Episode(task or Task("t", "?", "72"), (Trajectory((turn,), stop, rewards=terms),), member=member)


def example(task: str, member: int, value: float | None, **more: object) -> Example:
    return Example(task, member, "?", "72", value=value, right=None if value is None else value >= 1, **more)


def test_a_right_answer_is_off_by_nothing_however_it_is_written() -> None:
    percent = [example("a", 0, 1.0, prediction="25"), example("b", 0, 0.0, prediction="0.35")]
    percent = [dataclasses.replace(e, gold="0.25") for e in percent]
    assert [error_of(e) for e in percent] == [(0.0, 0.0), (pytest.approx(0.1), pytest.approx(0.4))]
    assert summarise(percent)["numeric_error"]["mean"] == pytest.approx(0.05)


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 2), (6, 6, 3), (6, 0, 2), (4, 3, 4)])
def test_pass_at_k_and_pass_hat_k_are_the_shares_of_all_choices_of_k_samples(n: int, c: int, k: int) -> None:
    choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)
    assert pass_hat_k(n, c, k) == pytest.approx(sum(map(all, choices)) / len(choices), abs=1e-12)


def test_no_value_where_k_exceeds_the_samples_and_counts_that_cannot_be_are_refused() -> None:
    assert pass_hat_k(3, 3, 4) is None
    with pytest.raises(ValueError, match="pass_hat_k needs"):
        pass_hat_k(3, 4, 1)


@pytest.mark.parametrize(("better", "worse"), [(9, 1), (1, 9), (4, 4), (6, 2), (0, 0)])
def test_the_sign_test_counts_the_coin_throws_that_are_at_least_as_uneven(better: int, worse: int) -> None:
    n = better + worse
    uneven = sum(math.comb(n, i) for i in range(n + 1) if abs(2 * i - n) >= abs(better - worse))
    assert sign_test(better, worse) == pytest.approx(uneven / 2**n, abs=1e-12)


def test_quantiles_interpolate() -> None:
    assert (quantile([1.0, 3.0], 0.25), quantile([5.0], 0.95), quantile([], 0.5)) == (1.5, 5.0, None)


def test_two_tasks_with_two_samples_each_by_hand() -> None:
    # t0: right and wrong, pass@1 1/2, pass@2 1, pass^2 0. t1: both right, all 1.
    found = summarise([example("t0", 0, 1.0), example("t0", 1, 0.0), example("t1", 0, 1.0), example("t1", 1, 1.0)])
    assert {k: v["value"] for k, v in found["pass_at_k"].items()} == {"1": 0.75, "2": 1.0}
    assert {k: v["value"] for k, v in found["pass_hat_k"].items()} == {"1": 0.75, "2": 0.5}


def test_ev_004_an_asked_k_beyond_the_samples_has_no_value_rather_than_one() -> None:
    found = summarise([example("t", i, 0.0) for i in range(3)], ks=[7])
    assert found["pass_at_k"] == {"7": {"value": None, "interval": None, "tasks": 0}}


def test_numeric_error_is_over_numbers_read_and_its_shares_over_all_that_have_a_gold_number() -> None:
    # Errors 0, 0.5 (0.7 %), 28 (39 %); one answer unread; one gold is no number.
    read = ["72", "72.5", "100", None]
    examples = [example(f"t{i}", 0, 0.0, prediction=p) for i, p in enumerate(read)]
    examples.append(dataclasses.replace(example("w", 0, 1.0, prediction="Ann"), gold="Ann"))
    found = summarise(examples)["numeric_error"]
    assert (found["numeric"], found["read"], found["median"]) == (4, 3, 0.5)
    assert found["mean"] == pytest.approx(28.5 / 3)
    assert found["within"] == {"1%": 0.5, "5%": 0.5, "10%": 0.5}
    assert error_of(Example("t", 0, "", "0", prediction="1")) == (1.0, math.inf)


def test_mistakes_are_shares_of_the_wrong_and_difficulties_are_classes_of_tasks() -> None:
    kinds = ["calculation", "calculation", "format", None]
    examples = [
        example(f"t{i}", 0, float(kind is None), kind=kind, difficulty=d)
        for i, (kind, d) in enumerate(zip(kinds, (1, 2, 4, 7), strict=True))
    ]
    found = summarise(examples)
    assert found["mistakes"]["calculation"] == {"count": 2, "share": pytest.approx(2 / 3)}
    assert [(r["steps"], r["tasks"], r["accuracy"]) for r in found["difficulty"]] == [
        ("1-2", 2, 0.0),
        ("3-4", 1, 0.0),
        ("5+", 1, 1.0),
    ]


def test_failed_episodes_are_in_no_number() -> None:
    good, bad = example("t", 0, 1.0, tokens=10), Example("t", 1, "?", "72", error="outage", tokens=9999)
    found = summarise([good, bad])
    assert found["per_episode"]["tokens"]["mean"] == 10
    assert found["pass_at_k"] == {"1": {"value": 1.0, "interval": pytest.approx((0.2065, 1.0), abs=1e-4), "tasks": 1}}
    json.dumps(found, allow_nan=False)


def test_an_episode_becomes_an_example_with_its_prediction_and_its_mistake() -> None:
    task = Task("t", "Half of 144?", "72", {"full_answer": "<<144/2=72>>72\n#### 72"})
    found = example_of(task, said("144/2 = 71\n#### 71", calls=1, info={"tool_errors": 2}, accuracy=0.0), "accuracy")
    assert (found.prediction, found.right, found.kind) == ("71", False, "calculation")
    assert (found.rule, found.difficulty) == ("144/2 = 71 is written; it is 72", 1)
    assert (found.tokens, found.characters, found.turns, found.steps) == (3, 18, 1, 1)
    assert (found.tool_calls, found.tool_failures, found.stop) == (1, 2, "env_terminated")
    assert example_of(task, said("#### 72", accuracy=1.0), "accuracy").kind is None
    assert json.loads(found.to_json())["rewards"] == {"accuracy": 0.0}


def test_a_number_in_a_reply_that_was_cut_off_is_no_answer() -> None:
    found = example_of(Task("t", "?", "72"), said("So 48", stop=StopReason.MAX_TOKENS, accuracy=0.0), "accuracy")
    assert (found.prediction, found.kind, "cut off by the length limit" in (found.rule or "")) == (None, "format", True)


def test_structured_calls_count_as_operations() -> None:
    task = Task("t", "(64*96)+69", 6213)
    episode = said("It is 6075.", accuracy=0.0)
    calls = [("multiply", '{"a": 64, "b": 96}'), ("subtract", '{"a": 6144, "b": 69}')]
    made = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    (trajectory,) = episode.trajectories
    turn = dataclasses.replace(trajectory.turns[0], action={**trajectory.turns[0].action, "tool_calls": made})
    episode = dataclasses.replace(episode, trajectories=(dataclasses.replace(trajectory, turns=(turn,)),))
    found = example_of(task, episode, "accuracy")
    assert found.rule == "6144 - 69 is computed where the gold solution has 6144 + 69"


def test_ev_007_no_example_is_counted_twice_however_the_episodes_are_spread_over_workers() -> None:
    # 5 examples, 2 at a time: nothing is padded, so nothing has to be dropped before the mean.
    import asyncio

    tasks = [Task(f"t{i}", "?", "72") for i in range(5)]

    async def rollout(task: Task, draw: int, member: int) -> Episode:
        await asyncio.sleep(0.001 * (draw % 2))
        return said("72", task=task, member=member, accuracy=float(draw < 3))

    async def played() -> list[Group]:
        return [g async for g in collect(enumerate(tasks), rollout, group_size=1, concurrency=2, min_group=1)]

    found = result_of(asyncio.run(played()), "accuracy", seconds=0.0)
    assert (found.examples, found.scored, found.accuracy) == (5, 5, 0.6)


def test_ev_012_the_shaped_reward_and_correctness_are_two_series() -> None:
    import asyncio

    rubric = Rubric(
        {"correct": (lambda completions: [1.0], 1.0), "speed_bonus": (lambda completions: [0.4], 1.0)}, chat=False
    )
    task = Task("t", "?", "72")
    group = asyncio.run(rubric.score(Group(task, 0, (said("72", task=task),))))
    found = result_of([group], "correct", seconds=0.0)
    assert found.accuracy == 1.0 and found.rewards == {"correct": 1.0, "speed_bonus": 0.4}
    assert group.episodes[0].reward == pytest.approx(1.4)


def test_with_several_samples_the_interval_is_over_tasks_not_over_episodes() -> None:
    # Two tasks, one always right, one never, 50 samples each: two independent values, not a hundred.
    groups = [
        Group(t := Task(name, "?", "72"), i, tuple(said("x", task=t, member=m, accuracy=right) for m in range(50)))
        for i, (name, right) in enumerate((("a", 1.0), ("b", 0.0)))
    ]
    found = result_of(groups, "accuracy", seconds=0.0, samples=50)
    assert (found.examples, found.samples, found.accuracy) == (2, 50, 0.5)
    assert found.std_error == pytest.approx(0.5 / math.sqrt(2))
    assert value_of(Episode(Task("t", "?"), error="outage"), "accuracy") is None
