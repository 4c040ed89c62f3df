# SPDX-License-Identifier: Apache-2.0
"""Distillation and rejection sampling: what is credited, and that the gradients are those of the divergences named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import double_softmax, eight_samples, make_model, plain_logprobs, sample
from torch import Tensor, nn

from palestra.errors import ConfigError
from palestra.learn.advantage import ADVANTAGES, AdvantageConfig
from palestra.learn.annotate import annotate
from palestra.learn.batch import Rows, pack, token_weights
from palestra.learn.batch import rows as batch_rows
from palestra.learn.distill import reverse_kl
from palestra.learn.loss import LOSSES, LossConfig, LossInputs, cross_entropy
from palestra.learn.policy import Policy
from palestra.learn.update import Sums, UpdateConfig, policy_loss
from palestra.types import Author, Episode, Group, Span, StopReason, Task, Trajectory, Turn

RFT = UpdateConfig(advantage="best_of_group", loss="reinforce", kl_coef=0.0, reduction="token_mean")
FULL = UpdateConfig(advantage="nothing", loss="reinforce", kl="full", kl_coef=1.0, reduction="token_mean")


def gradient(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def rl_gradient(
    policy: Policy, rows: Rows, config: UpdateConfig, cuts: list[list[int]], temperature: float = 1.0
) -> tuple[list[Tensor], Sums]:
    """The gradient of a step's loss by the code that training runs, the rows cut into these micro-batches."""
    weights = token_weights(rows.samples, config.reduction)
    total: list[Tensor] = []
    sums = Sums({})
    for chosen in cuts:
        batch = pack(rows, weights, chosen, dtype=torch.float64)
        parts = gradient(policy.model, policy_loss(policy, batch, config, temperature, sums, first=True))
        total = [a + b for a, b in zip(total, parts, strict=True)] if total else parts
    return total, sums


# Rejection sampling ----------------------------------------------------------------------------------------


def best(*groups: list[float]) -> list[list[float]]:
    """The advantage of every episode's last token; each episode writes one token more than the one before."""
    rows = Rows(
        tuple(
            sample([3] * (i + 2), [0] + [1] * (i + 1), group=f"g{g}", episode=f"g{g}/{i}", reward=r)
            for g, rewards in enumerate(groups)
            for i, r in enumerate(rewards)
        )
    )
    values = [float(a[-1]) for a in ADVANTAGES["best_of_group"](rows, AdvantageConfig())]
    found = []
    for rewards in groups:
        found.append(values[: len(rewards)])
        values = values[len(rewards) :]
    return found


def test_the_best_of_a_group_count_so_that_the_mean_is_over_what_is_imitated() -> None:
    # 1 + 2 + 3 tokens, of which the second and third episode's 5 are kept.
    assert best([0.0, 1.0, 1.0]) == [[0.0, 6 / 5, 6 / 5]]
    assert best([0.5, 0.1], [0.0, 1.0]) == [[6 / 3, 0.0], [0.0, 6 / 3]], "one factor for the whole step"


def test_a_group_of_equal_rewards_has_no_best_and_rounding_makes_none() -> None:
    assert best([1.0, 1.0]) == [[0.0, 0.0]] == best([0.1 + 0.2, 0.3]) == best([0.0, 0.0])
    assert best([0.1 + 0.2, 0.3, 0.0])[0][:2] == [6 / 3, 6 / 3], "ties at the top are all kept"
    assert best([1.0]) == [[0.0]]


@pytest.mark.parametrize("cuts", [[list(range(8))], [[0, 3], [1, 2, 7], [4, 5, 6]]], ids=["whole", "cut"])
def test_rft_has_the_gradient_of_supervised_training_on_the_kept_episodes(cuts: list[list[int]]) -> None:
    policy = Policy(make_model(dtype=torch.float64))
    rows = annotate(policy, Rows(tuple(eight_samples())), RFT, temperature=1.0)
    got, _ = rl_gradient(policy, rows, RFT, cuts)
    kept = [s for s in eight_samples() if s.episode in ("A0", "B1", "C0")]  # D is alone: it has no best
    masks = [np.flatnonzero(s.loss_mask) for s in kept]
    plain = make_model(dtype=torch.float64)
    scores = [plain_logprobs(plain, s.tokens)[m] for s, m in zip(kept, masks, strict=True)]
    want = gradient(plain, -torch.cat(scores).mean())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    sft = pack(Rows(tuple(kept)), token_weights(kept, "token_mean"), range(3), dtype=torch.float64)
    loss = cross_entropy(policy.logprobs(sft)[0], sft.weights)
    for a, b in zip(got, gradient(policy.model, loss), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


# Distillation on what was sampled --------------------------------------------------------------------------


def test_a_token_is_credited_with_what_the_teacher_thinks_of_it_alone() -> None:
    one = sample([5, 6, 7, 8], [0, 1, 0, 1], reward=9.0)
    rows = Rows((one,), old=(np.array([0.0, -1.0, 0.0, -2.0]),), ref=(np.array([0.0, -0.25, -3.0, -4.0]),))
    assert ADVANTAGES["distill"](rows, AdvantageConfig())[0].tolist() == [0.0, 0.75, 0.0, -2.0]
    banned = rows.with_(ref=(np.array([0.0, -0.25, -3.0, -np.inf]),))
    assert ADVANTAGES["distill"](banned, AdvantageConfig())[0].tolist() == [0.0, 0.75, 0.0, 0.0]


@pytest.mark.parametrize("loss", ["reinforce", "clip"])
def test_over_all_a_student_may_sample_the_credit_is_the_gradient_of_the_reverse_kl(loss: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(9, dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    samples = tuple(sample([0, a], [0, 1], episode=str(a)) for a in range(9))
    old = tuple(np.array([0.0, float(logp[a].detach())]) for a in range(9))
    rows = Rows(samples, old=old, ref=tuple(np.array([0.0, float(teacher[a])]) for a in range(9)))
    advantages = torch.tensor([a[1] for a in ADVANTAGES["distill"](rows, AdvantageConfig())])
    inputs = LossInputs(logp, logp.detach(), advantages, logp.detach().exp(), torch.arange(9))
    (got,) = torch.autograd.grad(LOSSES[loss](inputs, LossConfig()).loss, logits)
    (want,) = torch.autograd.grad((logits.softmax(-1) * (logits.log_softmax(-1) - teacher)).sum(), logits)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_rows_are_annotated_with_the_teachers_log_probs_and_the_kl_is_reported() -> None:
    student, teacher = make_model(dtype=torch.float64), make_model(dtype=torch.float64, seed=1)
    policy = Policy(make_model(), reference=make_model(dtype=torch.float64, seed=1))
    drawn = tuple(
        replace(s, logprobs=plain_logprobs(student, s.tokens, 0.7).detach().float().numpy()) for s in eight_samples()
    )
    config = UpdateConfig(advantage="distill", loss="clip", kl_coef=0.0, reduction="token_mean")
    rows = annotate(policy, Rows(drawn), config, temperature=0.7)
    assert rows.advantages is not None
    for s, advantage in zip(drawn, rows.advantages, strict=True):
        gap = plain_logprobs(teacher, s.tokens, 0.7) - torch.from_numpy(s.logprobs.copy())
        mask = s.loss_mask & (np.arange(len(s.tokens)) > 0)
        np.testing.assert_allclose(advantage[mask], gap.detach().numpy()[mask], rtol=1e-9, atol=1e-9)


def test_episodes_that_nobody_scored_are_learned_from_where_no_reward_takes_part() -> None:
    said = Span(np.array([5, 6]), Author.MODEL, "assistant", logprobs=np.array([-1.0, -2.0]), version=0)
    view = Trajectory((Turn((said,), (), {"role": "assistant"}, "eos"),), StopReason.ENV_TERMINATED)
    group = Group(Task("t", "?"), 0, (Episode(Task("t", "?"), (view,)),))
    assert len(batch_rows([group], min_group=1)) == 0
    (kept,) = batch_rows([group], min_group=1, unscored=True).samples
    assert (kept.reward, kept.trained_tokens) == (0.0, 2)
    assert UpdateConfig(advantage="nothing").unscored and not UpdateConfig().unscored
    assert UpdateConfig(advantage="distill", kl_coef=0.0).unscored
    assert UpdateConfig(advantage="distill", kl_coef=0.0).min_group == 1


# The divergence of whole distributions ---------------------------------------------------------------------


def test_the_full_divergence_by_hand_and_its_gradient_by_the_formula() -> None:
    # ½ log(½/¼) + ½ log(½/¾) = log 2 − ½ log 3 = 0.143841
    half, uneven = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    assert reverse_kl(half, uneven).item() == pytest.approx(np.log(2) - 0.5 * np.log(3), abs=1e-6)
    assert reverse_kl(half, half).item() == 0.0
    torch.manual_seed(1)
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    other = torch.randn(4, 7, dtype=torch.float64)
    kl = reverse_kl(logits, other, 0.5)
    p, gap = (logits / 0.5).softmax(-1), (logits / 0.5).log_softmax(-1) - (other / 0.5).log_softmax(-1)
    torch.testing.assert_close(kl, (p * gap).sum(-1))
    (got,) = torch.autograd.grad(kl.sum(), logits)
    torch.testing.assert_close(got, p * (gap - kl[:, None]) / 0.5)  # ∂KL/∂z = p·(log p/q − KL)/T


def test_padding_and_banned_tokens_add_nothing_to_the_full_divergence() -> None:
    logits, other = torch.tensor([[0.3, -1.0, 0.2]]), torch.tensor([[1.0, 0.5, -0.5]])
    wider = torch.cat([other, torch.full((1, 2), 9.0)], -1)
    torch.testing.assert_close(reverse_kl(logits, wider), reverse_kl(logits, other))
    never = torch.tensor([[0.3, -torch.inf, 0.2]], requires_grad=True)
    banning = torch.tensor([[1.0, 0.5, -torch.inf]])
    for one, two in ((never, other), (never, banning)):
        kl = reverse_kl(one, two)
        (slope,) = torch.autograd.grad(kl.sum(), never)
        assert torch.isfinite(kl).all() and torch.isfinite(slope[:, [0, 2]]).all()


def test_as_a_loss_it_is_the_mean_over_the_trained_tokens_however_the_step_is_cut() -> None:
    student, teacher = make_model(dtype=torch.float64), make_model(dtype=torch.float64, seed=1)
    policy = Policy(make_model(dtype=torch.float64), reference=make_model(dtype=torch.float64, seed=1))
    rows = annotate(policy, Rows(tuple(eight_samples())), FULL, temperature=0.8)
    assert rows.ref is None, "whole distributions are compared in the update, not before"
    got, sums = rl_gradient(policy, rows, FULL, [[0, 1, 2], [3, 4], [5, 6, 7]], temperature=0.8)
    kls = []
    with double_softmax():
        for s in rows.samples:
            ids = torch.as_tensor(s.tokens, dtype=torch.long)[None]
            with torch.no_grad():
                theirs = teacher(input_ids=ids, use_cache=False).logits[0, :-1]
            mine = student(input_ids=ids, use_cache=False).logits[0, :-1]
            p, q = (torch.distributions.Categorical(logits=z / 0.8) for z in (mine, theirs))
            kls.append(torch.distributions.kl_divergence(p, q)[s.loss_mask[1:]])
    want = torch.cat(kls).mean()
    assert sums.means()["train/loss"] == pytest.approx(float(want.detach()), rel=1e-9)
    assert sums.means()["train/kl"] == pytest.approx(float(want.detach()), rel=1e-9)
    for a, b in zip(got, gradient(student, want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11)


def test_the_reference_takes_no_gradient_and_one_is_needed() -> None:
    student, teacher = make_model(), make_model(seed=1)
    rows = Rows(tuple(eight_samples()))
    weights = token_weights(rows.samples, "token_mean")
    kl = Policy(student, reference=teacher).outputs(pack(rows, weights, range(8)), kl=True).kl
    assert kl is not None
    kl.sum().backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None for p in teacher.parameters()) and (kl > 0).all()
    with pytest.raises(ValueError, match="without a reference"):
        Policy(make_model()).outputs(pack(rows, weights, range(8)), kl=True)


# What is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"advantage": "distill", "kl_coef": 0.1}, "is the KL to the teacher already"),
        ({"advantage": "nothing", "kl_coef": 0.0}, "leaves nothing to learn from"),
        ({"advantage": "nothing", "kl": "k1", "kl_in": "reward"}, "leaves nothing to learn from"),
        ({"kl": "full", "kl_in": "reward"}, "set algorithm.kl_in=loss"),
        ({"kl": "full", "kl_importance": True}, "algorithm.kl_importance=false"),
        ({"kl": "fuller"}, "fuller"),
    ],
)
def test_terms_that_would_count_a_teacher_twice_or_not_at_all_are_refused(parts: dict[str, Any], told: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=told):
        UpdateConfig.model_validate(parts)
