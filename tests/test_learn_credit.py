# SPDX-License-Identifier: Apache-2.0
"""Credit within an episode: what each turn earned, advantages over tokens and over turns, and where time goes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_models import sample

from palestra.errors import ConfigError
from palestra.learn.advantage import ADVANTAGES, AdvantageConfig, whiten
from palestra.learn.batch import Rows, Sample, rows
from palestra.learn.gae import returns_to_go
from palestra.learn.payments import turn_rewards
from palestra.learn.shaping import kl_penalties, paid_tokens, with_penalties
from palestra.learn.turns import paid_turns, split_turns, turn_starts, turn_states
from palestra.learn.update import UpdateConfig
from palestra.learn.value import value_metrics, with_returns
from palestra.reward.gates import Gate
from palestra.reward.rubric import Rubric
from palestra.types import Author, Episode, Group, RewardTerm, Span, StopReason, Task, Trajectory, Turn

# Episodes --------------------------------------------------------------------------------------------------


def turn(shown: int, said: int, **paid: float) -> Turn:
    spans = [Span(np.arange(3, 3 + shown, dtype=np.int32), Author.ENV, "user")]
    if said:
        spans.append(Span(np.full(said, 9), Author.MODEL, "assistant", logprobs=np.full(said, -0.5), version=0))
    return Turn(tuple(spans), ({"role": "user", "content": "…"},), {"role": "assistant", "content": "…"}, "eos", paid)


def episode(
    *views: tuple[Turn, ...],
    stop: StopReason = StopReason.ENV_TERMINATED,
    member: int = 0,
    terms: dict[str, RewardTerm] | None = None,
) -> Episode:
    task = Task("t", "?")
    trajectories = tuple(Trajectory(v, stop, rewards=terms or {}) for v in views)
    return Episode(task, trajectories, member=member)


def scored(one: Episode, **rubric: Any) -> Episode:
    def right(completions: Any, **_: Any) -> list[float]:
        return [1.0 for _ in completions]

    made = Rubric({"accuracy": (right, 1.0)}, chat=False, **rubric)
    return asyncio.run(made.score(Group(one.task, 0, (one,)))).episodes[0]


def test_a_turn_earns_what_it_was_paid_and_the_last_one_all_the_rest() -> None:
    # The repository analysis, +0.1, +0.1, +0.2 by the environment and +0.6 at the end by something else.
    one = episode(
        (turn(4, 2, step=0.1), turn(2, 3, step=0.1), turn(2, 1, step=0.2), turn(1, 2)),
        terms={"step": RewardTerm(0.4), "answer": RewardTerm(0.6)},
    )
    assert turn_rewards(one) == (pytest.approx((0.1, 0.1, 0.2, 0.6)),)
    (made,) = rows([Group(one.task, 0, (one,))], min_group=1).samples
    assert made.turn_rewards == pytest.approx((0.1, 0.1, 0.2, 0.6)) and made.reward == pytest.approx(1.0)
    assert made.turn_ends == (5, 10, 13, 16) and not made.truncated


@pytest.mark.parametrize(
    ("rubric", "want"),
    [
        ({}, (2.0, 1.0, 4.0 + 1.0)),
        ({"env_weights": {"step": 0.5}}, (1.0, 0.5, 2.0 + 1.0)),
        ({"env_weights": {"step": 1.0}, "gates": {"step": Gate("accuracy", 2.0)}}, (0.0, 0.0, 1.0)),
    ],
    ids=["plain", "weighted", "behind a closed gate"],
)
def test_turns_together_earn_the_episodes_reward_as_the_rubric_has_it(rubric: Any, want: tuple[float, ...]) -> None:
    one = scored(episode((turn(4, 2, step=2.0), turn(2, 3, step=1.0), turn(2, 1, step=4.0))), **rubric)
    assert turn_rewards(one) == (pytest.approx(want),)
    assert sum(turn_rewards(one)[0]) == pytest.approx(one.reward)


def test_a_turn_that_sampled_nothing_and_one_that_stands_in_two_views_lose_nothing() -> None:
    first, silent, second = turn(4, 2, step=1.0), turn(1, 0, step=8.0), turn(2, 1, step=2.0)
    terms = {"step": RewardTerm(11.0)}
    assert turn_rewards(episode((first, silent), (first, second), terms=terms)) == ((1.0,), (0.0, 10.0))
    assert turn_rewards(episode((silent,), terms={})) == ((),)


@pytest.mark.parametrize("stop", StopReason)
def test_ga_008_only_a_limit_truncates(stop: StopReason) -> None:
    one = episode((turn(2, 2),), stop=stop, terms={"a": RewardTerm(1.0)})
    (made,) = rows([Group(one.task, 0, (one,))], min_group=1).samples
    ended = {StopReason.ENV_TERMINATED, StopReason.TOOL_FAILURE, StopReason.ERROR}
    assert made.truncated == (stop not in ended)


# Rows ------------------------------------------------------------------------------------------------------


def row(tokens: Any, mask: Any, paid: tuple[float, ...], *, truncated: bool = False, **more: Any) -> Sample:
    """Turns end where a run of own tokens ends."""
    own = np.array([*mask, 0])
    ends = tuple(int(i) for i in np.flatnonzero((own[:-1] == 1) & (own[1:] == 0)))
    made = sample(tokens, mask, reward=sum(paid), **more)
    return replace(made, turn_ends=ends, turn_rewards=paid, truncated=truncated)


def with_critic(samples: list[Sample], values: list[Any], after: list[float]) -> Rows:
    return Rows(tuple(samples), values=tuple(np.asarray(v, np.float64) for v in values), after=tuple(after))


def gae_by_hand(r: list[float], v: list[float], gamma: float, lam: float) -> list[float]:
    """r of n actions and n + 1 values, the last that of the state beyond."""
    out: list[float] = []
    following = 0.0
    for t in reversed(range(len(r))):
        following = r[t] + gamma * v[t + 1] - v[t] + gamma * lam * following
        out.insert(0, following)
    return out


CONFIG = AdvantageConfig(gamma=0.9, gae_lambda=0.8)


def test_gae_over_tokens_pays_a_turn_on_its_last_token_and_tool_tokens_have_no_place_in_time() -> None:
    one = row(range(8), [0, 1, 1, 0, 0, 1, 1, 1], (0.25, 1.0), episode="a")
    rows_ = with_critic([one], [[99, 0.5, 0.4, 99, 99, 0.3, 0.6, 0.2]], [77.0])
    (got,) = ADVANTAGES["gae"](rows_, CONFIG)
    want = gae_by_hand([0, 0.25, 0, 0, 1.0], [0.5, 0.4, 0.3, 0.6, 0.2, 0.0], 0.9, 0.8)
    assert got[one.loss_mask].tolist() == pytest.approx(want, abs=1e-12) and not got[~one.loss_mask].any()

    alone = row(range(6), [0, 1, 1, 1, 1, 1], (1.25,), episode="a")
    alone = replace(alone, turn_ends=(2, 5), turn_rewards=(0.25, 1.0))
    (bare,) = ADVANTAGES["gae"](with_critic([alone], [[9, 0.5, 0.4, 0.3, 0.6, 0.2]], [77.0]), CONFIG)
    assert bare[1:].tolist() == got[one.loss_mask].tolist(), "equal to the result with tool tokens removed"


@pytest.mark.parametrize("name", ["gae", "gae_turns"])
def test_truncation_bootstraps_and_termination_does_not(name: str) -> None:
    ended = row(range(5), [0, 1, 1, 0, 1], (0.0, 1.0), episode="a")
    cut = replace(ended, episode="b", truncated=True)
    values = [0, 0.5, 0.4, 0, 0.3]
    got = ADVANTAGES[name](with_critic([ended, cut], [values, values], [0.8, 0.8]), CONFIG)
    at = {"gae": (1, 2, 4), "gae_turns": (1, 4)}[name]
    paid = {"gae": [0, 0, 1.0], "gae_turns": [0, 1.0]}[name]
    for advantage, beyond in zip(got, (0.0, 0.8), strict=True):
        want = gae_by_hand(paid, [*(values[t] for t in at), beyond], 0.9, 0.8)
        assert [advantage[t] for t in at] == pytest.approx(want, abs=1e-12)


def test_an_episode_of_several_rows_is_one_stretch_of_time() -> None:
    """The context was rewritten after the first turn; another episode's row stands between the two."""
    first = row(range(4), [0, 0, 1, 1], (0.5,), episode="a", truncated=True)
    other = row(range(3), [0, 1, 1], (7.0,), episode="b")
    second = row(range(5), [0, 0, 0, 1, 1], (1.0,), episode="a", truncated=True)
    values = [[0, 0, 0.1, 0.2], [0, 3.0, 4.0], [0, 0, 0, 0.3, 0.4]]
    made = with_critic([first, other, second], values, [55.0, 55.0, 0.9])
    got = ADVANTAGES["gae"](made, CONFIG)
    want = gae_by_hand([0, 0.5, 0, 1.0], [0.1, 0.2, 0.3, 0.4, 0.9], 0.9, 0.8)
    assert [*got[0][2:], *got[2][3:]] == pytest.approx(want, abs=1e-12)
    by_turn = ADVANTAGES["gae_turns"](made, CONFIG)
    want = gae_by_hand([0.5, 1.0], [0.1, 0.3, 0.9], 0.9, 0.8)
    assert [*by_turn[0][2:], *by_turn[2][3:]] == pytest.approx([want[0]] * 2 + [want[1]] * 2, abs=1e-12)
    assert got[1].tolist() == pytest.approx([0, *gae_by_hand([0, 7.0], [3.0, 4.0, 0.0], 0.9, 0.8)], abs=1e-12)


def test_gae_over_turns_reads_one_value_per_turn_and_teaches_that_one() -> None:
    one = row(range(8), [0, 1, 1, 0, 0, 1, 1, 1], (0.25, 1.0), episode="a")
    made = with_critic([one], [[9, 0.5, 9, 9, 9, 0.3, 9, 9]], [77.0])
    (got,) = ADVANTAGES["gae_turns"](made, CONFIG)
    a, b = gae_by_hand([0.25, 1.0], [0.5, 0.3, 0.0], 0.9, 0.8)
    assert got.tolist() == pytest.approx([0, a, a, 0, 0, b, b, b], abs=1e-12)
    taught = with_returns(made.with_(advantages=(got,)), "gae_turns")
    assert taught.returns is not None and taught.value_counts is not None
    assert taught.value_counts[0].tolist() == [0, 2, 0, 0, 0, 3, 0, 0]
    assert taught.returns[0][[1, 5]].tolist() == pytest.approx([a + 0.5, b + 0.3])
    assert value_metrics(taught)["train/value_mean"] == pytest.approx(0.4), "of the two that train"


def test_a_kl_penalty_is_paid_token_by_token() -> None:
    one = row(range(6), [0, 1, 1, 0, 1, 1], (0.5, 1.0), episode="a")
    old, ref = np.array([0, -1.0, -2, 0, -1, -3]), np.array([0, -1.5, -1, 0, -1, -5])
    made = with_critic([one], [[0, 0.1, 0.2, 0, 0.3, 0.4]], [0.0]).with_(old=(old,), ref=(ref,))
    due = kl_penalties(made, "k1", 0.1)
    config = AdvantageConfig(kl="k1", kl_coef=0.1, gamma=0.9, gae_lambda=0.8)
    (paid,) = paid_tokens(made, "k1", 0.1)
    assert paid.tolist() == pytest.approx([0, -0.05, 0.5 + 0.1, 0, 0, 1.0 - 0.2])
    assert paid.sum() == pytest.approx(with_penalties(made, due).samples[0].reward)
    assert paid_turns(made, config)[0].tolist() == pytest.approx([0.55, 0.8])
    got = ADVANTAGES["gae"](with_penalties(made, due), config)[0]
    want = gae_by_hand([-0.05, 0.6, 0, 0.8], [0.1, 0.2, 0.3, 0.4, 0.0], 0.9, 0.8)
    assert got[one.loss_mask].tolist() == pytest.approx(want, abs=1e-12)


def test_samples_that_do_not_say_what_their_turns_earned_are_no_guess() -> None:
    made = with_critic([sample([5, 6], [0, 1], reward=1.0)], [[0, 0]], [0.0])
    for name in ("gae", "gae_turns", "turn_group_mean"):
        with pytest.raises(ValueError, match="0 rewards for 0 turns"):
            ADVANTAGES[name](made, AdvantageConfig())


# Turns compared with their siblings' turns -----------------------------------------------------------------


def test_a_turns_return_is_compared_with_its_siblings_turn_of_the_same_index() -> None:
    masks = {"a": [0, 1, 1, 0, 1], "b": [0, 1, 0, 0, 1], "c": [0, 1, 1]}
    paid: dict[str, tuple[float, ...]] = {"a": (1.0, 0.0), "b": (0.0, 2.0), "c": (0.5,)}
    made = Rows(tuple(row(range(len(m)), m, paid[e], episode=e) for e, m in masks.items()))
    got = ADVANTAGES["turn_group_mean"](made, AdvantageConfig(gamma=0.5))
    # Returns: a (1, 0), b (0 + 0.5·2, 2), c (0.5); means 2.5/3 and 1.
    first = [1 - 2.5 / 3, 1 - 2.5 / 3, 0.5 - 2.5 / 3]
    assert got[0].tolist() == pytest.approx([0, first[0], first[0], 0, -1.0])
    assert got[1].tolist() == pytest.approx([0, first[1], 0, 0, 1.0])
    assert got[2].tolist() == pytest.approx([0, first[2], first[2]])
    scaled = ADVANTAGES["turn_group_zscore"](made, AdvantageConfig(gamma=0.5, eps=1e-4))
    assert scaled[0][1] == pytest.approx(first[0] / (np.std([1, 1, 0.5], ddof=1) + 1e-4))
    assert scaled[1][4] == pytest.approx(1 / (np.sqrt(2) + 1e-4))


def test_turns_are_compared_where_the_model_was_shown_the_same() -> None:
    """a and b meet the shop (tokens 40, 41) in different turns, and the road (50) once each."""
    a = row([3, 5, 40, 41, 6, 50, 9], [0, 1, 0, 0, 1, 0, 1], (0.0, 1.0, 0.0), episode="a")
    b = row([3, 7, 50, 8, 40, 41, 9], [0, 1, 0, 1, 0, 0, 1], (0.0, 0.0, 4.0), episode="b")
    assert [len(set(turn_states(s))) for s in (a, b)] == [3, 3] and set(turn_states(a)) == set(turn_states(b))
    assert turn_starts(b).tolist() == [1, 3, 6]
    got = ADVANTAGES["turn_group_mean"](Rows((a, b)), AdvantageConfig(turn_key="state"))
    # Returns: a 1, 1 (shop), 0 (road); b 4, 4 (road), 4 (shop).
    assert [got[0][t] for t in (1, 4, 6)] == [-1.5, -1.5, -2.0]
    assert [got[1][t] for t in (1, 3, 6)] == [1.5, 2.0, 1.5]


def test_a_state_is_all_that_was_shown_since_the_last_turn() -> None:
    """Prompts that differ in their first token only, answers of a tool that differ in their first token only."""
    a, b = (row([first, 5, 9, first, 7, 9], [0, 0, 1, 0, 0, 1], (0.0, 0.0)) for first in (3, 4))
    assert not set(turn_states(a)) & set(turn_states(b))
    assert len(set(turn_states(a))) == 2


def test_an_episode_of_several_rows_counts_its_turns_through() -> None:
    one = [row([3, 9], [0, 1], (1.0,), episode="a"), row([4, 9], [0, 1], (0.0,), episode="a")]
    two = row([3, 9, 4, 9], [0, 1, 0, 1], (0.0, 3.0), episode="b")
    got = ADVANTAGES["turn_group_mean"](Rows((*one, two)), AdvantageConfig())
    assert [g.tolist() for g in got] == [[0, -1.0], [0, -1.5], [0, 1.0, 0, 1.5]]


def test_each_row_of_an_episode_has_the_values_of_its_own_turns() -> None:
    rows_ = [row([3, *[9] * n], [0, *[1] * n], (0.0,) * n) for n in (2, 1, 3)]
    rows_ = [replace(r, turn_ends=tuple(range(1, len(r.tokens)))) for r in rows_]
    got = split_turns(np.arange(6.0), Rows(tuple(rows_)), [0, 1, 2])
    assert [g.tolist() for g in got] == [[0, 1], [2], [3, 4, 5]]


def test_with_one_turn_and_no_discount_turns_are_episodes() -> None:
    rewards = [1.0, 0.0, 0.25]
    made = Rows(tuple(row([3, 9, 9], [0, 1, 1], (r,), episode=str(r)) for r in rewards))
    for turns, whole in (("turn_group_mean", "group_mean"), ("turn_group_zscore", "group_zscore")):
        for a, b in zip(
            ADVANTAGES[turns](made, AdvantageConfig()), ADVANTAGES[whole](made, AdvantageConfig()), strict=True
        ):
            np.testing.assert_allclose(a, b, atol=1e-12)
    lone = with_critic(list(made.samples), [np.zeros(3)] * 3, [0.0] * 3)
    for name in ("gae", "gae_turns"):  # a critic that knows nothing, λ = 1: the return itself
        got = ADVANTAGES[name](lone, AdvantageConfig(gae_lambda=1.0))
        assert [g.tolist() for g in got] == [[0, r, r] for r in rewards]


# Whitening and configs -------------------------------------------------------------------------------------


def test_whitening_sees_the_tokens_that_train_and_no_others() -> None:
    values = (np.array([9.0, 1.0, 3.0]), np.array([9.0, 100.0]))
    masks = [np.array([False, True, True]), np.array([False, False])]
    got = whiten(values, masks)
    assert [g.round(6).tolist() for g in got] == [[0, -1, 1], [0, 0]]


def refusal(**given: Any) -> str:
    with pytest.raises((ConfigError, ValueError)) as caught:
        UpdateConfig.model_validate(given)
    return str(caught.value)


def test_an_option_that_the_advantage_would_not_read_is_refused() -> None:
    assert "gamma" in refusal(gamma=0.9) and "gae_turns" in refusal(gamma=0.9)
    for key, value in (("gae_lambda", 0.5), ("critic", "separate"), ("vf_coef", 1.0), ("value_clip", 0.5)):
        assert key in refusal(**{key: value}) and key in refusal(advantage="turn_group_mean", **{key: value})
        assert getattr(UpdateConfig.model_validate({"advantage": "gae", key: value}), key) == value
    assert "turn_key" in refusal(turn_key="state", advantage="gae")
    assert UpdateConfig(turn_key="state", advantage="turn_group_mean", gamma=0.9).gamma == 0.9
    assert "minibatches" in refusal(loss="reinforce", minibatches=2)


def test_an_estimator_of_ones_own_may_read_any_option() -> None:
    @ADVANTAGES.register("test_discounted")
    def discounted(rows: Rows, config: AdvantageConfig) -> Any:
        return tuple(np.full(len(s.tokens), config.gamma) for s in rows.samples)

    assert UpdateConfig(advantage="test_discounted", gamma=0.5).gamma == 0.5
    assert returns_to_go([0.0, 1.0], gamma=0.5).tolist() == [0.5, 1.0]
