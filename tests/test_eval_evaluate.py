# SPDX-License-Identifier: Apache-2.0
"""Evaluation plays the same episodes as training and counts them over examples."""

from __future__ import annotations

import dataclasses
import json
import random

import numpy as np
import pytest
from fakes import DONE, END, WORDS, FakeRenderer, StepsEnv, run

from palestra.engine.scripted import ScriptedEngine
from palestra.errors import ConfigError, DataError
from palestra.eval.evaluate import evaluate
from palestra.eval.metrics import mean, normal_interval, pass_at_k, std_error, wilson_interval
from palestra.rollout.collect import collect
from palestra.rollout.episode import Limits, SamplingConfig, run_episode
from palestra.types import Episode, Group, RewardTerm, Task

HELLO, X = WORDS.index("hello"), WORDS.index("x")


class Exact:
    """1.0 when the answer was said; the format part abstains on odd tasks."""

    async def score(self, group):
        episodes = tuple(dataclasses.replace(e, trajectories=self.scored(e)) for e in group.episodes)
        return dataclasses.replace(group, episodes=episodes)

    def scored(self, episode):
        if episode.error is not None:
            return episode.trajectories
        return tuple(
            dataclasses.replace(
                t,
                rewards={
                    "accuracy": RewardTerm(float(t.messages[-1]["content"] == episode.task.answer)),
                    "tag_format": RewardTerm(None if episode.task.meta.get("odd") else 0.5, 0.1),
                },
            )
            for t in episode.trajectories
        )


def setting(*, fails=(), purpose="eval", member_says=None):
    renderer = FakeRenderer()
    engine = ScriptedEngine(member_says or (lambda *_: [HELLO, END]), renderer.tokenizer)

    async def rollout(task, draw, member):
        if task.id in fails:
            return Episode(task, error="outage")
        return await run_episode(
            task,
            env=StepsEnv(DONE),
            engine=engine,
            renderer=renderer,
            limits=Limits(),
            sampling=SamplingConfig(temperature=0),
            seed=0,
            draw=draw,
            member=member,
            purpose=purpose,
        )

    return rollout, engine


def tasks(right, wrong):
    return [Task(f"t{i}", "go", "hello" if i < right else "bye") for i in range(right + wrong)]


def test_ev_002_003_004_pass_at_k():
    assert pass_at_k(10, 3, 5) == pytest.approx(0.916667, abs=1e-6)
    assert pass_at_k(200, 17, 100) == pytest.approx(0.999996, abs=1e-6)
    assert pass_at_k(3, 0, 7) is None
    assert (pass_at_k(5, 0, 2), pass_at_k(5, 4, 2), pass_at_k(4, 1, 1)) == (0.0, 1.0, 0.25)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0)])
def test_counts_that_cannot_be_are_refused(n, c, k):
    with pytest.raises(ValueError, match="pass_at_k needs"):
        pass_at_k(n, c, k)


def test_ev_006_the_mean_is_over_examples_not_over_batches():
    assert mean([1.0, 0.0, 1.0, 0.0, 1.0]) == 0.6
    rollout, _ = setting()
    assert run(evaluate(tasks(3, 2), rollout, Exact(), concurrency=4)).accuracy == 0.6


def test_ev_008_two_hundred_examples_at_one_half():
    values = [1.0, 0.0] * 100
    assert std_error(values) == pytest.approx(0.035355, abs=1e-6)
    assert normal_interval(values) == pytest.approx((0.430704, 0.569296), abs=1e-6)


def test_wilsons_interval_is_right_by_hand_and_never_leaves_the_unit():
    # n = 100, 50 right: centre 0.5, half 1.96 / 1.038416 * sqrt(0.0025 + 0.00009604) = 0.096170
    assert wilson_interval(50, 100) == pytest.approx((0.403830, 0.596170), abs=1e-6)
    assert wilson_interval(0, 10)[0] == 0.0 and wilson_interval(0, 10)[1] > 0.2
    assert wilson_interval(0, 0) is None and mean([]) is None and normal_interval([]) is None


def test_the_numbers_of_a_small_evaluation():
    rollout, _ = setting(fails=("t3",))
    work = [*tasks(2, 2), Task("odd", "go", "hello", {"odd": True})]
    got = run(evaluate(work, rollout, Exact()))
    assert (got.examples, got.scored, got.errors, got.accuracy) == (5, 4, 1, 0.75)
    assert got.std_error == pytest.approx((0.75 * 0.25 / 4) ** 0.5)
    assert got.rewards == {"accuracy": 0.75, "tag_format": 0.5}
    assert got.format_rate == 0.5, "an abstention is not a zero"
    assert (got.sampled_tokens_mean, got.turns_mean, got.tool_calls_mean) == (2.0, 1.0, 0.0)
    assert (got.stops, got.truncated_share) == ({"env_terminated": 1.0}, 0.0)
    assert [g.task.id for g in got.groups] == [t.id for t in work]


def test_truncation_is_reported_by_its_reason():
    rollout, _ = setting(member_says=lambda *_: [X] * 4000)
    got = run(evaluate(tasks(2, 0), rollout, Exact()))
    assert got.stops == {"env_terminated": 1.0}, "the environment ended it, however long the text"

    async def cut(task, draw, member):
        episode = await rollout(task, draw, member)
        stop = type(episode.stop).MAX_TURNS if draw else episode.stop
        return dataclasses.replace(
            episode, trajectories=tuple(dataclasses.replace(t, stop=stop) for t in episode.trajectories)
        )

    got = run(evaluate(tasks(2, 0), cut, Exact()))
    assert (got.stops, got.truncated_share) == ({"env_terminated": 0.5, "max_turns": 0.5}, 0.5)


def test_ev_009_evaluation_consumes_no_randomness_and_shares_none_with_training():
    rollout, engine = setting()
    random.seed(5)
    np.random.seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist()
    run(evaluate(tasks(3, 3), rollout, Exact()))
    assert before == (random.getstate(), np.random.get_state()[1].tolist())
    training, other = setting(purpose="train")
    run(evaluate(tasks(3, 3), training, Exact()))
    assert not {r.params.seed for r in engine.requests} & {r.params.seed for r in other.requests}


def test_ev_011_training_and_evaluation_share_prompt_stops_and_scores():
    async def trained():
        groups = [await Exact().score(g) async for g in collect(enumerate(tasks(2, 1)), rollout, group_size=1)]
        return {g.task.id: g.episodes[0].reward for g in groups}

    rollout, engine = setting(purpose="train")
    rewards = run(trained())
    alone, again = setting()
    got = run(evaluate(tasks(2, 1), alone, Exact()))
    assert {g.task.id: g.episodes[0].reward for g in got.groups} == rewards

    def asked(of):
        return sorted((r.prompt.tolist(), r.params.stop, r.params.stop_token_ids) for r in of.requests)

    assert asked(engine) == asked(again)


def test_the_result_is_frozen_and_plain_data():
    rollout, _ = setting()
    got = run(evaluate(tasks(1, 1), rollout, Exact()))
    plain = json.loads(json.dumps(got.to_dict()))
    assert (plain["accuracy"], plain["metric"], len(plain["ci95"])) == (0.5, "accuracy", 2)
    assert "groups" not in plain
    with pytest.raises(dataclasses.FrozenInstanceError):
        got.accuracy = 1.0


def test_a_metric_that_no_reward_is_called_names_the_parts_there_are():
    rollout, _ = setting()
    with pytest.raises(ConfigError, match="'acc', which was not scored; parts: accuracy, tag_format"):
        run(evaluate(tasks(1, 0), rollout, Exact(), metric="acc"))


def test_nothing_to_evaluate_on_is_refused_and_nothing_but_outages_is_no_score():
    rollout, _ = setting(fails=("t0",))
    with pytest.raises(DataError, match="no task"):
        run(evaluate([], rollout, Exact()))
    got = run(evaluate(tasks(1, 0), rollout, Exact()))
    assert (got.errors, got.accuracy, got.ci95, got.wilson95, got.turns_mean) == (1, None, None, None, None)


def test_values_outside_the_unit_have_no_wilson_interval():
    class Twice:
        async def score(self, group):
            (e,) = group.episodes
            t = dataclasses.replace(e.trajectories[0], rewards={"accuracy": RewardTerm(2.0)})
            return Group(group.task, group.draw, (dataclasses.replace(e, trajectories=(t,)),))

    rollout, _ = setting()
    got = run(evaluate(tasks(1, 0), rollout, Twice()))
    assert (got.accuracy, got.wilson95) == (2.0, None)
