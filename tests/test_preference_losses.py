# SPDX-License-Identifier: Apache-2.0
"""Preference losses: numbers worked out by hand, gradients against their closed forms, and what no input may break."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from palestra.config import Config
from palestra.errors import ConfigError
from palestra.learn.preference import PREFERENCE_LOSSES, LabelScores, Outcome, PairScores, pairwise

PAIR_LOSSES = sorted(name for name in PREFERENCE_LOSSES if PREFERENCE_LOSSES[name].paired)
LOG_PROB = st.floats(-300, -0.01)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pairs(
    chosen: float = -10.0,
    rejected: float = -12.0,
    ref_chosen: float = -11.0,
    ref_rejected: float = -11.5,
    lengths: tuple[int, int] = (5, 4),
) -> PairScores:
    """One pair; the default is that of the known answers ls-016 and ls-017."""
    return PairScores(
        tensor(chosen),
        tensor(rejected),
        tensor(lengths[0]),
        tensor(lengths[1]),
        tensor(ref_chosen),
        tensor(ref_rejected),
    )


def options(name: str, **given: Any) -> Config:
    return PREFERENCE_LOSSES[name].config(**given)


def outcome(name: str, scores: Any, **given: Any) -> Outcome:
    return PREFERENCE_LOSSES[name].function(scores, options(name, **given))


def value(name: str, scores: Any, **given: Any) -> float:
    return float(outcome(name, scores, **given).loss)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# DPO and cDPO ----------------------------------------------------------------------------------------------


def test_ls_016_dpo_is_minus_log_sigmoid_of_beta_times_the_difference_of_summed_log_ratios() -> None:
    found = outcome("dpo", pairs(), beta=0.1)  # (−10+11) − (−12+11.5) = 1.5
    assert float(found.loss) == pytest.approx(0.620957, abs=5e-7)
    assert float(found.gap) == pytest.approx(0.15)
    assert (float(found.chosen), float(found.rejected)) == (pytest.approx(0.1), pytest.approx(-0.05))


def test_ls_017_smoothed_dpo() -> None:
    assert value("dpo", pairs(), beta=0.1, label_smoothing=0.1) == pytest.approx(0.635957, abs=5e-7)


def test_dpo_is_log_2_where_policy_and_reference_agree_whatever_the_pair() -> None:
    same = pairs(chosen=-3.0, rejected=-40.0, ref_chosen=-3.0, ref_rejected=-40.0)
    assert value("dpo", same) == math.log(2) and value("dpo", same, label_smoothing=0.3) == pytest.approx(math.log(2))
    assert float(outcome("dpo", same).gap) == 0.0, "a tie, neither right nor wrong"


@given(LOG_PROB, LOG_PROB, LOG_PROB, LOG_PROB, st.floats(0.01, 5), st.floats(0, 0.49))
def test_dpo_is_never_negative(a: float, b: float, c: float, d: float, beta: float, smoothing: float) -> None:
    assert value("dpo", pairs(a, b, c, d), beta=beta, label_smoothing=smoothing) >= 0


def test_dpo_stays_finite_and_exact_where_sigmoid_underflows() -> None:
    assert value("dpo", pairs(chosen=-9000.0, ref_chosen=-10.0, rejected=-5.0, ref_rejected=-5.0), beta=1.0) == 8990.0


def test_dpo_gradient_is_beta_times_sigma_of_minus_the_gap_and_opposite_on_the_two_sides() -> None:
    """∂L/∂log π(chosen) = −β·σ(−β·Δ) (Rafailov et al. 2023, section 4)."""
    scores = pairs()
    scores.chosen.requires_grad_(), scores.rejected.requires_grad_()
    outcome("dpo", scores, beta=0.3).loss.sum().backward()
    expected = 0.3 * sigmoid(-0.3 * 1.5)
    assert float(scores.chosen.grad) == pytest.approx(-expected, rel=1e-12)
    assert float(scores.rejected.grad) == pytest.approx(expected, rel=1e-12)


def test_smoothing_stops_pulling_where_the_model_is_as_sure_as_the_labels() -> None:
    """With ε = 0.2 the optimum is σ(β·Δ) = 0.8; beyond it the gradient turns round."""
    slopes = []
    for delta in (math.log(4) - 0.5, math.log(4), math.log(4) + 0.5):
        scores = pairs(chosen=-10.0 + delta, rejected=-5.0, ref_chosen=-10.0, ref_rejected=-5.0)
        scores.chosen.requires_grad_()
        outcome("dpo", scores, beta=1.0, label_smoothing=0.2).loss.sum().backward()
        slopes.append(float(scores.chosen.grad))
    assert slopes[0] < -0.05 and abs(slopes[1]) < 1e-12 and slopes[2] > 0.05


# IPO, SimPO, ORPO ------------------------------------------------------------------------------------------


def test_ipo_pulls_the_gap_of_per_token_log_ratios_to_a_fixed_target() -> None:
    """h = 1/5 − (−0.5)/4 = 0.325; the target is 1/(2·0.1) = 5."""
    assert value("ipo", pairs(), beta=0.1) == pytest.approx((0.325 - 5) ** 2, rel=1e-12)
    there = pairs(chosen=-11.0 + 5 * 2.5, ref_rejected=-11.0, rejected=-11.0)  # 2.5 per token
    assert value("ipo", there, beta=0.2) == pytest.approx(0.0, abs=1e-20)
    beyond = pairs(chosen=-11.0 + 5 * 3.5, ref_rejected=-11.0, rejected=-11.0)
    assert value("ipo", beyond, beta=0.2) == pytest.approx(1.0), "further is worse again, unlike DPO"


def test_ipo_does_not_change_when_both_replies_are_twice_as_long_at_the_same_log_probs_per_token() -> None:
    twice = pairs(-20.0, -24.0, -22.0, -23.0, lengths=(10, 8))
    assert value("ipo", twice) == pytest.approx(value("ipo", pairs()), rel=1e-12)
    assert value("dpo", twice) < value("dpo", pairs()), "DPO counts the sums"


def test_simpo_compares_mean_log_probs_and_asks_for_a_lead_of_gamma() -> None:
    """−10/5 = −2, −12/4 = −3; β = 2 makes them −4 and −6; γ = 0.5: −log σ(2 − 0.5)."""
    found = outcome("simpo", pairs(), beta=2.0, gamma=0.5)
    assert float(found.loss) == pytest.approx(-math.log(sigmoid(1.5)), rel=1e-12)
    assert (float(found.chosen), float(found.rejected), float(found.gap)) == (-4.0, -6.0, 2.0)


def test_orpo_is_the_sft_loss_plus_the_odds_ratio() -> None:
    p, q = math.exp(-10 / 5), math.exp(-12 / 4)
    ratio = (p / (1 - p)) / (q / (1 - q))
    expected = 10 / 5 - 0.2 * math.log(sigmoid(math.log(ratio)))
    assert value("orpo", pairs(), odds_weight=0.2) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sums", [(-1e-12, -1e-12), (0.0, -300.0), (-300.0, 0.0), (-1e-7, -0.7)])
def test_orpo_is_finite_with_finite_gradients_where_a_reply_is_certain_or_impossible(
    dtype: torch.dtype, sums: tuple[float, float]
) -> None:
    chosen, rejected = (torch.tensor([x], dtype=dtype, requires_grad=True) for x in sums)
    one = torch.ones(1, dtype=dtype)
    loss = outcome("orpo", PairScores(chosen, rejected, one, one)).loss
    loss.sum().backward()
    for x in (loss, chosen.grad, rejected.grad):
        assert x is not None and bool(torch.isfinite(x).all())


@pytest.mark.parametrize("x", [-1e-12, -0.1, -0.7, -3.0, -80.0])
def test_orpo_is_exact_however_certain_the_rejected_reply_is(x: float) -> None:
    """p = eˣ, one token each. The chosen reply has odds 1, so the odds term is log(1 + p/(1 − p))."""
    rejected = torch.tensor([x], dtype=torch.float64, requires_grad=True)
    chosen, one = torch.tensor([-math.log(2)], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    loss = outcome("orpo", PairScores(chosen, rejected, one, one), odds_weight=1.0).loss
    left = -math.expm1(x)  # 1 − p
    assert loss.item() == pytest.approx(math.log(2) + math.log1p(math.exp(x) / left), rel=1e-9)
    (gradient,) = torch.autograd.grad(loss.sum(), rejected)
    # σ(log odds) = p, times the slope 1/(1 − p) of the log odds in x
    assert gradient.item() == pytest.approx(math.exp(x) / left, rel=1e-9)


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_losses_without_a_reference_say_so_and_do_without(name: str) -> None:
    assert not PREFERENCE_LOSSES[name].reference
    scores = pairs()
    without = PairScores(scores.chosen, scores.rejected, scores.chosen_tokens, scores.rejected_tokens)
    assert value(name, without) == value(name, scores)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_every_pair_loss_wants_the_chosen_reply_likelier_and_the_rejected_less_likely(name: str) -> None:
    scores = pairs()
    scores.chosen.requires_grad_(), scores.rejected.requires_grad_()
    outcome(name, scores).loss.sum().backward()
    assert float(scores.chosen.grad) < 0 < float(scores.rejected.grad)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_every_gap_is_chosen_minus_rejected_and_its_sign_says_who_is_right(name: str) -> None:
    for scores, sign in ((pairs(), 1), (pairs(chosen=-15.0, rejected=-4.0), -1)):
        found = outcome(name, scores)
        assert float(found.gap) * sign > 0
        torch.testing.assert_close(found.gap, found.chosen - found.rejected)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_gradients_are_those_of_the_values(name: str) -> None:
    scores = pairs()

    def loss(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        rest = (scores.chosen_tokens, scores.rejected_tokens, scores.ref_chosen, scores.ref_rejected)
        return outcome(name, PairScores(chosen, rejected, *rest)).loss

    inputs = (tensor(-10.0).requires_grad_(), tensor(-12.0).requires_grad_())
    assert torch.autograd.gradcheck(loss, inputs)


# KTO -------------------------------------------------------------------------------------------------------


def labelled(*rows: tuple[float, float, bool], baseline: float = 0.0) -> LabelScores:
    logprobs, ref, label = zip(*rows, strict=True)
    return LabelScores(tensor(*logprobs), tensor(*ref), torch.tensor(label), tensor(baseline)[0])


def test_kto_weighs_each_reply_by_its_label_against_the_baseline() -> None:
    """β = 0.1, z₀ = 2: a desirable reply with r = 5 gives 1 − σ(0.3), an undesirable one with r = −4 1 − σ(0.6)."""
    scores = labelled((-10.0, -15.0, True), (-9.0, -5.0, False), baseline=2.0)
    found = outcome("kto", scores, beta=0.1, desirable_weight=1.0, undesirable_weight=1.5)
    expected = [1 - sigmoid(0.1 * (5 - 2)), 1.5 * (1 - sigmoid(0.1 * (2 + 4)))]
    assert found.loss.tolist() == pytest.approx(expected, rel=1e-12)
    assert found.gap.tolist() == pytest.approx([0.3, 0.6])
    assert (found.chosen.tolist(), found.rejected.tolist()) == (pytest.approx([0.5]), pytest.approx([-0.4]))


def test_kto_starts_at_one_half_of_each_weight_and_is_bounded_by_them() -> None:
    start = labelled((-3.0, -3.0, True), (-7.0, -7.0, False))
    assert outcome("kto", start, undesirable_weight=2.0).loss.tolist() == [0.5, 1.0]
    far = labelled((-9000.0, -1.0, True), (-1.0, -9000.0, False))
    assert outcome("kto", far, beta=1.0).loss.tolist() == pytest.approx([1.0, 1.0])


def test_kto_gradient_is_that_of_its_value() -> None:
    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        return outcome(
            "kto", LabelScores(logprobs, tensor(-4.0, -5.0), torch.tensor([True, False]), tensor(0.7)[0])
        ).loss

    assert torch.autograd.gradcheck(loss, (tensor(-3.0, -6.0).requires_grad_(),))


# Reward model ----------------------------------------------------------------------------------------------


def test_ls_021_a_tie_is_no_win_and_the_mean_is_taken_once() -> None:
    found = pairwise(tensor(1.0, 0.0, 2.0), tensor(0.0, 1.0, 2.0))
    assert float(found.loss.mean()) == pytest.approx(0.773224, abs=5e-7)
    assert float((found.gap > 0).double().mean()) == pytest.approx(0.333333, abs=5e-7)
    assert int((found.gap == 0).sum()) == 1


def test_the_centring_term_leaves_differences_alone_and_pulls_the_sum_to_0() -> None:
    chosen, rejected = tensor(3.0).requires_grad_(), tensor(1.0).requires_grad_()
    plain, centred = pairwise(chosen, rejected).loss, pairwise(chosen, rejected, 0.01).loss
    assert (centred - plain).item() == pytest.approx(0.01 * 16)
    grads = torch.autograd.grad((centred - plain).sum(), (chosen, rejected))
    assert [float(g) for g in grads] == pytest.approx([0.08, 0.08])


# Options ---------------------------------------------------------------------------------------------------


def test_an_unknown_loss_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match="unknown preference loss 'dop': did you mean 'dpo'"):
        PREFERENCE_LOSSES["dop"]


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("dpo", {"beta": 0}),
        ("dpo", {"label_smoothing": 0.5}),
        ("simpo", {"gamma": -1}),
        ("kto", {"desirable_weight": 0}),
    ],
)
def test_options_out_of_range_are_refused(name: str, bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        options(name, **bad)
