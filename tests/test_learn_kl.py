# SPDX-License-Identifier: Apache-2.0
"""What each KL estimator's gradient is, by summing over whole distributions; and coefficients that adapt."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from palestra.errors import ConfigError
from palestra.learn.kl import KL_ESTIMATORS, check_kl, importance_corrected
from palestra.learn.klcontrol import KLControlConfig, KLController

NAMES = ("k1", "k2", "k3")


def two_tokens() -> tuple[Tensor, Tensor]:
    """The logit of token 0 with its gradient, and the reference: π = (0.7, 0.3), π_ref = (0.5, 0.5)."""
    logit = torch.tensor(math.log(0.7 / 0.3), dtype=torch.float64, requires_grad=True)
    return logit, torch.tensor([0.5, 0.5], dtype=torch.float64).log()


def log_policy(logit: Tensor) -> Tensor:
    return torch.stack([logit, torch.zeros_like(logit)]).log_softmax(-1)


def slope(value: Tensor, logit: Tensor) -> float:
    return float(torch.autograd.grad(value, logit)[0])


def true_kl(logit: Tensor, ref: Tensor) -> Tensor:
    now = log_policy(logit)
    return (now.exp() * (now - ref)).sum()


@pytest.mark.parametrize(
    ("name", "value", "gradient"), [("k1", 0.082283, 0.0), ("k2", None, 0.177933), ("k3", 0.082283, 0.2)]
)
def test_kl_005_values_and_gradients_in_the_loss(name: str, value: float | None, gradient: float) -> None:
    logit, ref = two_tokens()
    assert float(true_kl(logit, ref).detach()) == pytest.approx(0.082283, abs=5e-7)
    assert slope(true_kl(logit, ref), logit) == pytest.approx(0.177933, abs=5e-7)
    now = log_policy(logit)
    expected = (now.exp().detach() * KL_ESTIMATORS[name](now, ref)).sum()  # over what the policy samples
    if value is not None:
        assert float(expected.detach()) == pytest.approx(value, abs=5e-7)
    assert slope(expected, logit) == pytest.approx(gradient, abs=5e-7)


@pytest.mark.parametrize(("name", "gradient"), [("k1", 0.177933), ("k2", -0.015512), ("k3", -0.022067)])
def test_gradients_in_the_reward(name: str, gradient: float) -> None:
    """There the estimate is a number that weighs the score function. k1 is right; k2 and k3 push away from the
    reference, and are refused."""
    logit, ref = two_tokens()
    now = log_policy(logit)
    paid = KL_ESTIMATORS[name](now, ref).detach()
    assert slope((now.exp().detach() * paid * now).sum(), logit) == pytest.approx(gradient, abs=5e-7)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_an_importance_corrected_term_has_the_true_gradient_under_an_older_policy(name: str) -> None:
    noise = torch.Generator().manual_seed(0)
    theta = torch.randn(6, generator=noise, dtype=torch.float64).requires_grad_()
    old, ref = (torch.randn(6, generator=noise, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    now = theta.log_softmax(-1)
    kl = (now.exp() * (now - ref)).sum()
    term = (old.exp() * importance_corrected(KL_ESTIMATORS[name](now, ref), now - old)).sum()
    torch.testing.assert_close(term, kl, rtol=1e-12, atol=1e-12)
    wanted, got = (torch.autograd.grad(x, theta, retain_graph=True)[0] for x in (kl, term))
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_k2_has_the_true_gradient_and_k3_that_of_the_other_direction() -> None:
    noise = torch.Generator().manual_seed(1)
    theta = torch.randn(6, generator=noise, dtype=torch.float64).requires_grad_()
    ref = torch.randn(6, generator=noise, dtype=torch.float64).log_softmax(-1)
    now = theta.log_softmax(-1)
    forward, backward = (now.exp() * (now - ref)).sum(), (ref.exp() * (ref - now)).sum()
    for name, target in (("k2", forward), ("k3", backward)):
        expected = (now.exp().detach() * KL_ESTIMATORS[name](now, ref)).sum()
        wanted, got = (torch.autograd.grad(x, theta, retain_graph=True)[0] for x in (target, expected))
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_kl_009_a_corrected_token() -> None:
    ratio = torch.tensor(0.8, dtype=torch.float64).log()
    value = KL_ESTIMATORS["k3"](torch.tensor(-1.0, dtype=torch.float64), torch.tensor(-1.5, dtype=torch.float64))
    assert float(importance_corrected(value, ratio)) == pytest.approx(0.085225, abs=5e-7)
    assert math.isfinite(float(importance_corrected(value, torch.tensor(1e4))))


def test_k3_is_unbiased_under_the_policy_and_never_negative() -> None:
    noise = torch.Generator().manual_seed(0)
    logits = torch.randn(8, generator=noise, dtype=torch.float64)
    now, ref = (
        x.log_softmax(-1) for x in (logits, logits + 0.3 * torch.randn(8, generator=noise, dtype=torch.float64))
    )
    drawn = torch.multinomial(now.exp(), 200_000, replacement=True, generator=noise)
    k1, k3 = (KL_ESTIMATORS[n](now[drawn], ref[drawn]) for n in ("k1", "k3"))
    truth = float((now.exp() * (now - ref)).sum())
    assert float(k3.min()) >= 0 > float(k1.min())
    for estimate in (k1, k3):
        assert abs(float(estimate.mean()) - truth) < 4 * float(estimate.std()) / 200_000**0.5
    assert float(k3.std()) < float(k1.std()), "near the reference"


@pytest.mark.parametrize(
    ("kl", "place", "importance", "says"),
    [
        ("k1", "loss", False, "kl=k2"),
        ("k2", "reward", False, "kl=k1"),
        ("k3", "reward", False, "kl=k1"),
        ("k1", "reward", True, "kl_importance"),
        ("k2", "loss", True, "kl_importance"),
    ],
)
def test_a_term_with_a_wrong_gradient_is_refused_with_the_right_one(
    kl: str, place: str, importance: bool, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        check_kl(kl, place, importance=importance)  # type: ignore[arg-type]


def test_terms_with_a_right_gradient_pass() -> None:
    for kl, place, importance in (("k2", "loss", False), ("k3", "loss", False), ("k1", "reward", False),
                                  ("k1", "loss", True), ("k3", "loss", True), ("mine", "reward", False)):  # fmt: skip
        check_kl(kl, place, importance=importance)  # type: ignore[arg-type]


# Coefficients that adapt -----------------------------------------------------------------------------------


def test_in_steps_the_coefficient_moves_by_half_outside_a_band_around_the_target() -> None:
    control = KLController(KLControlConfig(), 0.1)
    seen = [(0.2, 0.15), (0.151, 0.225), (0.149, 0.225), (0.1, 0.225), (0.067, 0.225), (0.066, 0.15), (-0.01, 0.1)]
    for kl, coef in seen:
        assert control.update(kl) == pytest.approx(coef) == control.coef


def test_the_band_includes_its_ends() -> None:
    control = KLController(KLControlConfig(target=0.5, band=2.0), 0.1)
    assert [control.update(kl) for kl in (1.0, 0.25)] == [0.1, 0.1]


def test_the_proportional_coefficient_moves_with_the_error_up_to_a_fifth_of_it() -> None:
    control = KLController(KLControlConfig(kind="proportional"), 0.1)
    assert control.update(0.11) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert control.update(5.0) == pytest.approx(0.101 * 1.02)
    assert control.update(0.0) == pytest.approx(0.101 * 1.02 * 0.98)


@pytest.mark.parametrize("kind", ["steps", "proportional"])
def test_a_kl_of_zero_does_not_drive_the_coefficient_to_zero(kind: str) -> None:
    config = KLControlConfig.model_validate({"kind": kind, "lowest": 0.01, "highest": 0.5})
    control = KLController(config, 0.1)
    assert [control.update(0.0) for _ in range(300)][-1] == 0.01
    assert [control.update(9.0) for _ in range(300)][-1] == 0.5


def test_a_step_that_measured_no_kl_changes_nothing() -> None:
    control = KLController(KLControlConfig(), 0.1)
    assert [control.update(kl) for kl in (None, math.nan, math.inf)] == [0.1] * 3


def test_a_resumed_run_goes_on_with_its_coefficient() -> None:
    control = KLController(KLControlConfig(), 0.1)
    control.update(0.9)
    again = KLController(KLControlConfig(), 0.1)
    again.load_state_dict(control.state_dict())
    assert again.update(0.9) == control.update(0.9) == pytest.approx(0.225)


def test_clamps_that_meet_hold_the_coefficient_still() -> None:
    control = KLController(KLControlConfig(lowest=0.1, highest=0.1), 0.1)
    assert [control.update(kl) for kl in (9.0, 0.0)] == [0.1, 0.1]


def test_clamps_the_wrong_way_round_are_refused() -> None:
    with pytest.raises(ValueError, match="above"):
        KLControlConfig(lowest=2.0)
