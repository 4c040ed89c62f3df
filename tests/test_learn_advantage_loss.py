# SPDX-License-Identifier: Apache-2.0
"""Advantages, losses and KL estimators against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from small_models import make_model, sample
from torch import Tensor, nn

from palestra.engine.base import SamplingParams
from palestra.engine.sampling import sample as draw
from palestra.errors import ConfigError
from palestra.learn.advantage import ADVANTAGES, AdvantageConfig, zero_variance
from palestra.learn.batch import Rows, pack, token_weights
from palestra.learn.kl import KL_ESTIMATORS, MAX_EXPONENT
from palestra.learn.loss import LOSSES, LossConfig, LossInputs, LossOutputs, check_clip, cross_entropy
from palestra.learn.policy import Policy

REWARDS = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=9)
CENTRED = ("group_zscore", "group_mean", "group_mean_batch_std", "rloo", "reinforce_baseline", "reinforce_pp",
           "reinforce_pp_baseline")  # fmt: skip
COMPARING = (*CENTRED, "rloo_zscore")
"""``reinforce`` compares with nothing, and a deviation of the others, different for each, moves the sum off 0."""


def grouped(*groups: Sequence[float]) -> Rows:
    """One row with one trained token per reward."""
    return Rows(
        tuple(
            sample([5, 6], [0, 1], group=f"g{g}", episode=f"g{g}e{i}", reward=float(r))
            for g, rewards in enumerate(groups)
            for i, r in enumerate(rewards)
        )
    )


def advantages(name: str, *groups: Sequence[float], eps: float = 1e-4) -> list[float]:
    values = ADVANTAGES[name](grouped(*groups), AdvantageConfig(eps=eps))
    assert all(v[0] == 0 for v in values), "the prompt's token has none"
    return [float(v[1]) for v in values]


def test_ad_003_partial_credit_is_scaled_by_the_sample_deviation() -> None:
    got = advantages("group_zscore", [1.0, 0.5, 0.0, 0.0, 0.25])
    assert got == pytest.approx([1.553426, 0.358483, -0.83646, -0.83646, -0.238989], abs=5e-7)
    assert sum(got) == pytest.approx(0, abs=1e-12)


def test_ad_002_the_deviation_divides_by_n_minus_one() -> None:
    # Squares 4 · 0.25 over 3: deviation 0.57735; over 4 it would be 0.5 and the advantage 0.9998.
    got = advantages("group_zscore", [1, 0, 0, 1])
    assert got == pytest.approx([0.5 / (math.sqrt(1 / 3) + 1e-4) * s for s in (1, -1, -1, 1)], rel=1e-12)
    assert pytest.approx(0.9998, abs=1e-6) == 0.5 / (0.5 + 1e-4) and abs(got[0] - 0.9998) > 0.1


def test_group_mean_subtracts_and_does_not_divide() -> None:
    assert advantages("group_mean", [1.0, 1.0, 0.0, 0.8]) == pytest.approx([0.3, 0.3, -0.7, 0.1], abs=1e-12)


def test_ad_004_equal_rewards_give_exactly_zero_whatever_precision_they_came_in() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        rewards = torch.full((8,), 0.35, dtype=dtype).tolist()
        for name in COMPARING:
            assert advantages(name, rewards, eps=1e-6) == [0.0] * 8
        assert zero_variance(grouped(rewards)) == 1


def test_ad_005_rewards_that_differ_by_rounding_are_the_same_reward() -> None:
    for name in COMPARING:
        assert advantages(name, [0.1 + 0.2, 0.3], eps=0.0) == [0.0, 0.0]


def test_ad_008_a_group_of_one_has_nothing_to_compare_with() -> None:
    for name in COMPARING:
        assert advantages(name, [1.0]) == [0.0]
    assert set(COMPARING) | {"reinforce"} <= set(ADVANTAGES)


def test_ad_010_groups_of_unequal_size_are_each_their_own() -> None:
    assert advantages("group_mean", [1.0, 0.0, 0.5], [1.0, 0.0]) == [0.5, -0.5, 0.0, 0.5, -0.5]


def test_ad_015_groups_without_signal_are_counted() -> None:
    assert zero_variance(grouped([1, 1], [1, 0], [0, 0], [1.0, 1.000000001])) == 3


def test_an_episode_of_several_rows_enters_its_groups_mean_once() -> None:
    made = grouped([1.0, 0.0])
    made = Rows((*made.samples, sample([5, 6, 7], [0, 1, 1], group="g0", episode="g0e0", reward=1.0)))
    got = ADVANTAGES["group_mean"](made, AdvantageConfig())
    assert [v.tolist() for v in got] == [[0, 0.5], [0, -0.5], [0, 0.5, 0.5]]


@given(REWARDS)
def test_advantages_of_a_group_sum_to_zero(rewards: list[float]) -> None:
    for name in CENTRED:
        assert sum(advantages(name, rewards)) == pytest.approx(0, abs=1e-6)


@given(REWARDS, st.randoms())
def test_the_order_of_a_group_does_not_matter(rewards: list[float], random: Any) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)
    for name in (*COMPARING, "reinforce"):
        straight, shuffled = advantages(name, rewards), advantages(name, [rewards[i] for i in order])
        assert shuffled == pytest.approx([straight[i] for i in order], rel=1e-6, abs=1e-9)


@given(REWARDS, st.floats(0.5, 100), st.floats(-50, 50))
def test_a_z_score_does_not_know_the_rewards_unit_or_zero(rewards: list[float], scale: float, shift: float) -> None:
    assume(np.ptp(rewards) > 1e-3)
    other = [scale * r + shift for r in rewards]
    want = advantages("group_zscore", rewards, eps=0.0)
    assert advantages("group_zscore", other, eps=0.0) == pytest.approx(want, rel=1e-6, abs=1e-6)


# Losses ----------------------------------------------------------------------------------------------------


def clip(ratio: Sequence[float], advantage: Sequence[float], weights: Sequence[float]) -> tuple[LossOutputs, Tensor]:
    new = torch.tensor(ratio, dtype=torch.float64).log().requires_grad_()
    a, w = torch.tensor(advantage, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)
    inputs = LossInputs(new, torch.zeros_like(new), a, w, torch.zeros(len(ratio), dtype=torch.long))
    return LOSSES["clip"](inputs, LossConfig()), new


def test_ls_007_the_pessimistic_minimum_clips_two_of_four_cases() -> None:
    ratio, advantage, want = (1.5, 1.5, 0.5, 0.5), (1, -1, 1, -1), (-1.2, 1.5, -0.5, 0.8)
    for i in range(4):
        out, new = clip(ratio, advantage, [float(i == j) for j in range(4)])
        assert float(out.loss.detach()) == pytest.approx(want[i], abs=1e-12)
        out.loss.backward()  # type: ignore[no-untyped-call]
        assert new.grad is not None
        assert bool(new.grad[i]) == (i in (1, 2)), "a clipped token pulls no more"
    assert clip(ratio, advantage, [1.0] * 4)[0].metrics["train/clip_fraction"] == (2.0, 4.0)


def test_ls_015_a_loss_of_zero_on_the_first_step_still_has_a_gradient() -> None:
    out, new = clip([1.0] * 6, [1.0] * 3 + [-1.0] * 3, [1 / 6] * 6)
    assert float(out.loss.detach()) == 0.0
    out.loss.backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-1 / 6] * 3 + [1 / 6] * 3)


def test_ls_023_metrics_count_what_the_model_wrote_and_no_tool_token() -> None:
    samples = (
        sample([4, 5, 6, 7], [0, 1, 1, 0], episode="a"),
        sample([4, 5, 6, 7], [0, 1, 1, 0], episode="b"),
    )
    old = (-np.log([1.0, 1.5, 1.0, 9.0]), -np.log([1.0, 1.0, 1.0, 9.0]))
    ones = tuple(np.ones(4) for _ in samples)
    batch = pack(Rows(samples, advantages=ones, old=old), ones, [0, 1], dtype=torch.float64)
    assert batch.old is not None and batch.advantages is not None
    out = LOSSES["clip"](
        LossInputs(torch.zeros(4, dtype=torch.float64), batch.old, batch.advantages, batch.weights, batch.sequence),
        LossConfig(),
    )
    total, count = out.metrics["train/clip_fraction"]
    assert total / count == 0.25


def test_cross_entropy_is_the_weighted_negative_log_likelihood() -> None:
    assert float(cross_entropy(torch.tensor([-1.0, -3.0]), torch.tensor([0.25, 0.5]))) == 1.75


@pytest.mark.parametrize("bad", [{"clip_low": 0.0}, {"clip_low": 1.5}, {"clip_high": 0.0}])
def test_a_clip_range_that_is_never_or_always_active_is_refused(bad: dict[str, float]) -> None:
    check_clip(LossConfig())
    with pytest.raises(ConfigError, match="clip_low"):
        check_clip(LossConfig(**bad))


# KL --------------------------------------------------------------------------------------------------------


def kl(name: str, logprob: float, ref: float) -> tuple[float, float]:
    """Value and derivative with respect to log π."""
    new = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    value = KL_ESTIMATORS[name](new, torch.tensor([ref], dtype=torch.float64))
    value.sum().backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    return float(value.detach()), float(new.grad)


def test_kl_002_three_estimators_of_one_token() -> None:
    assert kl("k1", -2.0, -0.5) == (-1.5, 1.0)
    assert kl("k2", -2.0, -0.5) == (1.125, -1.5)
    value, slope = kl("k3", -2.0, -0.5)
    assert (value, slope) == (pytest.approx(1.981689, abs=1e-6), pytest.approx(1 - math.exp(1.5)))


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_004_a_token_that_the_reference_bans_counts_nothing(name: str) -> None:
    assert kl(name, -1.0, -math.inf) == (0.0, 0.0)


def test_a_token_that_the_policy_has_given_up_keeps_the_kl_term_finite() -> None:
    value, slope = kl("k3", -1000.0, -1.0)
    assert value == pytest.approx(math.exp(MAX_EXPONENT) - 999 - 1) and math.isfinite(slope)


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_k3_is_never_negative_and_zero_only_for_equal_policies(logprob: float, ref: float) -> None:
    value, _ = kl("k3", logprob, ref)
    assert value >= -1e-12
    assert (value > 1e-12) == (abs(logprob - ref) > 2e-6) or abs(logprob - ref) < 1e-5


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_equal_policies_have_no_divergence(name: str) -> None:
    assert kl(name, -1.7, -1.7)[0] == 0.0


def test_kl_006_a_row_without_trained_tokens_takes_no_part_in_the_mean() -> None:
    samples = (sample([4, 5, 6], [0, 1, 1], episode="a"), sample([4, 5, 6], [0, 0, 0], episode="b"))
    weights = token_weights(samples, "sequence_mean")
    per_token = (np.array([0.0, 0.2, 0.4]), np.array([0.0, 7.0, 7.0]))
    by_row = [float((w * k).sum()) for w, k in zip(weights, per_token, strict=True)]
    assert by_row == [pytest.approx(0.3), 0.0]


# Scores of the model ---------------------------------------------------------------------------------------


class Fixed(nn.Module):
    """A model whose logits are always the same."""

    def __init__(self, logits: Sequence[float]) -> None:
        super().__init__()
        self.row = torch.tensor(logits)

    def forward(self, logits_to_keep: Tensor, **_: Any) -> Any:
        return type("Out", (), {"logits": self.row.expand(1, len(logits_to_keep), -1)})


def scored(logits: Sequence[float], token: int, temperature: float = 1.0) -> tuple[float, float]:
    """(log-prob of the token, entropy) as the trainer computes them."""
    policy = Policy(make_model())
    policy.model = Fixed(logits)
    row = sample([0, token], [0, 1])
    batch = pack(Rows((row,)), [np.zeros(2)], [0])
    logprob, entropy = policy.logprobs(batch, temperature=temperature, entropy="value")
    assert entropy is not None
    return float(logprob), float(entropy)


def engine_scored(logits: Sequence[float], noise: float, **params: Any) -> tuple[int, float]:
    tokens, logprobs, _ = draw(torch.tensor([logits]), [SamplingParams(1, **params)], np.array([noise], np.float32))
    return tokens[0], logprobs[0]


def test_nm_003_large_logits_are_no_trouble() -> None:
    assert scored([1000.0, 999.0, -1000.0], 1)[0] == pytest.approx(-1.313262, abs=1e-6)
    assert engine_scored([1000.0, 999.0, -1000.0], 0.9) == (1, pytest.approx(-1.313262, abs=1e-6))


def test_nm_004_nm_005_entropy_is_in_nats_and_what_cannot_happen_adds_nothing() -> None:
    assert scored(np.log([0.5, 0.25, 0.25]).tolist(), 0)[1] == pytest.approx(1.039721, abs=1e-6)
    assert scored([0.0, -math.inf], 0) == (0.0, 0.0)


def test_ls_014_trainer_and_engine_score_at_the_sampling_temperature() -> None:
    for temperature, want in ((1.0, -0.407606), (0.5, -0.142932)):
        assert scored([2.0, 1.0, 0.0], 0, temperature)[0] == pytest.approx(want, abs=1e-6)
        assert engine_scored([2.0, 1.0, 0.0], 0.0, temperature=temperature) == (0, pytest.approx(want, abs=1e-6))


def test_ls_013_a_truncated_sampler_still_reports_the_full_distribution() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    params = SamplingParams(1, top_p=0.8)
    tokens, logprobs, kept = draw(logits, [params], np.array([0.0], np.float32))
    assert kept is not None
    assert (tokens, logprobs) == ([0], [pytest.approx(-0.693147, abs=1e-6)])
    assert kept == [pytest.approx(math.log(0.8), abs=1e-6)]
    assert logprobs[0] - kept[0] == pytest.approx(-0.470004, abs=1e-6), "what the sampler itself drew from"
