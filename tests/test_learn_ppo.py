# SPDX-License-Identifier: Apache-2.0
"""PPO: the objective by hand and against a second implementation, minibatches, and what a step says of its critic."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import double_softmax, make_model, plain_logprobs
from test_learn_critic import DOUBLE, GAE, T, plain_values, recorded, with_critic
from torch import Tensor, nn

from palestra.learn.batch import Rows, Sample, micro_batches, pack, token_weights
from palestra.learn.policy import Outputs, Policy
from palestra.learn.update import Sums, UpdateConfig, annotate, policy_loss, train_step, trained_indices

# The objective -------------------------------------------------------------------------------------------


class Told(Policy):
    """A policy that says what it is told."""

    def __init__(self, outputs: Outputs) -> None:
        self.told = outputs

    def train_mode(self, *, dropout: bool) -> None:
        pass

    def outputs(self, *_: Any, **__: Any) -> Outputs:
        return self.told


def test_ppo_by_hand() -> None:
    mask = np.array([False, True, True])
    row = Sample(np.array([3, 9, 9], np.int32), mask, np.zeros(3, np.float32), np.zeros(3, np.int32), "g", "a", 0.0)

    def per_token(*numbers: float) -> tuple[Any, ...]:
        return (np.array([0.0, *numbers]),)

    rows = Rows(
        (row,),
        advantages=per_token(1.0, -1.0),
        old=per_token(math.log(0.5), math.log(0.5)),
        values=per_token(0.0, 0.0),
        returns=per_token(1.0, -1.0),
        value_counts=per_token(1.0, 1.0),
    )
    new, values, entropy = (
        torch.tensor(x, dtype=DOUBLE, requires_grad=True)
        for x in ([math.log(0.7), math.log(0.4)], [0.5, 0.1], [0.6, 0.2])
    )
    config = UpdateConfig(
        advantage="gae", kl_coef=0.0, reduction="token_mean", vf_coef=0.5, value_clip=0.2, entropy_coef=0.1
    )
    batch = pack(rows, token_weights(rows.samples, "token_mean"), [0], dtype=DOUBLE)
    sums = Sums({})
    loss = policy_loss(Told(Outputs(new, entropy, values=values)), batch, config, T, sums, first=True)
    # Ratios 1.4 and 0.8: −min(1.4, 1.2) and −min(−0.8, −0.8), mean −0.2.
    # Values: max(0.5², 0.8²) and max(1.1², 1.1²), half of the mean of 0.64 and 1.21: 0.4625.
    assert float(loss.detach()) == pytest.approx(-0.2 + 0.5 * 0.4625 - 0.1 * 0.4, abs=1e-12)
    policy_part, value_part = torch.autograd.grad(loss, [new, values])
    assert policy_part.tolist() == pytest.approx([0.0, 0.5 * 0.8]), "the first is clipped, the second is −A·ρ/2"
    assert value_part.tolist() == pytest.approx([0.0, 0.5 * 0.5 * 1.1])
    means = sums.means()
    assert means["train/value_loss"] == pytest.approx(0.4625) and means["train/value_clip_fraction"] == 0.5


def plain_annotations(reference: Any, backbone: Any, head: nn.Linear, rows: Rows, c: UpdateConfig) -> Any:
    """Per sample advantages (whitened), returns and values at its own tokens: a loop over tokens from the back."""
    found = []
    for s in rows.samples:
        with torch.no_grad():
            v, beyond = plain_values(backbone, head, s.tokens)
            gap = torch.from_numpy(s.logprobs.astype(np.float64)) - plain_logprobs(reference, s.tokens, T)
        at = np.flatnonzero(s.loss_mask)
        later_v, later_a = (float(beyond) if s.truncated else 0.0), 0.0
        advantages: list[float] = []
        for t in at[::-1]:
            paid = s.turn_rewards[s.turn_ends.index(t)] if t in s.turn_ends else 0.0
            paid -= c.kl_coef * float(gap[t])
            later_a = paid + c.gamma * later_v - float(v[t]) + c.gamma * c.gae_lambda * later_a
            later_v = float(v[t])
            advantages.insert(0, later_a)
        found.append((np.array(advantages), v.numpy()[at]))
    every = np.concatenate([a for a, _ in found])
    return [((a - every.mean()) / np.sqrt(every.var() + 1e-8), a + v, v) for a, v in found]


def plain_ppo(model: Any, backbone: Any, head: nn.Linear, rows: Rows, annotated: Any, c: UpdateConfig) -> Tensor:
    """Mean over all tokens of the clipped surrogate, half the clipped squared error and the entropy."""
    total, tokens = torch.zeros((), dtype=DOUBLE), sum(s.trained_tokens for s in rows.samples)
    for s, (advantages, returns, old_values) in zip(rows.samples, annotated, strict=True):
        own = torch.from_numpy(s.loss_mask)
        ids = torch.as_tensor(s.tokens.astype(np.int64))[None]
        with double_softmax():
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        logp = (logits / T).log_softmax(-1)
        spread = -(logp.exp() * logp).sum(-1)[own[1:]]
        new = logp.gather(-1, ids[0, 1:, None])[:, 0][own[1:]]
        ratio = (new - torch.from_numpy(s.logprobs.astype(np.float64))[own]).exp()
        a, r, v0 = (torch.from_numpy(np.asarray(x)) for x in (advantages, returns, old_values))
        surrogate = torch.where(a > 0, torch.minimum(ratio, torch.tensor(1 + c.clip_high, dtype=DOUBLE)) * a,
                                torch.maximum(ratio, torch.tensor(1 - c.clip_low, dtype=DOUBLE)) * a)  # fmt: skip
        v = plain_values(backbone, head, s.tokens)[0][own]
        assert c.value_clip is not None
        near = torch.minimum(torch.maximum(v, v0 - c.value_clip), v0 + c.value_clip)
        error = 0.5 * torch.maximum((v - r) ** 2, (near - r) ** 2)
        total = total + (-surrogate + c.vf_coef * error - c.entropy_coef * spread).sum() / tokens
    return total


@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
def test_the_whole_objective_is_the_one_written_out_however_a_step_is_cut(separate: bool) -> None:
    config = UpdateConfig(
        advantage="gae", gamma=0.97, gae_lambda=0.9, kl="k1", kl_in="reward", kl_coef=0.1, whiten_advantages=True,
        reduction="token_mean", clip_low=0.1, clip_high=0.15, entropy_coef=0.05, vf_coef=0.7, value_clip=0.1,
    )  # fmt: skip
    model = make_model(dtype=DOUBLE)
    reference = copy.deepcopy(model)
    for p in reference.parameters():
        p.data.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3), dtype=DOUBLE))
    plain, rows = copy.deepcopy(model), recorded(model, 0.2)
    policy = with_critic(model, separate=separate, reference=copy.deepcopy(reference))
    critic = policy.critic
    assert critic is not None
    head = copy.deepcopy(critic.head)
    backbone = copy.deepcopy(plain).base_model if separate else plain.base_model

    made = annotate(policy, rows, config, temperature=T)
    want = plain_annotations(reference, backbone, head, rows, config)
    assert made.advantages is not None and made.returns is not None and made.values is not None
    for s, a, r, v, (advantages, returns, values) in zip(
        rows.samples, made.advantages, made.returns, made.values, want, strict=True
    ):
        np.testing.assert_allclose(a[s.loss_mask], advantages, atol=1e-6)
        np.testing.assert_allclose(r[s.loss_mask], returns, atol=1e-6)
        np.testing.assert_allclose(v[s.loss_mask], values, atol=1e-9)

    # As in a later update: the values at the start of the step were others, some beyond the clip.
    rng = np.random.default_rng(11)
    before = tuple(v + np.where(v != 0, rng.normal(0, 0.2, len(v)), 0.0) for v in made.values)
    made = made.with_(values=before)
    exact = [(a[s.loss_mask], r[s.loss_mask], v[s.loss_mask])
             for s, a, r, v in zip(rows.samples, made.advantages, made.returns, before, strict=True)]  # fmt: skip
    loss = plain_ppo(plain, backbone, head, rows, exact, config)
    leaves = [*plain.parameters(), *(backbone.parameters() if separate else ()), head.weight, head.bias]
    wanted = torch.autograd.grad(loss, leaves)
    trained = [*model.parameters(), *(critic.backbone.parameters() if separate else ()), *critic.head.parameters()]
    weights = token_weights(rows.samples, config.reduction)
    for budget in (8192, 40, 1):
        sums, total = Sums({}), 0.0
        for p in trained:
            p.grad = None
        for chosen in micro_batches(rows.samples, trained_indices(rows), budget):
            part = policy_loss(policy, pack(made, weights, chosen, dtype=DOUBLE), config, T, sums, first=True)
            part.backward()  # type: ignore[no-untyped-call]
            total += float(part.detach())
        assert total == pytest.approx(float(loss.detach()), rel=1e-9)
        for p, w in zip(trained, wanted, strict=True):
            assert p.grad is not None
            assert float((p.grad - w).norm()) <= 1e-9 * float(w.norm()) + 1e-13
    means = sums.means()
    assert 0 < means["train/clip_fraction"] < 1 and 0 < means["train/value_clip_fraction"] < 1


def test_by_turns_the_value_loss_is_the_mean_over_tokens_of_their_turns_error() -> None:
    model = make_model(dtype=DOUBLE)
    rows, policy = recorded(model, 0.0), with_critic(model)
    config = UpdateConfig(advantage="gae_turns", kl_coef=0.0, reduction="token_mean", value_clip=None)
    made = annotate(policy, rows, config, temperature=T)
    weights = token_weights(rows.samples, config.reduction)
    sums = Sums({})
    policy_loss(policy, pack(made, weights, range(8), dtype=DOUBLE), config, T, sums, first=True)
    assert made.advantages is not None
    # At the start of a step V − R = −A, the turn's, and every token of a turn has its advantage.
    errors = np.concatenate([a[s.loss_mask] ** 2 for s, a in zip(rows.samples, made.advantages, strict=True)])
    assert sums.means()["train/value_loss"] == pytest.approx(0.5 * errors.mean(), rel=1e-6)


@pytest.mark.parametrize("advantage", ["gae", "gae_turns"])
def test_a_step_without_episodes_is_no_step(advantage: str) -> None:
    model = make_model()
    policy, config = with_critic(model), UpdateConfig(advantage=advantage, kl_coef=0.0, whiten_advantages=True)
    made = annotate(policy, Rows(()), config, temperature=T)
    assert made.advantages == made.values == made.returns == ()
    assert sgd_step(policy, made, config)["train/updates"] == 0.0


def test_advantages_that_need_a_critic_say_so_where_there_is_none() -> None:
    model = make_model()
    rows = recorded(model, 0.0)
    zeros = tuple(np.zeros(len(s.tokens)) for s in rows.samples)
    batch = pack(rows.with_(advantages=zeros, old=zeros), zeros, range(8))
    with pytest.raises(ValueError, match="critic"):
        policy_loss(Policy(model), batch, UpdateConfig(advantage="gae", kl_coef=0.0), T, Sums({}), first=True)


# Steps ---------------------------------------------------------------------------------------------------


def sgd_step(policy: Policy, rows: Rows, config: UpdateConfig, *, seed: int = 0) -> dict[str, float]:
    sgd = torch.optim.SGD(policy.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda _: 1.0)
    return train_step(policy, sgd, schedule, rows, config, temperature=T, seed=seed)


@pytest.mark.parametrize(("minibatches", "dealt"), [(2, "group"), (3, "group"), (5, "episode")])
def test_minibatches_are_steps_on_parts_of_the_groups_each_once_a_pass(minibatches: int, dealt: str) -> None:
    """Groups, whose members share their tokens, stay whole; more parts than groups deal the episodes."""
    model = make_model(dtype=DOUBLE)
    rows = recorded(model, 0.0)
    second = replace(rows.samples[1], episode="A0")  # an episode of two rows stays together
    rows = Rows((rows.samples[0], second, *rows.samples[2:]))
    assert len({s.group for s in rows.samples}) == 4
    config = UpdateConfig(**GAE, minibatches=minibatches, updates_per_batch=2)
    policy = with_critic(copy.deepcopy(model))
    made = annotate(policy, rows, config, temperature=T)
    metrics = sgd_step(policy, made, config, seed=4)
    assert metrics["train/updates"] == 2.0 * minibatches

    # The same as so many plain steps on the parts.
    again = with_critic(copy.deepcopy(model))
    names = list(dict.fromkeys(getattr(s, dealt) for s in rows.samples))
    for number in range(2):
        order = np.random.default_rng([4, number]).permutation(len(names))
        parts = [{names[i] for i in part} for part in np.array_split(order, minibatches)]
        assert sorted(n for part in parts for n in part) == sorted(names)
        for part in parts:
            some = made.only([i for i, s in enumerate(rows.samples) if getattr(s, dealt) in part])
            assert sgd_step(again, some, UpdateConfig(**GAE))["train/updates"] == 1.0
    for a, b in zip(policy.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    other = with_critic(copy.deepcopy(model))
    sgd_step(other, made, config, seed=5)
    assert not torch.equal(other.parameters()[0], policy.parameters()[0])


def test_a_step_says_how_good_the_critic_was() -> None:
    model = make_model(dtype=DOUBLE)
    rows, policy = recorded(model, 0.0), with_critic(model)
    stale = Rows((replace(rows.samples[0], trained=False), *rows.samples[1:]))
    made = annotate(policy, stale, UpdateConfig(**GAE, gae_lambda=0.5), temperature=T)
    metrics = sgd_step(policy, made, UpdateConfig(**GAE, gae_lambda=0.5))
    assert made.values is not None and made.returns is not None
    v, r = (np.concatenate([x[s.loss_mask] for x, s in list(zip(per, rows.samples, strict=True))[1:]])
            for per in (made.values, made.returns))  # fmt: skip
    assert metrics["train/value_mean"] == pytest.approx(v.mean())
    assert metrics["train/return_mean"] == pytest.approx(r.mean())
    assert metrics["train/explained_variance"] == pytest.approx(1 - np.var(r - v) / np.var(r))
    assert metrics["train/value_loss"] == pytest.approx(0.5 * np.mean((v - r) ** 2), rel=1e-6)
    assert metrics["train/rows_without_signal"] == 0.0


def test_whitening_is_over_the_tokens_that_train() -> None:
    model = make_model(dtype=DOUBLE)
    rows, policy = recorded(model, 0.0), with_critic(model)
    stale = Rows((replace(rows.samples[1], trained=False), *rows.samples[2:]))
    made = annotate(policy, stale, UpdateConfig(**GAE, whiten_advantages=True), temperature=T)
    assert made.advantages is not None and not made.advantages[0].any()
    own = np.concatenate([a[s.loss_mask] for s, a in zip(stale.samples[1:], made.advantages[1:], strict=True)])
    assert (own.mean(), own.std()) == (pytest.approx(0, abs=1e-9), pytest.approx(1, abs=1e-6))
