# SPDX-License-Identifier: Apache-2.0
"""Every critic-free preset as its paper has it: padded tables, masks and means, no code of ours but what is tested.

Twelve answers to three problems, seven places each, of which the policy wrote some. The gradients are those of all
logits, in float64; masked places must have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from palestra.learn.advantage import ADVANTAGES, AdvantageConfig
from palestra.learn.batch import PerToken, Rows, token_weights
from palestra.learn.kl import KL_ESTIMATORS
from palestra.learn.loss import LOSSES, LossInputs
from palestra.learn.shaping import kl_penalties, with_penalties
from palestra.learn.update import UpdateConfig
from palestra.selfcheck.kinds import make_sample
from palestra.train.presets import PRESETS

GROUPS, SIZE, PLACES, WORDS = 3, 4, 7, 5
ANSWERS = GROUPS * SIZE
LIMIT = 9.0
"""Tokens that an answer may have, for Dr. GRPO's divisor."""

_noise = torch.Generator().manual_seed(0)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=_noise, dtype=torch.float64)


LOGITS = normal(ANSWERS, PLACES, WORDS, scale=0.8)
IDS = torch.randint(0, WORDS, (ANSWERS, PLACES), generator=_noise)
MASK = torch.rand(ANSWERS, PLACES, generator=_noise) < 0.7
MASK[:, 0] = True
MASK[5] = torch.arange(PLACES) == 3  # one answer has a single token
M = MASK.double()
REWARDS = normal(GROUPS, SIZE)
REWARDS[1] = 0.25  # one problem teaches nothing


def logp(logits: Tensor) -> Tensor:
    """log π of what was said, (answers, places)."""
    return logits.log_softmax(-1).gather(-1, IDS[..., None])[..., 0]


OLD = logp(LOGITS) + normal(ANSWERS, PLACES, scale=0.3)
REF = logp(LOGITS) + normal(ANSWERS, PLACES, scale=0.4)


# What the papers write -------------------------------------------------------------------------------------


def per_answer(values: Tensor) -> Tensor:
    """The mean over each answer's own tokens, then over answers."""
    return ((values * M).sum(1) / M.sum(1)).mean()


def per_token(values: Tensor) -> Tensor:
    return (values * M).sum() / M.sum()


def surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def ratio(logits: Tensor) -> Tensor:
    return (logp(logits) - OLD).exp()


def column(rewards: Tensor) -> Tensor:
    """(groups, size) → (answers, 1)."""
    return rewards.reshape(-1, 1)


def centred() -> Tensor:
    return REWARDS - REWARDS.mean(1, keepdim=True)


def z_scores() -> Tensor:
    deviation = (centred() ** 2).sum(1, keepdim=True).div(SIZE - 1).sqrt()
    return column(centred() / (deviation + 1e-4))


def leave_one_out(rewards: Tensor) -> Tensor:
    return column(rewards - (rewards.sum(1, keepdim=True) - rewards) / (SIZE - 1))


def whitened(advantages: Tensor) -> Tensor:
    own = advantages.expand(ANSWERS, PLACES)[MASK]
    return (advantages - own.mean()) / (own.var(unbiased=False) + 1e-8).sqrt()


PAID = (OLD - REF) * M
"""k1 of each token under the policy that sampled."""


def k2(logits: Tensor) -> Tensor:
    return 0.5 * (logp(logits) - REF) ** 2


def k3(logits: Tensor) -> Tensor:
    x = REF - logp(logits)
    return x.exp() - x - 1


def reinforce(logits: Tensor) -> Tensor:
    return per_token(-column(REWARDS - REWARDS.mean()) * logp(logits))


def rloo(logits: Tensor) -> Tensor:
    shaped = REWARDS - 0.05 * PAID.sum(1).reshape(GROUPS, SIZE)
    return per_token(surrogate(ratio(logits), leave_one_out(shaped), 0.2, 0.2))


def reinforce_pp(logits: Tensor) -> Tensor:
    still_to_pay = PAID.flip(1).cumsum(1).flip(1)
    return per_token(surrogate(ratio(logits), whitened(column(REWARDS) - 0.05 * still_to_pay), 0.2, 0.2))


def reinforce_pp_baseline(logits: Tensor) -> Tensor:
    return per_token(surrogate(ratio(logits), whitened(column(centred())), 0.2, 0.2) + 0.05 * k2(logits))


def grpo(logits: Tensor) -> Tensor:
    return per_answer(surrogate(ratio(logits), z_scores(), 0.2, 0.2) + 0.05 * k3(logits))


def grpo_no_std(logits: Tensor) -> Tensor:
    return per_answer(surrogate(ratio(logits), column(centred()), 0.2, 0.2) + 0.05 * k3(logits))


def dr_grpo(logits: Tensor) -> Tensor:
    return (surrogate(ratio(logits), column(centred()), 0.2, 0.2) * M).sum() / (ANSWERS * LIMIT)


def dapo(logits: Tensor) -> Tensor:
    return per_token(surrogate(ratio(logits), z_scores(), 0.2, 0.28))


def gspo(logits: Tensor) -> Tensor:
    whole = (((logp(logits) - OLD) * M).sum(1, keepdim=True) / M.sum(1, keepdim=True)).exp()
    return surrogate(whole, z_scores(), 3e-4, 4e-4).mean()


def cispo(logits: Tensor) -> Tensor:
    return per_token(-ratio(logits).clamp(max=5.0).detach() * z_scores() * logp(logits))


def rft(logits: Tensor) -> Tensor:
    """Supervised learning on the best answer of each problem that has one."""
    best = column((REWARDS.max(1, keepdim=True).values == REWARDS) & (torch.arange(GROUPS) != 1)[:, None])
    return -(logp(logits) * M * best).sum() / (M * best).sum()


def distill(logits: Tensor) -> Tensor:
    return per_token(surrogate(ratio(logits), REF - OLD, 0.2, 0.2))


PAPERS: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f
    for f in (
        reinforce, rloo, reinforce_pp, reinforce_pp_baseline, grpo, grpo_no_std, dr_grpo, dapo, gspo, cispo, rft,
        distill,
    )
}  # fmt: skip


# What a preset computes ------------------------------------------------------------------------------------


def behind_prompt(table: Tensor) -> tuple[PerToken, ...]:
    return tuple(np.concatenate([[0.0], row.numpy()]) for row in table)


def of_preset(preset: str, logits: Tensor) -> Tensor:
    parts = {k: v for k, v in PRESETS[preset].items() if k in UpdateConfig.model_fields}
    config = UpdateConfig(**parts)
    rows = Rows(
        tuple(
            make_sample(mask.numpy(), group=str(i // SIZE), episode=f"{i // SIZE}/{i}", reward=float(reward))
            for i, (mask, reward) in enumerate(zip(MASK, REWARDS.reshape(-1), strict=True))
        ),
        old=behind_prompt(OLD),
        ref=behind_prompt(REF),
    )
    paid: dict[str, Any] = {"kl": config.kl, "kl_coef": config.kl_coef} if config.kl_in_reward else {}
    seen = with_penalties(rows, kl_penalties(rows, config.kl, config.kl_coef)) if paid else rows
    advantages = ADVANTAGES[config.advantage](seen, AdvantageConfig(**paid))
    weights = token_weights(rows.samples, config.reduction, divisor=ANSWERS * LIMIT)
    a, w = (torch.tensor(np.stack(x))[:, 1:][MASK] for x in (advantages, weights))
    answer = torch.arange(ANSWERS)[:, None].expand(ANSWERS, PLACES)[MASK]
    new = logp(logits)[MASK]
    loss = LOSSES[config.loss](LossInputs(new, OLD[MASK], a, w, answer), config.loss_config).loss
    if config.kl_in_loss:
        loss = loss + config.kl_coef * (w * KL_ESTIMATORS[config.kl](new, REF[MASK])).sum()
    return loss


@pytest.mark.parametrize("preset", PAPERS)
def test_a_preset_has_the_value_and_the_gradient_of_its_paper(preset: str) -> None:
    def both(loss: Callable[[Tensor], Tensor]) -> tuple[float, Tensor]:
        leaf = LOGITS.clone().requires_grad_()
        value = loss(leaf)
        return value.item(), torch.autograd.grad(value, leaf)[0]

    (got, gradient), (want, wanted) = both(lambda x: of_preset(preset, x)), both(PAPERS[preset])
    assert got == pytest.approx(want, rel=1e-12, abs=1e-14)
    torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-14)
    assert wanted.abs().max() > 1e-3 and not gradient[~MASK].any()


def test_every_preset_is_compared_but_those_with_a_critic_and_that_of_whole_distributions() -> None:
    assert set(PRESETS) - set(PAPERS) == {"ppo", "a2c", "distill_full"}  # test_learn_ppo.py, test_learn_distill.py
