# SPDX-License-Identifier: Apache-2.0
"""Generalised advantages, returns, and credit by turns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from palestra.learn.gae import bootstrap_value, explained_variance, gae, returns_to_go
from palestra.learn.turns import spread_turns, turn_advantages

KNOWN: dict[str, tuple[dict[str, Any], list[float], list[float]]] = {
    # what is given, advantages, returns; each ends for good
    "ga-001": (
        {"rewards": [0, 0, 1.0], "values": [0.5, 0.6, 0.7], "mask": [1, 1, 1], "gamma": 1.0, "lam": 0.95},
        [0.46575, 0.385, 0.3],
        [0.96575, 0.985, 1.0],
    ),
    "ga-002": (
        {"rewards": [0, 0, 1.0], "values": [0.5, 0.6, 0.7], "mask": [1, 1, 1], "gamma": 0.9, "lam": 0.8},
        [0.21712, 0.246, 0.3],
        [0.71712, 0.846, 1.0],
    ),
    "ga-003": (
        {"rewards": [0, 0, 1.0], "values": [0.5, 0.6, 0.7], "mask": [1, 1, 1], "gamma": 1.0, "lam": 1.0},
        [0.5, 0.4, 0.3],
        [1.0, 1.0, 1.0],
    ),
    "ga-004": (
        {"rewards": [0, 2.0, 0, 0], "values": [0.5, 0.25, 40, -40], "mask": [1, 1, 0, 0], "gamma": 1.0, "lam": 0.95},
        [1.4125, 1.75, 0.0, 0.0],
        [1.9125, 2.0, 0.0, 0.0],
    ),
    "ga-006": (
        {"rewards": [0, 1.0, 0, 0], "values": [0.4, 0.5, 9, 9], "mask": [1, 1, 0, 0], "gamma": 0.9, "lam": 0.8},
        [0.41, 0.5, 0.0, 0.0],
        [0.81, 1.0, 0.0, 0.0],
    ),
}


@pytest.mark.parametrize("case", KNOWN)
def test_known_answers(case: str) -> None:
    given, advantages, returns = KNOWN[case]
    got = gae(**given)
    np.testing.assert_allclose(got[0], advantages, atol=1e-12)
    np.testing.assert_allclose(got[1], returns, atol=1e-12)


def by_definition(r: Any, v: Any, gamma: float, lam: float, bootstrap: float) -> list[float]:
    """A_t = Σ_l (γλ)^l δ_{t+l}, every sum written out."""
    v = [*v, bootstrap]
    deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
    return [sum((gamma * lam) ** k * deltas[t + k] for k in range(len(r) - t)) for t in range(len(r))]


@pytest.mark.parametrize(
    ("gamma", "lam", "bootstrap"), [(1.0, 0.95, 0.0), (0.97, 0.8, 0.0), (0.9, 0.95, 1.7), (1, 0, 2.0)]
)
def test_tool_tokens_have_no_place_in_time(gamma: float, lam: float, bootstrap: float) -> None:
    rng = np.random.default_rng(0)
    mask = rng.random(40) < 0.6
    rewards, values = np.where(mask, rng.normal(size=40), 0.0), rng.normal(size=40) * np.where(mask, 1, 1e6)
    got, returns = gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    alone, _ = gae(rewards[mask], values[mask], gamma=gamma, lam=lam, bootstrap=bootstrap)
    np.testing.assert_array_equal(got[mask], alone)
    np.testing.assert_allclose(alone, by_definition(rewards[mask], values[mask], gamma, lam, bootstrap), atol=1e-12)
    np.testing.assert_allclose(returns[mask], got[mask] + values[mask], atol=1e-12)
    assert not got[~mask].any() and not returns[~mask].any()


def test_with_lambda_1_an_advantage_is_the_discounted_return_less_the_value() -> None:
    rng = np.random.default_rng(1)
    rewards, values = rng.normal(size=12), rng.normal(size=12)
    got, returns = gae(rewards, values, gamma=0.9, lam=1.0)
    plain = [sum(0.9**k * rewards[t + k] for k in range(12 - t)) for t in range(12)]
    np.testing.assert_allclose(returns_to_go(rewards, gamma=0.9), plain, atol=1e-12)
    np.testing.assert_allclose(got, np.array(plain) - values, atol=1e-12)
    np.testing.assert_allclose(returns, plain, atol=1e-12)


def test_ga_008_what_ended_is_worth_nothing_more_and_what_was_cut_goes_on() -> None:
    rewards, values = [0, 1.0], [0.5, 0.6]
    both = bootstrap_value(0.8, terminated=True, truncated=True)
    assert gae(rewards, values, gamma=0.9, lam=0.95, bootstrap=both)[0].tolist() == pytest.approx([0.382, 0.4])
    cut = bootstrap_value(0.8, terminated=False, truncated=True)
    # δ_1 = 1 + 0.9 · 0.8 − 0.6 = 1.12, δ_0 = 0.9 · 0.6 − 0.5 = 0.04, A_0 = 0.04 + 0.855 · 1.12.
    assert gae(rewards, values, gamma=0.9, lam=0.95, bootstrap=cut)[0].tolist() == pytest.approx([0.9976, 1.12])
    assert bootstrap_value(0.8, terminated=True, truncated=False) == 0.0
    assert bootstrap_value(0.8, terminated=False, truncated=False) == 0.0


def test_ga_011_episodes_are_computed_one_by_one() -> None:
    rows = [([0, 1.0], [0.2, 0.3], [0.8, 0.7]), ([0, 0.0], [0.1, 0.4], [-0.1, -0.4])]
    for rewards, values, want in rows:
        assert gae(rewards, values, gamma=1.0, lam=1.0)[0].tolist() == pytest.approx(want, abs=1e-12)


def test_a_reward_where_the_model_wrote_nothing_is_not_lost_silently() -> None:
    for call in (lambda: gae([0, 1.0], [0, 0], [1, 0]), lambda: returns_to_go([0, 1.0], [1, 0])):
        with pytest.raises(ValueError, match="did not write"):
            call()


def test_an_episode_without_own_tokens_has_no_advantage() -> None:
    assert [x.tolist() for x in gae([0, 0], [3, 4], [0, 0], bootstrap=9.0)] == [[0, 0], [0, 0]]


def test_explained_variance_is_1_for_a_perfect_critic_and_0_for_a_constant() -> None:
    returns = [0.0, 1.0, 3.0]
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance([7.0] * 3, returns) == pytest.approx(0.0)
    assert explained_variance([3.0, 1.0, 0.0], returns) == pytest.approx(1 - np.var([-3, 0, 3]) / np.var(returns))
    assert explained_variance([1.0, 2.0], [5.0, 5.0]) is None and explained_variance([], []) is None


# Turns -----------------------------------------------------------------------------------------------------


def test_a_turn_returns_what_it_and_the_later_ones_were_paid() -> None:
    # The repository analysis: +0.1, +0.1, +0.2, +0.6.
    assert returns_to_go([0.1, 0.1, 0.2, 0.6]).tolist() == pytest.approx([1.0, 0.9, 0.8, 0.6])
    assert returns_to_go([0.1, 0.1, 0.2, 0.6], gamma=0.5).tolist() == pytest.approx([0.275, 0.35, 0.5, 0.6])
    # Generalised advantages over turns are the same function on turns.
    assert gae([0.0, 1.0], [0.5, 0.5], gamma=0.9, lam=1.0)[0].tolist() == pytest.approx([0.4, 0.5])


def test_turns_are_compared_with_the_siblings_turn_of_the_same_index() -> None:
    got = turn_advantages([[1.0, 0.0], [0.0, 0.0], [0.5, 0.6, 9.0]])
    assert [a.tolist() for a in got] == [
        [0.5, pytest.approx(-0.2)],
        [-0.5, pytest.approx(-0.2)],
        [0.0, pytest.approx(0.4), 0.0],
    ]
    scaled = turn_advantages([[1.0], [0.5], [0.0], [0.0], [0.25]], scale="std", eps=1e-4)
    assert [float(a[0]) for a in scaled] == pytest.approx([1.553426, 0.358483, -0.83646, -0.83646, -0.238989], abs=5e-7)


def test_turns_are_compared_where_the_model_was_in_the_same_state() -> None:
    returns, states = [[1.0, 0.0], [0.0, 0.4], [0.6]], [["start", "shop"], ["start", "road"], ["shop"]]
    got = turn_advantages(returns, states)
    assert [a.tolist() for a in got] == [[0.5, pytest.approx(-0.3)], [-0.5, 0.0], [pytest.approx(0.3)]]
    with pytest.raises(ValueError):
        turn_advantages(returns, [["start"], ["start", "road"], ["shop"]])


def test_equal_turns_and_lonely_turns_have_exactly_no_advantage() -> None:
    assert [a.tolist() for a in turn_advantages([[0.1 + 0.2, 5.0], [0.3]])] == [[0.0, 0.0], [0.0]]
    assert turn_advantages([]) == []


def test_a_turns_value_is_on_the_tokens_the_model_wrote_in_it() -> None:
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 0], np.bool_)
    assert spread_turns([2.0, -1.0], mask, [3, 6]).tolist() == [0, 0, 2, 2, 0, 0, -1, 0]
    assert spread_turns([], np.zeros(2, np.bool_), []).tolist() == [0, 0]
    with pytest.raises(ValueError, match="2 values for 1 turns"):
        spread_turns([2.0, -1.0], mask, [3])
    with pytest.raises(ValueError, match="after its last turn"):
        spread_turns([2.0], mask, [3])
