# SPDX-License-Identifier: Apache-2.0
"""One step of learning on rows that the real engine sampled: what moves, what must not, and what is reported."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import make_model, sample
from torch import nn

from palestra.engine.base import SamplingParams
from palestra.engine.local import LocalEngine
from palestra.errors import ModelError
from palestra.learn.batch import Rows, Sample, pack, token_weights
from palestra.learn.policy import Policy
from palestra.learn.update import (
    Sums,
    UpdateConfig,
    annotate,
    linear_schedule,
    make_optimizer,
    policy_loss,
    train_step,
)
from palestra.model.lora import LoraConfig, add_lora

TEMPERATURE = 0.7


def played(model: nn.Module, *, temperature: float = TEMPERATURE) -> Rows:
    """Two groups of three, two turns each, sampled by the engine on the model's own parameters; rewards 0, 1, 2."""
    engine = LocalEngine(model, lambda ids: "")

    async def one(group: int, member: int) -> Sample:
        tokens: list[int] = [7 + group] * (5 + 3 * group)
        mask, logprobs = [0] * len(tokens), [0.0] * len(tokens)
        for turn in range(2):
            params = SamplingParams(4 + member, temperature=temperature, seed=100 * group + 10 * member + turn)
            said = await engine.sample(np.array(tokens, np.int32), params, session=f"{group}/{member}")
            for span in said.spans:
                assert span.logprobs is not None
                tokens, mask = [*tokens, *span.tokens.tolist()], [*mask, *[1] * len(span)]
                logprobs = [*logprobs, *span.logprobs.tolist()]
            tokens, mask, logprobs = [*tokens, 9, 10], [*mask, 0, 0], [*logprobs, 0.0, 0.0]
        name = f"{group}/{member}"
        return sample(tokens, mask, group=str(group), episode=name, reward=float(member), logprobs=logprobs)

    async def every() -> list[Sample]:
        return list(await asyncio.gather(*(one(g, m) for g in range(2) for m in range(3))))

    samples = asyncio.run(every())
    engine.close()
    return Rows(tuple(samples))


def optimisers(policy: Policy, rate: float = 1e-2, steps: int = 10) -> tuple[Any, Any]:
    optimizer = make_optimizer(policy.parameters(), learning_rate=rate, weight_decay=0.0, betas=(0.9, 0.999))
    return optimizer, linear_schedule(optimizer, steps=steps, warmup_ratio=0.0)


def learn(policy: Policy, rows: Rows, config: UpdateConfig, optimizer: Any = None, scheduler: Any = None) -> Any:
    if optimizer is None:
        optimizer, scheduler = optimisers(policy)
    rows = annotate(policy, rows, config, temperature=TEMPERATURE)
    return train_step(policy, optimizer, scheduler, rows, config, temperature=TEMPERATURE)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def flat(rows: Rows) -> Rows:
    """The same rows, all with the same reward."""
    return Rows(
        tuple(sample(s.tokens, s.loss_mask, group=s.group, episode=s.episode, reward=1.0) for s in rows.samples)
    )


# Whether and what to update --------------------------------------------------------------------------------


def test_ls_006_a_step_without_signal_is_no_step_and_says_so() -> None:
    policy = Policy(make_model())
    optimizer, scheduler = optimisers(policy)
    config, rows = UpdateConfig(kl_coef=0.0), played(policy.model)
    learn(policy, rows, config, optimizer, scheduler)
    before, moments = weights(policy.model), copy.deepcopy(optimizer.state_dict())
    metrics = learn(policy, flat(rows), config, optimizer, scheduler)
    assert (metrics["train/updates"], metrics["train/updates_skipped"]) == (0.0, 1.0)
    assert same(policy.model, before), "not even Adam's momentum may move a weight"
    assert all(
        map(torch.equal, *([v["exp_avg"] for v in s["state"].values()] for s in (moments, optimizer.state_dict())))
    )


def test_rows_without_advantage_are_not_computed_and_the_gradient_is_the_same() -> None:
    """One of the two groups has a signal. The step equals the gradient of the whole batch, flat group included."""
    policy = Policy(make_model().double())
    rows, config = played(policy.model), UpdateConfig(kl_coef=0.0, max_grad_norm=1e9)
    rows = Rows(tuple(s if s.group == "0" else replace(s, reward=1.0) for s in rows.samples))
    rows = annotate(policy, rows, config, temperature=TEMPERATURE)
    weights_ = token_weights(rows.samples, config.reduction)
    whole = pack(rows, weights_, range(len(rows)), dtype=torch.float64)
    policy_loss(policy, whole, config, TEMPERATURE, Sums({}), first=True).backward()
    wanted = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
    before = [p.detach().clone() for p in policy.parameters()]
    sgd = torch.optim.SGD(policy.parameters(), lr=1.0)
    metrics = train_step(policy, sgd, linear_schedule(sgd, steps=10, warmup_ratio=0.0), rows, config, temperature=0.7)
    assert metrics["train/rows_without_signal"] == 4.0  # the flat three, and the average member of the other group
    for p, old, gradient in zip(policy.parameters(), before, wanted, strict=True):
        torch.testing.assert_close(old - p.detach(), gradient, rtol=0, atol=1e-12)


def test_ls_006_a_step_without_trained_tokens_is_no_step_even_with_a_kl_term() -> None:
    policy = Policy(make_model(), reference=True)
    rows = Rows((sample([5, 6, 7], [0, 0, 0]), sample([5, 6], [0, 1], episode="b", trained=False)))
    before = weights(policy.model)
    metrics = learn(policy, rows, UpdateConfig(kl_coef=0.1))
    assert metrics["train/tokens"] == metrics["train/updates"] == 0.0 and metrics["train/updates_skipped"] == 1.0
    assert same(policy.model, before)


def test_without_advantages_the_kl_term_still_pulls_back() -> None:
    policy = Policy(make_model(), reference=True)
    rows = played(policy.model)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    before = weights(policy.model)
    metrics = learn(policy, flat(rows), UpdateConfig(kl_coef=0.1))
    assert metrics["train/updates"] == 1.0 and metrics["train/kl"] > 0 and not same(policy.model, before)


@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_never_applied(junk: float) -> None:
    policy = Policy(make_model())
    rows = played(policy.model)
    config = UpdateConfig(kl_coef=0.0, updates_per_batch=2)
    rows = annotate(policy, rows, config, temperature=TEMPERATURE)
    assert rows.advantages is not None
    broken = (np.where(rows.samples[0].loss_mask, junk, 0.0), *rows.advantages[1:])
    optimizer, scheduler = optimisers(policy)
    before = weights(policy.model)
    metrics = train_step(policy, optimizer, scheduler, rows.with_(advantages=broken), config, temperature=TEMPERATURE)
    assert (metrics["train/updates"], metrics["train/updates_skipped"]) == (0.0, 2.0)
    assert same(policy.model, before) and not optimizer.state


def test_a_step_makes_the_better_answers_likelier() -> None:
    policy = Policy(make_model())
    rows = played(policy.model)
    metrics = learn(policy, rows, UpdateConfig(kl_coef=0.0, updates_per_batch=2))
    assert metrics["train/updates"] == 2.0 and metrics["train/tokens"] == 2 * 2 * (4 + 5 + 6)
    batch = pack(rows, [np.zeros(len(s.tokens)) for s in rows.samples], range(6))
    with torch.no_grad():
        now = policy.logprobs(batch, temperature=TEMPERATURE)[0]
    for at, i in enumerate(batch.indices):
        s = rows.samples[i]
        gained = float(now[batch.sequence == at].sum()) - float(s.logprobs[s.loss_mask].sum())
        assert np.sign(gained) == np.sign(s.reward - 1) or s.reward == 1


def test_the_gradient_norm_is_clipped_before_the_step() -> None:
    policy = Policy(make_model())
    rows = played(policy.model)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    before = weights(policy.model)
    metrics = learn(policy, rows, UpdateConfig(kl_coef=0.0, max_grad_norm=1e-3), optimizer, scheduler)
    moved = torch.cat([(p.detach() - before[n]).flatten() for n, p in policy.model.named_parameters()])
    assert metrics["train/grad_norm"] > 1e-3
    assert float(moved.norm()) == pytest.approx(1e-3, rel=1e-2)


# Sampler and trainer agree ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_nm_008_the_first_ratio_is_one_even_where_dropout_is_configured(family: str) -> None:
    model = make_model(family)
    if family == "gpt2":
        assert model.config.attn_pdrop == model.config.resid_pdrop == model.config.embd_pdrop == 0.1
    policy = Policy(model)
    metrics = learn(policy, played(model), UpdateConfig(kl_coef=0.0))
    assert metrics["train/ratio_first_step_max"] < 1e-5
    assert metrics["train/ratio_mean"] == pytest.approx(1.0, abs=1e-5)


def test_the_first_ratio_betrays_another_temperature() -> None:
    policy = Policy(make_model())
    metrics = learn(policy, played(policy.model, temperature=1.0), UpdateConfig(kl_coef=0.0))
    assert metrics["train/ratio_first_step_max"] > 0.05


def test_recomputed_log_probs_equal_the_recorded_ones() -> None:
    policy = Policy(make_model("gpt2"))
    rows = played(policy.model)
    made = {
        kind: annotate(policy, rows, UpdateConfig(kl_coef=0.0, old_logprobs=kind), temperature=TEMPERATURE).old
        for kind in ("recorded", "recompute")
    }
    assert made["recorded"] is not None and made["recompute"] is not None
    for recorded, recomputed in zip(made["recorded"], made["recompute"], strict=True):
        np.testing.assert_allclose(recomputed, recorded, atol=1e-5)


@pytest.mark.parametrize("adapter", [True, False], ids=["fresh adapter", "full fine-tuning"])
def test_kl_007_policy_and_reference_begin_as_the_same_function(adapter: bool) -> None:
    model: Any = make_model()
    model = add_lora(model, LoraConfig(r=2)) if adapter else model
    policy = Policy(model, reference=True)
    rows, config = played(model), UpdateConfig(kl_coef=0.05)
    optimizer, scheduler = optimisers(policy)
    first = learn(policy, rows, config, optimizer, scheduler)
    second = learn(policy, rows, config, optimizer, scheduler)
    assert first["train/kl"] == 0.0
    assert second["train/kl"] > 1e-6


def test_cf_005_without_a_kl_term_there_is_no_reference() -> None:
    policy = Policy(make_model())
    rows = annotate(policy, played(policy.model), UpdateConfig(kl_coef=0.0), temperature=TEMPERATURE)
    assert rows.ref is None
    with pytest.raises(ModelError, match="without a reference"):
        annotate(policy, rows, UpdateConfig(kl_coef=0.1), temperature=TEMPERATURE)


# Precision, memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [True, False], ids=["adapter", "full"])
def test_gradient_checkpointing_gives_the_same_gradients(adapter: bool) -> None:
    grads = []
    for checkpointing in (False, True):
        model: Any = make_model("gpt2")  # with dropout configured, which must stay off
        if adapter:
            model = add_lora(model, LoraConfig(r=2))
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.data.fill_(0.01)
        policy = Policy(model, gradient_checkpointing=checkpointing)
        rows = annotate(policy, played(model), UpdateConfig(kl_coef=0.0), temperature=TEMPERATURE)
        optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        before = weights(model)
        config = UpdateConfig(kl_coef=0.0, max_grad_norm=1e9)
        metrics = train_step(policy, optimizer, scheduler, rows, config, temperature=TEMPERATURE)
        assert metrics["train/ratio_first_step_max"] < 1e-5
        grads.append({n: before[n] - p.detach() for n, p in model.named_parameters()})
    assert any(float(g.norm()) > 0 for g in grads[0].values())
    for name, want in grads[0].items():
        torch.testing.assert_close(grads[1][name], want, rtol=1e-4, atol=1e-6, msg=name)


def test_bfloat16_compute_keeps_float32_weights_and_log_probs() -> None:
    policy = Policy(make_model(), compute_dtype=torch.bfloat16)
    rows = played(policy.model)
    metrics = learn(policy, rows, UpdateConfig(kl_coef=0.0, old_logprobs="recompute"))
    assert metrics["train/updates"] == 1.0 and np.isfinite(metrics["train/loss"])
    assert metrics["train/ratio_first_step_max"] < 1e-5, "recomputed in the same precision"
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    batch = pack(rows, [np.zeros(len(s.tokens)) for s in rows.samples], range(6))
    assert policy.current_logprobs(batch).dtype == torch.float32


# Optimiser and schedule ------------------------------------------------------------------------------------


def test_the_schedule_rises_then_falls_to_zero() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = linear_schedule(optimizer, steps=10, warmup_ratio=0.2)
    rates = []
    for _ in range(11):
        rates.append(optimizer.param_groups[0]["lr"] / 2.0)
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0])


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    model = make_model("gpt2")
    optimizer = make_optimizer(list(model.parameters()), learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    decays = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert len(decays) == len(list(model.parameters()))
    for name, p in model.named_parameters():
        assert decays[id(p)] == (0.0 if name.endswith("bias") or ".ln_" in name else 0.1), name
