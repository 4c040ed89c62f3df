# SPDX-License-Identifier: Apache-2.0
"""Every loss against its formula written out token by token, in float64, values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.errors import ConfigError
from palestra.learn.entropy import entropy
from palestra.learn.loss import LOSSES, LossConfig, LossInputs, check_clip, sequence_mean, value_loss

WIDE, GSPO, CISPO = LossConfig(clip_low=0.2, clip_high=0.28), LossConfig(clip_low=3e-4, clip_high=4e-4), 4.0
SEQUENCE = (0, 0, 0, 1, 1, 2, 2, 2, 2, 3)
Plain = Callable[[list[Tensor], list[float], list[float]], list[Tensor]]


def inputs(spread: float = 0.3, seed: int = 0, *, advantages: Sequence[float] | None = None) -> LossInputs:
    """Ten tokens of four sequences; one advantage and one weight per token."""
    noise = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(10, generator=noise, dtype=torch.float64)

    old = -normal().abs() - 0.5
    new = (old + spread * normal()).requires_grad_()
    a = normal() if advantages is None else torch.tensor(advantages, dtype=torch.float64)
    return LossInputs(new, old, a, normal().abs(), torch.tensor(SEQUENCE))


def pessimistic(ratio: Tensor, a: float, low: float, high: float) -> Tensor:
    value = float(ratio.detach())
    inside = min(max(value, 1 - low), 1 + high)
    return -ratio * a if value * a <= inside * a else torch.tensor(-inside * a, dtype=torch.float64)


def plain_clip(new: list[Tensor], old: list[float], a: list[float]) -> list[Tensor]:
    return [pessimistic((n - o).exp(), x, 0.2, 0.28) for n, o, x in zip(new, old, a, strict=True)]


def plain_dual_clip(new: list[Tensor], old: list[float], a: list[float]) -> list[Tensor]:
    bounded = []
    for loss, x in zip(plain_clip(new, old, a), a, strict=True):
        bounded.append(
            loss if x >= 0 or float(loss.detach()) <= 1.5 * -x else torch.tensor(1.5 * -x, dtype=torch.float64)
        )
    return bounded


def plain_reinforce(new: list[Tensor], old: list[float], a: list[float]) -> list[Tensor]:
    return [-x * n for n, x in zip(new, a, strict=True)]


def plain_cispo(new: list[Tensor], old: list[float], a: list[float]) -> list[Tensor]:
    return [-min(math.exp(float(n.detach()) - o), 1.25) * x * n for n, o, x in zip(new, old, a, strict=True)]


def of_sequence(values: Sequence[Tensor], i: int) -> Tensor:
    own = [v for v, s in zip(values, SEQUENCE, strict=True) if s == SEQUENCE[i]]
    return torch.stack(own).mean()


def plain_gspo(new: list[Tensor], old: list[float], a: list[float]) -> list[Tensor]:
    gaps = [n - o for n, o in zip(new, old, strict=True)]
    return [pessimistic(of_sequence(gaps, i).exp(), x, 3e-4, 4e-4) for i, x in enumerate(a)]


def plain_gspo_token(new: list[Tensor], old: list[float], a: list[float]) -> list[Tensor]:
    gaps = [(n - o).detach() for n, o in zip(new, old, strict=True)]
    ratios = [of_sequence(gaps, i).exp() * n.exp() / n.exp().detach() for i, n in enumerate(new)]
    return [pessimistic(r, x, 3e-4, 4e-4) for r, x in zip(ratios, a, strict=True)]


CASES: dict[str, tuple[str, LossConfig, Plain, float]] = {
    # our name, config, the formula, how far new and old log-probs are apart
    "clip": ("clip", WIDE, plain_clip, 0.8),
    "dual clip": ("clip", LossConfig(clip_high=0.28, dual_clip=1.5), plain_dual_clip, 0.8),
    "reinforce": ("reinforce", LossConfig(), plain_reinforce, 0.3),
    "gspo": ("gspo", GSPO, plain_gspo, 3e-3),
    "gspo_token": ("gspo_token", GSPO, plain_gspo_token, 3e-3),
    "cispo": ("cispo", LossConfig(clip_low=1.0, clip_high=0.25), plain_cispo, 0.3),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_value_and_gradient_are_those_of_the_formula(case: str, seed: int) -> None:
    name, config, plain, spread = CASES[case]
    given = inputs(spread, seed)
    out = LOSSES[name](given, config)
    (got,) = torch.autograd.grad(out.loss, given.logprobs)
    new = [x.clone().requires_grad_() for x in given.logprobs.detach()]
    per_token = plain(new, given.old.tolist(), given.advantages.tolist())
    loss = sum((w * x for w, x in zip(given.weights, per_token, strict=True)), torch.zeros(()))
    wanted = torch.autograd.grad(loss, new, allow_unused=True)
    torch.testing.assert_close(out.loss.detach(), loss.detach(), rtol=1e-12, atol=1e-12)
    for g, w in zip(got, wanted, strict=True):
        assert float(g) == pytest.approx(0.0 if w is None else float(w), rel=1e-12, abs=1e-12)
    if name in ("clip", "gspo", "gspo_token"):
        cut, count = out.metrics["train/clip_fraction"]
        assert count == 10 and 0 < cut < 10, "the clip takes part"


@pytest.mark.parametrize("case", CASES)
def test_the_order_of_tokens_does_not_matter(case: str) -> None:
    name, config, _, spread = CASES[case]
    given, order = inputs(spread), torch.randperm(10, generator=torch.Generator().manual_seed(1))
    mixed = LossInputs(*(getattr(given, f)[order] for f in ("logprobs", "old", "advantages", "weights", "sequence")))
    straight, shuffled = LOSSES[name](given, config), LOSSES[name](mixed, config)
    assert float(shuffled.loss.detach()) == pytest.approx(float(straight.loss.detach()), rel=1e-12)
    assert shuffled.metrics == straight.metrics


@pytest.mark.parametrize("case", CASES)
def test_a_step_may_be_cut_between_sequences(case: str) -> None:
    name, config, _, spread = CASES[case]
    given = inputs(spread)
    whole = LOSSES[name](given, config)
    (gradient,) = torch.autograd.grad(whole.loss, given.logprobs)
    parts = [slice(0, 5), slice(5, 10)]
    cut = [
        LossInputs(given.logprobs[p], given.old[p], given.advantages[p], given.weights[p],
                   given.sequence[p] - given.sequence[p].min())
        for p in parts
    ]  # fmt: skip
    outs = [LOSSES[name](c, config) for c in cut]
    (summed,) = torch.autograd.grad(outs[0].loss + outs[1].loss, given.logprobs)
    torch.testing.assert_close(summed, gradient, rtol=1e-12, atol=1e-14)
    for metric, (total, count) in whole.metrics.items():
        assert (total, count) == tuple(sum(o.metrics[metric][k] for o in outs) for k in (0, 1))


@pytest.mark.parametrize("name", sorted({case[0] for case in CASES.values()}))
def test_every_loss_is_a_multiple_of_the_advantage(name: str) -> None:
    """What lets the update leave rows without advantage out, and carry importance weights in it."""
    config = CASES[name][1]
    given = inputs(advantages=[0.0] * 10)
    out = LOSSES[name](given, config)
    (gradient,) = torch.autograd.grad(out.loss, given.logprobs)
    assert float(out.loss.detach()) == 0.0 and not gradient.any()
    given = inputs(CASES[name][3])
    doubled = LossInputs(given.logprobs, given.old, 2 * given.advantages, given.weights, given.sequence)
    assert float(LOSSES[name](doubled, config).loss.detach()) == pytest.approx(
        2 * float(LOSSES[name](given, config).loss.detach()), rel=1e-12
    )


@pytest.mark.parametrize("name", sorted({case[0] for case in CASES.values()}))
@pytest.mark.parametrize("gap", [1e3, -1e3])
def test_no_token_makes_a_loss_or_its_gradient_infinite(name: str, gap: float) -> None:
    old = torch.full((2,), -1.0)
    for sign in (1.0, -1.0):
        new = (old + gap).requires_grad_()
        one = torch.ones(2)
        out = LOSSES[name](LossInputs(new, old, sign * one, one, torch.tensor([0, 1])), LossConfig())
        (gradient,) = torch.autograd.grad(out.loss, new)
        assert torch.isfinite(out.loss.detach()) and torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", sorted({case[0] for case in CASES.values()}))
def test_a_batch_without_trained_tokens_is_zero(name: str) -> None:
    none = torch.zeros(0)
    out = LOSSES[name](LossInputs(none, none, none, none, torch.zeros(0, dtype=torch.long)), LossConfig())
    assert float(out.loss) == 0.0 and all(v == (0.0, 0.0) for v in out.metrics.values())


@pytest.mark.parametrize("name", ["clip", "gspo_token", "cispo"])
def test_where_nothing_has_moved_the_gradient_is_that_of_reinforce(name: str) -> None:
    given = inputs(spread=0.0)
    gradients = [torch.autograd.grad(LOSSES[n](given, GSPO).loss, given.logprobs)[0] for n in (name, "reinforce")]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-14)


# Clips -----------------------------------------------------------------------------------------------------


def one_token(ratio: float, advantage: float, config: LossConfig, name: str = "clip") -> tuple[float, float]:
    """Loss and its derivative with respect to log π."""
    new = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    one = torch.ones(1, dtype=torch.float64)
    out = LOSSES[name](LossInputs(new, 0 * one, advantage * one, one, torch.zeros(1, dtype=torch.long)), config)
    (gradient,) = torch.autograd.grad(out.loss, new)
    return float(out.loss.detach()), float(gradient)


def test_ls_009_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    bounded = LossConfig(dual_clip=3.0)
    assert one_token(5.0, -1.0, bounded) == (pytest.approx(3.0), 0.0)
    assert one_token(5.0, -1.0, LossConfig()) == (pytest.approx(5.0), pytest.approx(5.0))
    assert one_token(2.9, -1.0, bounded) == (pytest.approx(2.9), pytest.approx(2.9)), "below the bound nothing changes"
    assert one_token(5.0, 1.0, bounded) == one_token(5.0, 1.0, LossConfig()), "good tokens are not its business"


def test_clip_higher_lets_a_good_token_rise_further_than_it_may_fall() -> None:
    assert one_token(1.25, 1.0, WIDE) == (pytest.approx(-1.25), pytest.approx(-1.25))
    assert one_token(1.30, 1.0, WIDE) == (pytest.approx(-1.28), 0.0)
    assert one_token(0.75, -1.0, WIDE) == (pytest.approx(0.8), 0.0)


def test_cispo_cuts_the_weight_of_a_token_and_never_its_gradient() -> None:
    config = LossConfig(clip_low=1.0, clip_high=4.0)
    assert one_token(9.0, 1.0, config, "cispo")[1] == pytest.approx(-5.0)
    assert one_token(9.0, -1.0, config, "cispo")[1] == pytest.approx(5.0)
    assert one_token(1e-6, 1.0, config, "cispo")[1] == pytest.approx(-1e-6), "no lower bound"
    assert one_token(1e-6, 1.0, LossConfig(clip_low=0.2), "cispo")[1] == pytest.approx(-0.8)


def test_a_dual_clip_that_could_not_work_is_refused() -> None:
    check_clip(LossConfig(dual_clip=3.0))
    check_clip(LossConfig(dual_clip=3.0), "gspo")
    for loss in ("reinforce", "cispo"):
        with pytest.raises(ConfigError, match="dual_clip"):
            check_clip(LossConfig(dual_clip=3.0), loss)
    with pytest.raises(ConfigError, match=r"dual_clip is 1.2: .* beyond 1 \+ clip_high = 1.2, so it must be larger"):
        check_clip(LossConfig(dual_clip=1.2))
    check_clip(LossConfig(dual_clip=1.21))


# Sequences -------------------------------------------------------------------------------------------------


def test_ls_010_a_sequences_ratio_is_the_exponential_of_its_own_tokens_mean() -> None:
    """The third token, a tool's with log-ratio 99, is masked: it never reaches a loss."""
    mean = sequence_mean(torch.tensor([0.2, -0.1], dtype=torch.float64), torch.tensor([0, 0]))
    assert mean.exp().tolist() == pytest.approx([1.051271] * 2, abs=5e-7)
    assert torch.tensor([0.2, -0.1]).sum().exp().item() == pytest.approx(1.105171, abs=5e-7), "and not of their sum"


def test_gspo_clips_whole_sequences() -> None:
    new = torch.tensor([0.004, -0.003, 0.0001, 0.0001], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    out = LOSSES["gspo"](LossInputs(new, zero, one, one / 4, torch.tensor([0, 0, 1, 1])), GSPO)
    (gradient,) = torch.autograd.grad(out.loss, new)
    # The first sequence's mean, 0.0005, is beyond 4e-4; the second's is within, and both its tokens share its gradient.
    assert out.metrics["train/clip_fraction"] == (2.0, 4.0)
    assert gradient.tolist() == [0.0, 0.0, *[pytest.approx(-math.exp(1e-4) / 4, rel=1e-12)] * 2]


def test_gspo_with_one_advantage_per_sequence_is_gspo_token() -> None:
    a = torch.randn(4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)[list(SEQUENCE)].tolist()
    weights = torch.tensor([1 / 3, 1 / 3, 1 / 3, 0.5, 0.5, *[0.25] * 4, 1.0], dtype=torch.float64)
    for seed in range(5):
        given = inputs(3e-3, seed, advantages=a)
        given = LossInputs(given.logprobs, given.old, given.advantages, weights, given.sequence)
        losses = [LOSSES[n](given, GSPO).loss for n in ("gspo", "gspo_token")]
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=1e-14)
        gradients = [torch.autograd.grad(x, given.logprobs)[0] for x in losses]
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-14)


# GRPO and DPO ----------------------------------------------------------------------------------------------


def test_grpo_with_two_answers_paid_1_and_minus_1_pulls_where_dpo_does_and_only_at_the_start() -> None:
    """Six possible answers, logits θ; the first is preferred to the second. No clip, no KL, θ_old = θ_ref."""
    start = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    old, never = start.log_softmax(-1), LossConfig(clip_low=1.0, clip_high=1e9)

    def gradients(theta: Tensor) -> tuple[Tensor, Tensor]:
        theta = theta.clone().requires_grad_()
        now = theta.log_softmax(-1)[:2]
        pair = LossInputs(now, old[:2], torch.tensor([1.0, -1.0]).double(), torch.full((2,), 0.5), torch.tensor([0, 1]))
        grpo = LOSSES["clip"](pair, never).loss
        dpo = -F.logsigmoid((now - old[:2])[0] - (now - old[:2])[1])
        return torch.autograd.grad(grpo, theta, retain_graph=True)[0], torch.autograd.grad(dpo, theta)[0]

    grpo, dpo = gradients(start)
    torch.testing.assert_close(grpo, dpo, rtol=1e-12, atol=1e-14)  # −½(∇log π₁ − ∇log π₂) both
    moved = start + torch.tensor([1.0, -0.5, 0, 0, 0, 0], dtype=torch.float64)
    grpo, dpo = gradients(moved)
    assert float(F.cosine_similarity(grpo, dpo, dim=0)) < 0.99, "elsewhere not even the direction is the same"


# Values and entropy ----------------------------------------------------------------------------------------


def test_the_value_loss_is_the_squared_error_and_clipping_is_pessimistic() -> None:
    def loss(value: float, old: float, target: float, clip: float | None) -> tuple[float, float]:
        v = torch.tensor([value], dtype=torch.float64, requires_grad=True)
        one = torch.ones(1, dtype=torch.float64)
        out = value_loss(v, old * one, target * one, 0.5 * one, clip=clip)
        (gradient,) = torch.autograd.grad(out.loss, v, allow_unused=True)
        return float(out.loss.detach()), float(gradient)

    assert loss(0.5, 0.0, 1.0, None) == (pytest.approx(0.125), pytest.approx(-0.5))
    assert loss(0.1, 0.0, 1.0, 0.2) == (pytest.approx(0.405), pytest.approx(-0.9)), "within the clip"
    assert loss(0.5, 0.0, 1.0, 0.2) == (pytest.approx(0.32), 0.0), "moved far enough towards the target"
    assert loss(-0.5, 0.0, 1.0, 0.2) == (pytest.approx(1.125), pytest.approx(-1.5)), "moved away: pulled back in full"


def test_the_value_loss_equals_its_formula_written_out() -> None:
    noise = torch.Generator().manual_seed(0)
    v, old, r, w = (torch.randn(20, generator=noise, dtype=torch.float64) for _ in range(4))
    out = value_loss(v, old, r, w.abs(), clip=0.5)
    want, cut = 0.0, 0
    for x, o, t, weight in zip(v.tolist(), old.tolist(), r.tolist(), w.abs().tolist(), strict=True):
        near = o + min(max(x - o, -0.5), 0.5)
        want += weight * max((x - t) ** 2, (near - t) ** 2)
        cut += (near - t) ** 2 > (x - t) ** 2
    assert float(out.loss) == pytest.approx(want, rel=1e-12)
    assert out.metrics["train/value_clip_fraction"] == (cut, 20.0) and 0 < cut < 20


def test_without_a_clip_the_value_loss_is_a_weighted_sum_as_well() -> None:
    v, r, w = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, 2.0, 0.0], [1.0, 0.0, 3.0], [0.5, 0.25, 1.0]))
    assert float(value_loss(v, v, r, w).loss) == 0.5 * 0.25 + 0.25 * 4.0 + 9.0


def test_entropy_has_the_gradient_of_the_whole_distribution() -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    got = entropy(logits, 0.7)
    p = torch.softmax(logits / 0.7, -1)
    torch.testing.assert_close(got, -(p * p.log()).sum(-1), rtol=1e-12, atol=1e-12)
    # dH/dlogit_j = −p_j (log p_j + H) / T
    (gradient,) = torch.autograd.grad(got.sum(), logits)
    torch.testing.assert_close(gradient, (-p * (p.log() + got[:, None]) / 0.7).detach(), rtol=1e-12, atol=1e-12)


def test_nm_005_a_banned_token_has_no_part_in_the_entropy_or_its_gradient() -> None:
    logits = torch.tensor([[0.3, -math.inf, 0.1], [5.0, -math.inf, -math.inf]], requires_grad=True)
    got = entropy(logits)
    (gradient,) = torch.autograd.grad(got.sum(), logits)
    assert got.tolist()[1] == 0.0 and torch.isfinite(gradient).all() and not gradient[:, 1].any()
