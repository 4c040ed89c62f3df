# SPDX-License-Identifier: Apache-2.0
"""What a step minimises, with every part switched on, against the same written out on the model's own forward pass."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import double_softmax, eight_samples, make_model, plain_logprobs, sample
from torch import Tensor

from palestra.errors import ConfigError
from palestra.learn.batch import Rows, micro_batches, pack, token_weights
from palestra.learn.policy import Policy
from palestra.learn.update import Sums, UpdateConfig, annotate, policy_loss, train_step, trained_indices

T = 0.7
DOUBLE = torch.float64


def model_and_reference() -> tuple[Any, Any]:
    """A policy and a reference that differ a little."""
    model = make_model(dtype=DOUBLE)
    reference = copy.deepcopy(model)
    noise = torch.Generator().manual_seed(3)
    for p in reference.parameters():
        p.data.add_(0.05 * torch.randn(p.shape, generator=noise, dtype=DOUBLE))
    return model, reference


def recorded(model: Any, spread: float) -> Rows:
    """Eight samples with the model's own log-probs as the sampler's, ``spread`` nats off."""
    rng, samples = np.random.default_rng(5), []
    for s in eight_samples():
        with torch.no_grad():
            logp = plain_logprobs(model, s.tokens, T).numpy() + rng.normal(0, spread, len(s.tokens))
        samples.append(replace(s, logprobs=np.where(s.loss_mask, logp, 0.0).astype(np.float32)))
    return Rows(tuple(samples))


def plain_entropy(model: Any, tokens: Any) -> Tensor:
    """(T,): entropy of the distribution that token i was drawn from; 0 first."""
    ids = torch.as_tensor(np.asarray(tokens), dtype=torch.long)[None]
    with double_softmax():
        p = (model(input_ids=ids, use_cache=False).logits[0, :-1] / T).softmax(-1)
    return torch.cat([p.new_zeros(1), -(p * p.log()).sum(-1)])


def plain_loss(model: Any, reference: Any, rows: Rows, config: UpdateConfig) -> Tensor:
    """Sample by sample. Losses: GSPO, CISPO and the clip as their papers have them."""
    assert rows.advantages is not None
    total = torch.zeros((), dtype=DOUBLE)
    weights = token_weights(rows.samples, config.reduction)
    for s, weight, advantages in zip(rows.samples, weights, rows.advantages, strict=True):
        own = torch.from_numpy(s.loss_mask)
        a, w = (torch.from_numpy(np.asarray(x, np.float64))[own] for x in (advantages, weight))
        new, old = plain_logprobs(model, s.tokens, T)[own], torch.from_numpy(s.logprobs.astype(np.float64))[own]
        ratio = (new - old).mean().exp().expand(len(new)) if config.loss == "gspo" else (new - old).exp()
        if config.loss == "cispo":
            surrogate = -ratio.detach().clamp(1 - config.clip_low, 1 + config.clip_high) * a * new
        else:
            inside = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            surrogate = torch.where(ratio * a < inside * a, -ratio * a, -inside * a)
        with torch.no_grad():
            ref = plain_logprobs(reference, s.tokens, T)[own]
        x = ref - new
        kl = {"k2": 0.5 * x**2, "k3": x.exp() - x - 1}[config.kl]
        kl = kl * (new - old).exp() if config.kl_importance else kl
        bonus = plain_entropy(model, s.tokens)[own]
        total = total + (w * (surrogate + config.kl_coef * kl - config.entropy_coef * bonus)).sum()
    return total


CONFIGS = {
    "gspo, k2, entropy": UpdateConfig(
        loss="gspo", clip_low=0.02, clip_high=0.03, kl="k2", kl_coef=0.3, entropy_coef=0.05
    ),
    "cispo, weighted k3": UpdateConfig(
        loss="cispo", clip_low=1.0, clip_high=0.1, kl_coef=0.3, kl_importance=True, reduction="token_mean"
    ),
    "clip higher, k3, entropy": UpdateConfig(clip_low=0.1, clip_high=0.15, kl_coef=0.3, entropy_coef=0.05),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_ls_003_the_whole_loss_is_the_one_written_out_however_a_step_is_cut(case: str) -> None:
    config = CONFIGS[case]
    plain, reference = model_and_reference()
    model = copy.deepcopy(plain)
    policy = Policy(model, reference=copy.deepcopy(reference))
    rows = annotate(policy, recorded(plain, 0.1), config, temperature=T)
    want = plain_loss(plain, reference, rows, config)
    wanted = torch.autograd.grad(want, list(plain.parameters()))
    weights = token_weights(rows.samples, config.reduction)
    for budget in (8192, 40, 1):
        sums, total = Sums({}), 0.0
        model.zero_grad()
        for chosen in micro_batches(rows.samples, trained_indices(rows), budget):
            loss = policy_loss(policy, pack(rows, weights, chosen, dtype=DOUBLE), config, T, sums, first=True)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        assert total == pytest.approx(float(want.detach()), rel=1e-9)
        for p, w in zip(model.parameters(), wanted, strict=True):
            assert p.grad is not None
            assert float((p.grad - w).norm()) <= 1e-9 * float(w.norm()) + 1e-13
        means = sums.means()
        assert 0 < means["train/clip_fraction"] < 1 and means["train/kl"] > 1e-3


# KL in the reward ------------------------------------------------------------------------------------------


def test_kl_in_the_reward_moves_the_advantages_and_leaves_the_loss_alone() -> None:
    model, reference = model_and_reference()
    policy = Policy(copy.deepcopy(model), reference=copy.deepcopy(reference))
    rows = recorded(model, 0.0)
    rows = Rows((*rows.samples[:-2], replace(rows.samples[-2], trained=False), rows.samples[-1]))
    config = UpdateConfig(advantage="group_mean", kl="k1", kl_coef=0.2, kl_in="reward", max_grad_norm=1e9)
    made = annotate(policy, rows, config, temperature=T)
    paid, kls = {}, []  # a stale row, which only serves its group's baseline, pays too
    for s in rows.samples:
        with torch.no_grad():
            gap = torch.from_numpy(s.logprobs.astype(np.float64)) - plain_logprobs(reference, s.tokens, T)
        kls.append(float(gap[torch.from_numpy(s.loss_mask)].sum()))
        paid[s.episode] = s.reward - 0.2 * kls[-1]
    assert made.advantages is not None
    for s, advantage in zip(rows.samples, made.advantages, strict=True):
        siblings = [paid[other.episode] for other in rows.samples if other.group == s.group]
        want = 0.0 if len(siblings) == 1 else paid[s.episode] - np.mean(siblings)
        np.testing.assert_allclose(advantage, np.where(s.loss_mask, want, 0.0), atol=1e-9)

    weights = token_weights(rows.samples, config.reduction)
    batch = pack(made, weights, trained_indices(made), dtype=DOUBLE)
    assert batch.ref is not None
    got = policy_loss(policy, batch, config, T, Sums({}), first=True)
    without = policy_loss(policy, batch, config.model_copy(update={"kl_coef": 0.0}), T, Sums({}), first=True)
    assert float(got.detach()) == float(without.detach())

    sgd = torch.optim.SGD(policy.parameters(), lr=1e-3)
    metrics = train_step(
        policy, sgd, torch.optim.lr_scheduler.LambdaLR(sgd, lambda _: 1.0), made, config, temperature=T
    )
    tokens = sum(s.trained_tokens for s in rows.samples)
    trained = sum(kl for kl, s in zip(kls, rows.samples, strict=True) if s.trained)
    assert metrics["train/kl"] == pytest.approx(trained / tokens, rel=1e-6)
    assert metrics["train/kl_sum"] == pytest.approx(trained / 7, rel=1e-6)


def test_kl_is_in_the_loss_or_in_the_reward_and_nothing_else_can_be_said() -> None:
    for place, inside in (("loss", (True, False)), ("reward", (False, True))):
        config = UpdateConfig(kl="k1" if place == "reward" else "k2", kl_in=place)  # type: ignore[arg-type]
        assert (config.kl_in_loss, config.kl_in_reward) == inside
    with pytest.raises(ValueError, match="kl_in"):
        UpdateConfig.model_validate({"kl_in": "both"})
    off = UpdateConfig(kl_coef=0.0, kl="k1")
    assert not off.kl_in_loss and not off.kl_in_reward


# What a step leaves out, weighs and divides by -------------------------------------------------------------


def one_step(policy: Policy, rows: Rows, config: UpdateConfig) -> tuple[list[Tensor], dict[str, float]]:
    """The gradient of a step, read off plain gradient descent, and its metrics."""
    before = [p.detach().clone() for p in policy.parameters()]
    sgd = torch.optim.SGD(policy.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda _: 1.0)
    metrics = train_step(policy, sgd, schedule, rows, config, temperature=T)
    return [b - p.detach() for b, p in zip(before, policy.parameters(), strict=True)], metrics


def flat(rows: Rows) -> Rows:
    return Rows(tuple(replace(s, reward=1.0) for s in rows.samples))


def test_rows_without_advantage_still_count_for_the_entropy_bonus() -> None:
    model = make_model(dtype=DOUBLE)
    rows = flat(recorded(model, 0.0))
    config = UpdateConfig(kl_coef=0.0, entropy_coef=0.5, max_grad_norm=1e9, reduction="token_mean")
    policy = Policy(copy.deepcopy(model))
    gradient, metrics = one_step(policy, annotate(policy, rows, config, temperature=T), config)
    assert (metrics["train/updates"], metrics["train/rows_without_signal"]) == (1.0, 0.0)
    spread = torch.cat([plain_entropy(model, s.tokens)[torch.from_numpy(s.loss_mask)] for s in rows.samples])
    assert metrics["train/loss"] == pytest.approx(-0.5 * float(spread.mean().detach()), rel=1e-9)
    for got, want in zip(gradient, torch.autograd.grad(-0.5 * spread.mean(), list(model.parameters())), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-10)


def test_importance_weights_scale_each_tokens_surrogate() -> None:
    model = make_model(dtype=DOUBLE)
    rows = recorded(model, 0.6)
    config = UpdateConfig(
        advantage="group_mean", loss="clip", kl_coef=0.0, reduction="token_mean", max_grad_norm=1e9,
        old_logprobs="recompute", importance="token_truncate", importance_cap=1.5,
    )  # fmt: skip
    policy = Policy(copy.deepcopy(model))
    made = annotate(policy, rows, config, temperature=T)
    gradient, metrics = one_step(policy, made, config)
    assert made.advantages is not None
    total, loss, ratios = sum(s.trained_tokens for s in rows.samples), torch.zeros((), dtype=DOUBLE), []
    for s, a in zip(rows.samples, made.advantages, strict=True):
        own = torch.from_numpy(s.loss_mask)
        new = plain_logprobs(model, s.tokens, T)[own]
        ratio = (new.detach() - torch.from_numpy(s.logprobs.astype(np.float64))[own]).exp()
        ratios += ratio.tolist()
        loss = loss - (ratio.clamp(max=1.5) * torch.from_numpy(a)[own] * (new - new.detach()).exp()).sum() / total
    for got, want in zip(gradient, torch.autograd.grad(loss, list(model.parameters())), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-10)
    assert metrics["train/sampler_ratio_max"] == pytest.approx(max(ratios)) and max(ratios) > 1.5
    assert metrics["train/sampler_ratio_cut"] == pytest.approx(np.mean(np.array(ratios) > 1.5))
    assert metrics["train/ratio_first_step_max"] < 1e-9, "the trainer agrees with itself"


@pytest.mark.parametrize("old", ["recorded", "recompute"])
def test_how_far_sampler_and_trainer_are_apart_is_always_reported(old: Any) -> None:
    model = make_model(dtype=DOUBLE)
    policy = Policy(copy.deepcopy(model))
    rows = recorded(model, 0.3)
    config = UpdateConfig(kl_coef=0.0, old_logprobs=old, loss="reinforce")
    _, metrics = one_step(policy, annotate(policy, rows, config, temperature=T), config)
    # A2 is its group's mean and D0 alone in its group: without advantage, so without a forward pass in the update.
    seen = [s for s in rows.samples if old == "recompute" or s.episode not in ("A2", "D0")]
    apart = [np.exp(plain_logprobs(model, s.tokens, T).detach().numpy() - s.logprobs)[s.loss_mask] for s in seen]
    ratios, name = np.concatenate(apart), "ratio" if old == "recorded" else "sampler_ratio"
    assert metrics[f"train/{name}_min"] == pytest.approx(ratios.min(), rel=1e-6)
    assert metrics[f"train/{name}_mean"] == pytest.approx(ratios.mean(), rel=1e-6)
    assert metrics[f"train/{name}_max"] == pytest.approx(ratios.max(), rel=1e-6)
    first = np.abs(ratios - 1).max() if old == "recorded" else 0.0
    assert metrics["train/ratio_first_step_max"] == pytest.approx(first, rel=1e-6, abs=1e-6)


def test_an_episode_whose_importance_is_masked_is_not_computed() -> None:
    model = make_model(dtype=DOUBLE)
    rows, policy = recorded(model, 0.0), Policy(copy.deepcopy(model))
    far = replace(rows.samples[0], logprobs=np.where(rows.samples[0].loss_mask, rows.samples[0].logprobs - 1, 0.0))
    config = UpdateConfig(kl_coef=0.0, old_logprobs="recompute", importance="sequence_mask")
    made = annotate(policy, Rows((far, *rows.samples[1:])), config, temperature=T)
    _, metrics = one_step(policy, made, config)
    # D0 is alone in its group and A2 is its group's mean: neither has an advantage. A0 would have.
    assert metrics["train/rows_without_signal"] == 3.0 and metrics["train/sampler_ratio_cut"] == pytest.approx(1 / 8)
    assert made.advantages is not None and made.advantages[0].any(), "the rows keep what they were worth"


def test_a_constant_divisor_is_episodes_times_tokens() -> None:
    model = make_model(dtype=DOUBLE)
    rows = recorded(model, 0.0)
    second = replace(rows.samples[1], episode="A0")  # an episode of two rows counts once: seven episodes
    rows = Rows((rows.samples[0], second, *rows.samples[2:]))
    gradients = []
    for changes in ({"reduction": "constant", "divisor_tokens": 50.0}, {"reduction": "token_mean"}):
        config = UpdateConfig.model_validate({"kl_coef": 0.0, "max_grad_norm": 1e9, **changes})
        policy = Policy(copy.deepcopy(model))
        gradients.append(one_step(policy, annotate(policy, rows, config, temperature=T), config)[0])
    total = sum(s.trained_tokens for s in rows.samples)
    for constant, mean in zip(*gradients, strict=True):
        torch.testing.assert_close(constant * 50 * 7, mean * total, rtol=1e-9, atol=1e-12)


def test_a_constant_divisor_must_be_known() -> None:
    model = make_model(dtype=DOUBLE)
    rows, policy = recorded(model, 0.0), Policy(copy.deepcopy(model))
    config = UpdateConfig(reduction="constant", kl_coef=0.0)
    with pytest.raises(ConfigError, match="divisor_tokens"):
        one_step(policy, annotate(policy, rows, config, temperature=T), config)


def test_ls_005_ls_022_an_episode_left_out_is_left_out_of_both_sides_of_a_mean() -> None:
    # 40 tokens, 8 of them in an episode that does not train.
    rows = (sample(range(33), [0, *[1] * 32], episode="a"), sample(range(9), [0, *[1] * 8], episode="b", trained=False))
    weights = token_weights(rows, "token_mean")
    assert sum(w.sum() for w in weights) == pytest.approx(1.0) and not weights[1].any()
    # Rows of sums 6 over 3 tokens and 1 over 1 token are one rollout, 2 over 2 tokens another: (7/4 + 1) / 2.
    rows = (sample(range(4), [0, 1, 1, 1], episode="a"), sample(range(2), [0, 1], episode="a"),
            sample(range(3), [0, 1, 1], episode="b"))  # fmt: skip
    per_token = (np.full(4, 2.0), np.full(2, 1.0), np.full(3, 1.0))
    weights = token_weights(rows, "sequence_mean")
    assert sum(float((w * x).sum()) for w, x in zip(weights, per_token, strict=True)) == pytest.approx(1.375)


def test_ls_024_masked_log_probs_are_never_part_of_a_ratio() -> None:
    row = sample([4, 5, 6], [0, 1, 0], logprobs=[0.0, -1.0, 123.0])
    rows = Rows((row,), advantages=(np.ones(3),), old=(row.logprobs,))
    batch = pack(rows, [np.ones(3)], [0])
    assert batch.old is not None and batch.old.tolist() == [-1.0] and math.isfinite(float(batch.weights.sum()))
