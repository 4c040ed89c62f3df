# SPDX-License-Identifier: Apache-2.0
"""A critic: its values beside log-probs, who learns what from them, and how it is kept."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import double_softmax, eight_samples, make_model, plain_logprobs
from torch import Tensor, nn

from palestra.learn.batch import Rows, Sample, pack, token_weights
from palestra.learn.optim import make_optimizer
from palestra.learn.policy import Policy
from palestra.learn.update import Sums, UpdateConfig, annotate, policy_loss, train_step
from palestra.learn.value import with_values
from palestra.model.lora import LoraConfig, add_lora
from palestra.model.value_head import Critic

T = 0.7
DOUBLE = torch.float64
GAE: dict[str, Any] = {"advantage": "gae", "kl_coef": 0.0, "reduction": "token_mean", "max_grad_norm": 1e9}


def eight_turns() -> list[Sample]:
    """The eight samples, each turn paid something; three episodes cut by a limit."""
    rng, made = np.random.default_rng(3), []
    for i, s in enumerate(eight_samples()):
        own = np.append(s.loss_mask, False)
        ends = tuple(int(t) for t in np.flatnonzero(own[:-1] & ~own[1:]))
        paid = tuple(rng.normal(size=len(ends)).tolist())
        made.append(replace(s, turn_ends=ends, turn_rewards=paid, reward=sum(paid), truncated=i % 3 == 0))
    return made


def recorded(model: Any, spread: float) -> Rows:
    """The eight, with log-probs ``spread`` nats off the model's own as the sampler's."""
    rng, samples = np.random.default_rng(5), []
    for s in eight_turns():
        with torch.no_grad():
            logp = plain_logprobs(model, s.tokens, T).numpy() + rng.normal(0, spread, len(s.tokens))
        samples.append(replace(s, logprobs=np.where(s.loss_mask, logp, 0.0).astype(np.float32)))
    return Rows(tuple(samples))


def with_critic(model: Any, *, separate: bool = False, reference: Any = False) -> Policy:
    """A policy whose critic has seen something: its head is drawn, small."""
    critic = Critic(model, separate=separate)
    noise = torch.Generator().manual_seed(7)
    critic.head.weight.data.copy_(0.3 * torch.randn(critic.head.weight.shape, generator=noise, dtype=DOUBLE))
    critic.head.bias.data.fill_(0.25)
    return Policy(model, critic=critic, reference=reference)


def plain_values(backbone: Any, head: nn.Linear, tokens: Any) -> tuple[Tensor, Tensor]:
    """((T,), ()): entry i is V of tokens[:i], 0 first; and V of all the tokens."""
    ids = torch.as_tensor(np.asarray(tokens), dtype=torch.long)[None]
    with double_softmax():
        hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state[0]
    values = hidden @ head.weight[0] + head.bias
    return torch.cat([values.new_zeros(1), values[:-1]]), values[-1]


# Values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_values_are_those_of_the_state_before_each_token_and_behind_the_last(family: str, separate: bool) -> None:
    model = make_model(family, DOUBLE)
    plain, policy = copy.deepcopy(model), with_critic(model, separate=separate)
    rows = recorded(plain, 0.0)
    seen = with_values(policy, rows, range(8), max_tokens=60, temperature=T)
    assert seen.values is not None and seen.after is not None and seen.old is not None and policy.critic is not None
    for s, values, after, old in zip(rows.samples, seen.values, seen.after, seen.old, strict=True):
        with torch.no_grad():
            want, beyond = plain_values(plain.base_model, policy.critic.head, s.tokens)
        np.testing.assert_allclose(values, np.where(s.loss_mask, want, 0.0), atol=1e-9)
        assert after == pytest.approx(float(beyond), abs=1e-9)
        np.testing.assert_allclose(old, s.logprobs, atol=1e-6)
    alone = with_values(policy, rows, range(8), max_tokens=60)
    assert alone.values is not None and alone.old is None
    np.testing.assert_allclose(np.concatenate(alone.values), np.concatenate(seen.values), atol=1e-12)


@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
def test_a_fresh_critic_says_0_and_changes_nothing_that_an_engine_sees(separate: bool) -> None:
    model = make_model()
    names, params = list(model.state_dict()), [id(p) for p in model.parameters()]
    policy = Policy(model, critic=Critic(model, separate=separate))
    seen = with_values(policy, recorded(make_model(), 0.0), range(8), max_tokens=99, temperature=T)
    assert seen.values is not None and not any(v.any() for v in seen.values) and not any(seen.after or ())
    assert list(model.state_dict()) == names and [id(p) for p in model.parameters()] == params
    assert not any(m._forward_hooks for m in model.modules())
    own = {id(p) for p in policy.critic_parameters()}
    assert len(own) == (2 + (len(list(model.base_model.parameters())) if separate else 0)) and not own & set(params)
    assert [id(p) for p in policy.parameters()][: len(params)] == params


def test_values_are_float32_where_the_model_computes_in_less() -> None:
    model = make_model().to(torch.bfloat16)
    policy = Policy(model, critic=Critic(model))
    rows = recorded(make_model(), 0.0)
    batch = pack(rows, [np.zeros(len(s.tokens)) for s in rows.samples], range(8))
    seen = policy.current_outputs(batch)
    assert seen.values is not None and seen.after is not None and len(seen.after) == 8
    assert (seen.values.dtype, seen.logprobs.dtype) == (torch.float32, torch.float32)


# Who learns what -----------------------------------------------------------------------------------------


def backward(policy: Policy, rows: Rows, config: UpdateConfig) -> None:
    batch = pack(rows, token_weights(rows.samples, config.reduction), range(8))
    policy_loss(policy, batch, config, T, Sums({}), first=True).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "adapter"])
def test_the_value_loss_reaches_the_backbone_it_reads_and_no_other(lora: bool, separate: bool) -> None:
    model: Any = make_model()
    rows = recorded(make_model(), 0.0)
    if lora:
        model = add_lora(model, LoraConfig(r=2))
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.data.fill_(0.01)
    policy = with_critic(model, separate=separate)
    critic = policy.critic
    assert critic is not None
    config = UpdateConfig(advantage="gae", kl_coef=0.0, reduction="token_mean")
    made = annotate(policy, rows, config, temperature=T)
    backward(policy, made.with_(advantages=tuple(np.zeros(len(s.tokens)) for s in rows.samples)), config)

    def moved(parameters: Any) -> int:
        return sum(p.grad is not None and bool(p.grad.any()) for p in parameters)

    assert moved(critic.head.parameters()) == 2, "the head trains in full, beside an adapter too"
    read = [p for name, p in model.named_parameters() if p.requires_grad and "lm_head" not in name]
    assert moved(model.parameters()) == (0 if separate else len(read))
    if separate:
        trains = [p for p in critic.backbone.parameters() if p.requires_grad]
        assert moved(critic.backbone.parameters()) == len(trains) > 0
        frozen = {id(p) for p in model.parameters() if not p.requires_grad}
        held = [p for p in critic.backbone.parameters() if not p.requires_grad]
        assert {id(p) for p in held} <= frozen, "what does not train is not held twice"
        assert bool(held) == lora


@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
def test_gradient_checkpointing_gives_the_same_gradients(separate: bool) -> None:
    found = []
    for checkpointing in (False, True):
        model = make_model("gpt2").train()  # with dropout on, as a warm-up leaves it: off here, in the critic too
        critic = Critic(model, separate=separate)
        critic.head.weight.data.fill_(0.1)
        policy = Policy(model, critic=critic, gradient_checkpointing=checkpointing)
        config = UpdateConfig(advantage="gae", kl_coef=0.0)
        backward(policy, annotate(policy, recorded(make_model("gpt2"), 0.1), config, temperature=T), config)
        found.append([p.grad for p in policy.parameters()])
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(again, plain, rtol=1e-4, atol=1e-6)


def test_a_critic_comes_back_as_it_was_and_another_is_refused() -> None:
    model = make_model()
    critic = with_critic(model, separate=True).critic
    assert critic is not None
    critic.backbone.norm.weight.data.fill_(0.5)
    state = {name: t.clone() for name, t in critic.state().items()}
    fresh = Critic(make_model(seed=1), separate=True)
    fresh.load_state(state)
    assert fresh.state().keys() == state.keys()
    assert all(torch.equal(t, state[name]) for name, t in fresh.state().items())
    with pytest.raises(Exception, match="critic of the checkpoint") as caught:
        Critic(model).load_state(state)
    assert "algorithm.critic" in str(caught.value) and "\n" not in str(caught.value)


def test_a_critic_learns_what_episodes_return() -> None:
    """With the policy's advantages set to 0, what falls is the value loss, and the critic explains the returns."""
    model = make_model()
    policy, rows = with_critic(model, separate=True), recorded(make_model(), 0.0)
    config = UpdateConfig(advantage="gae", gae_lambda=1.0, kl_coef=0.0, value_clip=None, reduction="token_mean")
    adam = torch.optim.Adam(policy.critic_parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda _: 1.0)
    found = []
    for _ in range(30):
        made = annotate(policy, rows, config, temperature=T)
        quiet = made.with_(advantages=tuple(np.zeros(len(s.tokens)) for s in rows.samples))
        found.append(train_step(policy, adam, schedule, quiet, config, temperature=T))
    assert found[-1]["train/value_loss"] < 0.35 * found[0]["train/value_loss"]
    assert found[-1]["train/explained_variance"] > 0.6 > 0.0 > found[0]["train/explained_variance"]


def test_bfloat16_weights_and_their_critic_train_in_one_optimiser() -> None:
    model = make_model().to(torch.bfloat16)
    policy = Policy(model, critic=Critic(model, separate=True))
    config = UpdateConfig(**GAE, old_logprobs="recompute")
    made = annotate(policy, recorded(make_model(), 0.0), config, temperature=T)
    critic = policy.critic_parameters()
    optimizer = make_optimizer(
        policy.parameters(), learning_rate=1e-2, weight_decay=0.0, betas=(0.9, 0.999), critic=critic
    )
    before = [p.detach().clone() for p in policy.parameters()]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    metrics = train_step(policy, optimizer, schedule, made, config, temperature=T)
    assert metrics["train/updates"] == 1.0 and metrics["train/ratio_first_step_max"] < 1e-5
    moved = [not torch.equal(p, b) for p, b in zip(policy.parameters(), before, strict=True)]
    own, names = len(before) - len(critic), list(policy.critic.trainable()) if policy.critic else []
    assert any(moved[:own]), "the policy's bfloat16 weights"
    assert {n for n, m in zip(names, moved[own:], strict=True) if m} == {"head.weight", "head.bias"}, (
        "a head of 0 sends its backbone no gradient yet"
    )
