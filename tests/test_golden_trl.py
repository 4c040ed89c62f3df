# SPDX-License-Identifier: Apache-2.0
"""Golden numbers: values and gradients equal those that TRL's own code computes (golden/make_from_trl.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import sample
from torch import Tensor

from palestra.learn.advantage import ADVANTAGES, AdvantageConfig
from palestra.learn.batch import Reduction, Rows, token_weights
from palestra.learn.kl import importance_corrected, k3
from palestra.learn.loss import LOSSES, LossConfig, LossInputs, cross_entropy
from palestra.learn.preference import PREFERENCE_LOSSES, LabelScores, PairScores, pairwise

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "trl.json").read_text(encoding="utf-8"))
POLICY, PAIRS, KTO = GOLDEN["policy_gradients"], GOLDEN["preferences"], GOLDEN["kto"]


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def check(loss: Tensor, leaf: Tensor, case: dict[str, Any], size: float = 1e-5) -> None:
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert loss.item() == pytest.approx(case["loss"], abs=size)
    np.testing.assert_allclose(gradient.numpy(), case["gradient"], atol=size)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("grpo_group", "group_zscore"),
        ("grpo_batch", "group_mean_batch_std"),
        ("grpo_none", "group_mean"),
        ("rloo",) * 2,
    ],
)
def test_advantages(theirs: str, ours: str) -> None:
    groups = GOLDEN["advantages"]["rewards"]
    rows = Rows(
        tuple(
            sample([1, 2], [0, 1], group=str(g), episode=f"{g}/{i}", reward=reward)
            for g, rewards in enumerate(groups)
            for i, reward in enumerate(rewards)
        )
    )
    got = [a[1] for a in ADVANTAGES[ours](rows, AdvantageConfig(eps=1e-4))]
    np.testing.assert_allclose(np.reshape(got, (3, 4)), GOLDEN["advantages"][theirs], atol=1e-5)


OURS: dict[str, tuple[str, Reduction, dict[str, float]]] = {
    "grpo": ("clip", "sequence_mean", {}),
    "grpo_kl": ("clip", "sequence_mean", {}),
    "grpo_kl_corrected": ("clip", "sequence_mean", {}),
    "grpo_clip_higher": ("clip", "sequence_mean", {"clip_high": 0.28}),
    "bnpo": ("clip", "token_mean", {}),
    "dr_grpo": ("clip", "constant", {}),
    "dapo": ("clip", "token_mean", {"clip_high": 0.28}),
    # TRL's epsilon_high is the weight's bound itself (1.5), ours is what lies above 1; neither has a lower bound.
    "cispo": ("cispo", "token_mean", {"clip_low": 1.0, "clip_high": 0.5}),
    "gspo": ("gspo", "sequence_mean", {"clip_low": 0.003, "clip_high": 0.004}),
    "gspo_wide": ("gspo", "sequence_mean", {}),
    # TRL's delta bounds the ratio of every token; where A > 0 the clip at 1.2 bounds it before, so only A < 0 sees it.
    "two_sided": ("clip", "sequence_mean", {"dual_clip": 1.4}),
}


@pytest.mark.parametrize("name", OURS)
def test_policy_gradients(name: str) -> None:
    given, case = POLICY["given"], POLICY["cases"][name]
    mask = torch.tensor(given["mask"], dtype=torch.bool)
    loss_name, reduction, bounds = OURS[name]
    samples = [sample([0] * 7, [0, *row], episode=str(i)) for i, row in enumerate(given["mask"])]
    divisor = len(samples) * float(POLICY["max_completion_length"])
    weights = torch.tensor(np.stack([w[1:] for w in token_weights(samples, reduction, divisor=divisor)]))[mask]
    leaf = tensor(given["now"]).requires_grad_()
    now, old, ref = leaf[mask], tensor(given["old"])[mask], tensor(given["ref"])[mask]
    rows = torch.arange(4)[:, None].expand(4, 6)[mask]
    inputs = LossInputs(now, old, tensor(given["advantages"])[rows], weights, rows)
    loss = LOSSES[loss_name](inputs, LossConfig(**bounds)).loss
    if "beta" in case:
        kl = k3(now, ref)
        loss = (
            loss + case["beta"] * (weights * (importance_corrected(kl, now - old) if "corrected" in case else kl)).sum()
        )
    check(loss, leaf, case)


def test_every_loss_type_is_compared_and_some_tokens_are_clipped() -> None:
    assert set(OURS) == set(POLICY["cases"])
    ratio = (tensor(POLICY["given"]["now"]) - tensor(POLICY["given"]["old"])).exp()
    assert (ratio > 1.28).any() and (ratio < 0.8).any(), "otherwise the clip ranges would not be compared"


@pytest.mark.parametrize("name", ["dpo", "dpo_beta", "cdpo", "ipo"])
def test_preferences_with_a_reference(name: str) -> None:
    given, case = PAIRS["given"], PAIRS["cases"][name]
    leaf = tensor(given["logps"]).requires_grad_()
    (chosen, rejected), counts, ref = leaf.sum(1).split(3), tensor(given["mask"]).sum(1), tensor(given["ref"])
    loss = PREFERENCE_LOSSES["ipo" if name == "ipo" else "dpo"]
    options = {key: case[key] for key in ("beta", "label_smoothing") if key in case}
    out = loss.function(PairScores(chosen, rejected, *counts.split(3), *ref.split(3)), loss.config(**options))
    # What pads a reply is no token: TRL gives it a gradient and masks it in the model, here it has no place.
    (gradient,) = torch.autograd.grad(out.loss.mean(), leaf)
    assert out.loss.mean().item() == pytest.approx(case["loss"], abs=1e-5)
    own = tensor(given["mask"]).bool()
    np.testing.assert_allclose(gradient[own].numpy(), tensor(case["gradient"])[own].numpy(), atol=1e-5)


def per_token(case: dict[str, Any], name: str, **options: float) -> None:
    """A loss without a reference, on mean log-probs per token; TRL computes ORPO's odds in float32."""
    given = PAIRS["given"]
    leaf = (tensor(given["logps"]).sum(1) / tensor(given["mask"]).sum(1)).requires_grad_()
    chosen, rejected = leaf.split(3)
    loss = PREFERENCE_LOSSES[name]
    out = loss.function(PairScores(chosen, rejected, torch.ones(3), torch.ones(3)), loss.config(**options)).loss
    # TRL adds ORPO's supervised term outside the function compared here.
    check((out + chosen if name == "orpo" else out).mean(), leaf, case)


def test_simpo() -> None:
    case = PAIRS["cases"]["simpo"]
    per_token(case, "simpo", beta=case["beta"], gamma=case["gamma"])


def test_orpo() -> None:
    case = PAIRS["cases"]["orpo_odds"]
    per_token(case, "orpo", odds_weight=case["beta"])


def test_kto() -> None:
    given = KTO["given"]
    leaf = tensor(given["logps"]).requires_grad_()
    baseline = (tensor(given["kl"]) - tensor(given["ref_kl"])).mean().clamp(min=0)
    scores = LabelScores(leaf.sum(1), tensor(given["ref"]), torch.tensor(given["label"]), baseline)
    loss = PREFERENCE_LOSSES["kto"]
    out = loss.function(scores, loss.config(beta=KTO["beta"], undesirable_weight=KTO["undesirable_weight"]))
    check(out.loss.mean(), leaf, KTO)


def test_supervised() -> None:
    case = GOLDEN["sft"]
    mask = torch.tensor(case["mask"], dtype=torch.bool)
    samples = [sample([0] * 6, [0, *row], episode=str(i)) for i, row in enumerate(case["mask"])]
    weights = torch.tensor(np.stack([w[1:] for w in token_weights(samples, "token_mean")]))[mask]
    leaf = tensor(case["logps"]).requires_grad_()
    loss = cross_entropy(leaf[mask], weights)
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert loss.item() == pytest.approx(case["loss"], abs=1e-5)
    np.testing.assert_allclose(gradient[mask].numpy(), tensor(case["gradient"])[mask].numpy(), atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "centred"])
def test_reward_model(name: str) -> None:
    case = GOLDEN["reward_model"][name]
    leaf = tensor(GOLDEN["reward_model"]["rewards"]).requires_grad_()
    chosen, rejected = leaf.split(4)
    check(pairwise(chosen, rejected, case["centre"]).loss.mean(), leaf, case)
