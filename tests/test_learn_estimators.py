# SPDX-License-Identifier: Apache-2.0
"""Every advantage estimator against a second, plain one, and what KL penalties and long answers do to rewards."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from small_models import sample

from palestra.learn.advantage import ADVANTAGES, AdvantageConfig, same, score, score_parts, whiten
from palestra.learn.batch import Rows, Sample
from palestra.learn.gae import returns_to_go
from palestra.learn.shaping import kl_penalties, paid_before, token_rewards, with_penalties

EPS = 1e-4


def step() -> Rows:
    """Groups of 4, 3 and 2 and one without any signal; one episode of two rows; prompts and tools in between."""
    rewards = {"A": [1.0, 0.0, 0.25, 1.0], "B": [0.5, -1.0, 2.0], "C": [0.3, 0.1], "D": [0.7, 0.7, 0.7]}
    masks = ([0, 1, 1], [0, 0, 1, 1, 0, 1], [0, 1], [0, 1, 0, 0, 1, 1, 0])
    rows: list[Sample] = []
    for group, paid in rewards.items():
        for i, reward in enumerate(paid):
            mask = masks[(i + len(rows)) % 4]
            rows.append(sample(range(3, 3 + len(mask)), mask, group=group, episode=f"{group}{i}", reward=reward))
    rows.insert(3, replace(rows[2], tokens=np.arange(4, dtype=np.int32), loss_mask=np.array([False, True, False, True]),
                           logprobs=np.zeros(4, np.float32), versions=np.zeros(4, np.int32)))  # fmt: skip
    return Rows(tuple(rows))


def of_group(rows: Rows, group: str) -> dict[str, float]:
    return {s.episode: s.reward for s in rows.samples if s.group == group}


def plain_zscore(rows: Rows, s: Sample) -> float:
    r = list(of_group(rows, s.group).values())
    return (s.reward - statistics.mean(r)) / (statistics.stdev(r) + EPS)


def plain_group_mean(rows: Rows, s: Sample) -> float:
    return s.reward - statistics.mean(of_group(rows, s.group).values())


def plain_rloo(rows: Rows, s: Sample) -> float:
    return s.reward - statistics.mean(r for e, r in of_group(rows, s.group).items() if e != s.episode)


def plain_rloo_zscore(rows: Rows, s: Sample) -> float:
    others = [r for e, r in of_group(rows, s.group).items() if e != s.episode]
    deviation = statistics.stdev(others) + EPS if len(set(others)) > 1 else 1.0
    return (s.reward - statistics.mean(others)) / deviation


def everyone(rows: Rows) -> list[float]:
    return list({s.episode: s.reward for s in rows.samples}.values())


def plain_batch_std(rows: Rows, s: Sample) -> float:
    return plain_group_mean(rows, s) / (statistics.stdev(everyone(rows)) + EPS)


def plain_whitened(rows: Rows, s: Sample, of: Callable[[Rows, Sample], float]) -> float:
    tokens = [of(rows, other) for other in rows.samples for own in other.loss_mask if own]
    return (of(rows, s) - statistics.fmean(tokens)) / math.sqrt(statistics.pvariance(tokens) + 1e-8)


PLAIN: dict[str, Callable[[Rows, Sample], float]] = {
    "group_zscore": plain_zscore,
    "group_mean": plain_group_mean,
    "group_mean_batch_std": plain_batch_std,
    "rloo": plain_rloo,
    "rloo_zscore": plain_rloo_zscore,
    "reinforce": lambda rows, s: s.reward,
    "reinforce_baseline": lambda rows, s: s.reward - statistics.mean(everyone(rows)),
    "reinforce_pp": lambda rows, s: plain_whitened(rows, s, lambda _, other: other.reward),
    "reinforce_pp_baseline": lambda rows, s: plain_whitened(rows, s, plain_group_mean),
}


@pytest.mark.parametrize("name", PLAIN)
def test_an_estimator_equals_its_formula_written_out(name: str) -> None:
    rows = step()
    got = ADVANTAGES[name](rows, AdvantageConfig(eps=EPS))
    for s, advantage in zip(rows.samples, got, strict=True):
        want = np.where(s.loss_mask, PLAIN[name](rows, s), 0.0)
        np.testing.assert_allclose(advantage, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PLAIN)
def test_the_order_of_samples_does_not_matter(name: str) -> None:
    rows = step()
    order = np.random.default_rng(0).permutation(len(rows))
    straight = ADVANTAGES[name](rows, AdvantageConfig())
    mixed = ADVANTAGES[name](Rows(tuple(rows.samples[i] for i in order)), AdvantageConfig())
    for at, i in enumerate(order):
        np.testing.assert_allclose(mixed[at], straight[i], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PLAIN)
def test_tokens_that_the_model_did_not_write_do_not_matter(name: str) -> None:
    rows = step()
    padded = Rows(
        tuple(
            sample([9, *s.tokens, 9, 9], [0, *s.loss_mask, 0, 0], group=s.group, episode=s.episode, reward=s.reward)
            for s in rows.samples
        )
    )
    for a, b in zip(
        ADVANTAGES[name](rows, AdvantageConfig()), ADVANTAGES[name](padded, AdvantageConfig()), strict=True
    ):
        np.testing.assert_array_equal(b, [0, *a, 0, 0])


def test_every_estimator_here_has_its_formula_written_out() -> None:
    assert {n for n in ADVANTAGES if ADVANTAGES[n].__module__ == "palestra.learn.advantage"} == set(PLAIN)


# Numbers worked out by hand --------------------------------------------------------------------------------


def test_ad_002_the_population_deviation_is_there_when_asked_for() -> None:
    got = score([1, 0, 0, 1], "mean", "std", eps=1e-4, ddof=0)
    assert got.tolist() == pytest.approx([0.9998, -0.9998, -0.9998, 0.9998], abs=5e-5)


def test_ad_006_a_deviation_that_is_only_rounding_does_not_divide() -> None:
    for eps in (0.0, 1e-4):
        got = score(np.float32([0.1] + [0.94] * 7).tolist(), "leave_one_out", "leave_one_out_std", eps=eps)
        assert got[0] == pytest.approx(-0.84, abs=1e-6), "the others are all the same: centred, not scaled"
        assert np.abs(got).max() < 10
    # The other seven: baseline (0.1 + 6 · 0.94) / 7 = 0.82, deviation of one 0.1 among seven 0.84/√7.
    assert score([0.1] + [0.94] * 7, "leave_one_out", "leave_one_out_std")[1] == pytest.approx(
        0.12 * math.sqrt(7) / 0.84
    )


def test_ad_007_leave_one_out() -> None:
    assert score([1, 0, 0, 1], "leave_one_out").tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3], rel=1e-15)


def test_ad_011_one_deviation_for_all_the_step_still_with_group_means() -> None:
    rows = Rows(
        tuple(
            sample([5, 6], [0, 1], group=g, episode=g + str(i), reward=r)
            for g, rewards in (("a", [1.0, 0.0]), ("b", [1.0, 0.5]))
            for i, r in enumerate(rewards)
        )
    )
    got = [a[1] for a in ADVANTAGES["group_mean_batch_std"](rows, AdvantageConfig(eps=1e-4))]
    assert got == pytest.approx([1.044248, -1.044248, 0.522124, -0.522124], abs=5e-7)


def test_ad_012_each_part_by_itself_and_an_abstention_counts_nothing() -> None:
    parts = {"f1": [1.0, 0.0, 1.0, 0.0], "f2": [0.2, 0.2, 0.4, None]}
    assert score_parts(parts, eps=1e-4).tolist() == pytest.approx([0.289025, -1.442726, 2.019577, -0.865875], abs=5e-7)
    assert score_parts({"never": [None, None]}).tolist() == [0.0, 0.0]
    assert score_parts({}).tolist() == []


def test_ad_013_whitening_leaves_padding_out_of_mean_and_variance() -> None:
    values, masks = (np.array([1.0, 2.0, 0.0]), np.array([3.0, 0.0, 0.0])), ([1, 1, 0], [1, 0, 0])
    got = whiten(values, [np.array(m, np.bool_) for m in masks])
    np.testing.assert_allclose(got, [[-1.224745, 0, 0], [1.224745, 0, 0]], atol=5e-7)
    kept = whiten(values, [np.array(m, np.bool_) for m in masks], centre=False)
    np.testing.assert_allclose(kept, [[2 - 1.224745, 2, 0], [2 + 1.224745, 0, 0]], atol=5e-7)


def test_whitening_what_is_all_the_same_gives_exactly_zero() -> None:
    masks = [np.array([True, False]), np.array([True, True])]
    values = (np.array([0.35, 9.0]), np.array([0.35 + 1e-9, 0.35]))
    assert [w.tolist() for w in whiten(values, masks)] == [[0, 0], [0, 0]]
    assert whiten(values, masks, centre=False)[0].tolist() == pytest.approx([0.35, 0.0])
    assert whiten((), ()) == ()


def test_nm_002_equal_values_have_no_deviation_in_float32() -> None:
    assert same(np.full(7, np.float32(0.94)).tolist())
    assert score(np.full(7, np.float32(0.94)).tolist(), "mean", "std").tolist() == [0.0] * 7


# KL in the reward ------------------------------------------------------------------------------------------


def with_logprobs(rows: Rows, seed: int = 0) -> Rows:
    rng = np.random.default_rng(seed)
    old = tuple(-rng.random(len(s.tokens)) for s in rows.samples)
    return rows.with_(old=old, ref=tuple(o + rng.normal(0, 0.3, len(o)) for o in old))


def test_ga_010_the_penalty_of_tool_tokens_does_not_reach_the_return() -> None:
    kl, mask = np.array([0.1, 0.2, 5.0, 0.3]), np.array([True, True, False, True])
    paid = token_rewards(mask, [3], [1.0], 0.1 * kl)
    assert paid.tolist() == pytest.approx([-0.01, -0.02, 0.0, 0.97], abs=1e-12)
    assert returns_to_go(paid, mask).tolist() == pytest.approx([0.94, 0.95, 0.0, 0.97], abs=1e-12)

    # The same through a step's rows: the shaped reward plus what was paid before is that return.
    rows = Rows((sample([5, 6, 7, 8], mask.tolist(), reward=1.0),), old=(kl,), ref=(np.zeros(4),))
    penalties = kl_penalties(rows, "k1", 0.1)
    assert penalties[0].tolist() == pytest.approx([0.01, 0.02, 0.0, 0.03])
    assert with_penalties(rows, penalties).samples[0].reward == pytest.approx(0.94)
    got = ADVANTAGES["reinforce"](with_penalties(rows, penalties), AdvantageConfig(kl="k1", kl_coef=0.1))
    assert got[0].tolist() == pytest.approx([0.94, 0.95, 0.0, 0.97], abs=1e-12)


def test_ga_006_an_episode_is_paid_on_the_last_token_that_the_model_wrote() -> None:
    mask = np.array([True, True, False, False])
    assert token_rewards(mask, [1], [1.0]).tolist() == [0.0, 1.0, 0.0, 0.0]
    assert token_rewards(mask, [0, 1], [0.25, 1.0]).tolist() == [0.25, 1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="did not write"):
        token_rewards(mask, [1, 3], [0.25, 1.0])
    with pytest.raises(ValueError, match="did not write"):
        token_rewards(mask, [3], [1.0])
    with pytest.raises(ValueError):
        token_rewards(mask, [1], [1.0, 2.0])


def test_a_penalty_is_summed_over_an_episode_and_all_its_rows() -> None:
    rows = Rows(
        (sample([5, 6, 7], [0, 1, 1], episode="a", reward=1.0), sample([5, 6], [0, 1], episode="a", reward=1.0),
         sample([5, 6], [0, 1], episode="b", reward=1.0)),
        old=(np.array([9.0, 0.1, 0.2]), np.array([9.0, 0.4]), np.array([9.0, 0.1])),
        ref=(np.zeros(3), np.zeros(2), np.zeros(2)),
    )  # fmt: skip
    penalties = kl_penalties(rows, "k1", 1.0)
    shaped = with_penalties(rows, penalties)
    assert [s.reward for s in shaped.samples] == pytest.approx([0.3, 0.3, 0.9])
    assert np.concatenate(paid_before(rows, penalties)).tolist() == pytest.approx([0, 0, 0.1, 0.3, 0.3, 0, 0])
    group = ADVANTAGES["group_mean"](shaped, AdvantageConfig())
    assert [a[1] for a in group] == pytest.approx([-0.3, -0.3, 0.3])
    to_go = ADVANTAGES["reinforce"](shaped, AdvantageConfig(kl="k1", kl_coef=1.0))
    assert np.concatenate(to_go).tolist() == pytest.approx([0, 0.3, 0.4, 0, 0.6, 0, 0.9])


def test_reinforce_pp_whitens_the_returns_from_each_token_on() -> None:
    rows = with_logprobs(step())
    config = AdvantageConfig(kl="k1", kl_coef=0.1)
    got = ADVANTAGES["reinforce_pp"](with_penalties(rows, kl_penalties(rows, "k1", 0.1)), config)

    # Episode by episode: its rows joined, its reward on its last token, summed from the back.
    by_episode: dict[str, list[int]] = {}
    for i, s in enumerate(rows.samples):
        by_episode.setdefault(s.episode, []).append(i)
    assert rows.old is not None and rows.ref is not None
    returns: list[list[float]] = [[] for _ in rows.samples]
    for indices in by_episode.values():
        running = rows.samples[indices[0]].reward
        for i in reversed(indices):
            for t in reversed(np.flatnonzero(rows.samples[i].loss_mask)):
                running -= 0.1 * (rows.old[i][t] - rows.ref[i][t])
                returns[i].insert(0, running)
    flat = [x for row in returns for x in row]
    mean, deviation = statistics.fmean(flat), math.sqrt(statistics.pvariance(flat) + 1e-8)
    for s, advantage, row in zip(rows.samples, got, returns, strict=True):
        np.testing.assert_allclose(
            advantage[s.loss_mask], [(x - mean) / deviation for x in row], rtol=1e-12, atol=1e-12
        )
        assert not advantage[~s.loss_mask].any()


def test_kl_004_a_token_that_the_reference_bans_costs_nothing() -> None:
    rows = Rows((sample([5, 6, 7], [0, 1, 1]),), old=(np.array([0, -1.0, -1.0]),), ref=(np.array([0, -np.inf, -1.5]),))
    for kl in ("k1", "k2", "k3"):
        penalty = kl_penalties(rows, kl, 1.0)[0]
        assert penalty[1] == 0.0 and np.isfinite(penalty).all() and penalty[2] > 0
