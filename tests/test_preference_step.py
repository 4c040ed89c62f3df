# SPDX-License-Identifier: Apache-2.0
"""Preferences through a real model: scores against plain forward passes, references, cuts, dropout, the baseline."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from small_models import SMALL, make_model, plain_logprobs, sample
from torch import nn

from palestra.learn.batch import Rows
from palestra.learn.policy import Policy, frozen_copy
from palestra.learn.preference import PREFERENCE_LOSSES
from palestra.learn.preference_step import (
    Comparisons,
    PreferenceObjective,
    RewardObjective,
    kto_baseline,
    measure,
    preference_step,
    reply_rewards,
    token_logprobs,
    unit_batches,
)
from palestra.model.lora import LoraConfig, add_lora
from palestra.model.reward_head import RewardModel

RNG = np.random.default_rng(0)


def ids(n: int) -> list[int]:
    return [int(t) for t in RNG.integers(3, 61, n)]


PROMPTS = [ids(9), ids(5), ids(7), ids(12)]
REPLIES = [(ids(4), ids(7)), (ids(6), ids(2)), (ids(3), ids(3)), (ids(10), ids(8))]
TOOL = [0, 1, 1]
"""The first token of each reply comes from a tool: it is context and does not count."""


def pairs() -> Comparisons:
    """Four pairs."""
    rows = []
    for p, (prompt, replies) in enumerate(zip(PROMPTS, REPLIES, strict=True)):
        for side, reply in enumerate(replies):
            mask = [0] * len(prompt) + [0] + [1] * (len(reply) - 1)
            rows.append(sample([*prompt, *reply], mask, group=str(p), episode=f"{p}/{side}"))
    return Comparisons(Rows(tuple(rows)))


def labelled() -> Comparisons:
    """The same replies with labels; each prompt's mismatched reply is the next one of the same side."""
    single, mixed = [], []
    for i in range(8):
        for prompt, out in ((i // 2, single), ((i // 2 - 1) % 4, mixed)):
            reply = REPLIES[i // 2][i % 2]
            mask = [0] * (len(PROMPTS[prompt]) + 1) + [1] * (len(reply) - 1)
            out.append(sample([*PROMPTS[prompt], *reply], mask, group=str(i)))
    return Comparisons(Rows(tuple(single)), np.arange(8) % 2 == 0, Rows(tuple(mixed)))


def objective(policy: Policy, name: str = "dpo", **options: Any) -> PreferenceObjective:
    loss = PREFERENCE_LOSSES[name]
    return PreferenceObjective(policy, loss, loss.config(**options), max_tokens=10_000)


def compared(model: nn.Module, reference: nn.Module | bool = True) -> Policy:
    return Policy(model, reference=reference)


def sgd(model: nn.Module, rate: float = 1e-3) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)


def learn(
    model: nn.Module, target: Any, data: Comparisons, *, max_tokens: int = 10_000, rate: float = 1e-3
) -> dict[str, float]:
    return preference_step(target, data, sgd(model, rate), max_tokens=max_tokens, max_grad_norm=1e9)


def moved(model: nn.Module) -> nn.Module:
    """The same model after something was learned: policy and reference differ."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for i, p in enumerate(twin.parameters()):
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype))
    return twin


# Scores ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_reply_counts_by_the_sum_of_its_own_tokens_log_probs_tool_tokens_left_out(family: str) -> None:
    reference = make_model(family, torch.float64)
    model, data = moved(reference), pairs()
    wanted = []
    for scoring in (model, reference):
        with torch.no_grad():
            logprobs = [plain_logprobs(scoring, s.tokens) for s in data.rows.samples]
        sums = [float(x[torch.from_numpy(s.loss_mask)].sum()) for x, s in zip(logprobs, data.rows.samples, strict=True)]
        wanted.append(np.array(sums))
    ratios = wanted[0] - wanted[1]
    delta = ratios[0::2] - ratios[1::2]
    found = measure(objective(compared(model, reference), beta=0.3), data, max_tokens=10_000)
    assert found["loss"] == pytest.approx(float(np.mean(np.log1p(np.exp(-0.3 * delta)))), rel=1e-9)
    assert found["margin"] == pytest.approx(0.3 * delta.mean(), rel=1e-9)
    assert found["accuracy"] == np.mean(delta > 0) and found["ties"] == 0.0
    assert found["chosen_logprob"] == pytest.approx(wanted[0][0::2].mean(), rel=1e-9)
    assert found["rejected_logprob"] == pytest.approx(wanted[0][1::2].mean(), rel=1e-9)
    tokens = sum(int(s.loss_mask.sum()) for s in data.rows.samples)
    assert found["log_ratio"] == pytest.approx(ratios.sum() / tokens, rel=1e-9)


def test_both_replies_go_through_the_model_together_and_their_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    policy, data = compared(model, False), pairs()
    lengths: list[int] = []
    plain = policy.logprobs

    def counted(batch: Any, **options: Any) -> Any:
        lengths.append(batch.tokens.shape[1])
        return plain(batch, **options)

    monkeypatch.setattr(policy, "logprobs", counted)
    learn(model, objective(policy, "simpo"), data)
    assert lengths == [sum(map(len, PROMPTS)) + sum(len(a) + len(b) for a, b in REPLIES)]


def test_a_pair_is_never_cut_apart_and_its_prompt_is_counted_once() -> None:
    data = pairs()
    units = [data.members(u) for u in range(4)]
    sizes = [len(p) + len(a) + len(b) for p, (a, b) in zip(PROMPTS, REPLIES, strict=True)]  # 20, 13, 13, 30
    assert list(unit_batches(data.rows.samples, units, sizes[0] + sizes[1] + 2)) == [[0, 1], [2], [3]]
    assert list(unit_batches(data.rows.samples, units, 1)) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo", "kto"])
def test_the_cut_into_forward_passes_changes_no_gradient(name: str) -> None:
    reference = make_model(dtype=torch.float64)
    data = labelled() if name == "kto" else pairs()
    weights = []
    for most in (10_000, 30, 1):
        model = moved(reference)
        policy = compared(model, reference if PREFERENCE_LOSSES[name].reference else False)
        learn(model, replace(objective(policy, name), max_tokens=most), data, max_tokens=most, rate=1.0)
        weights.append([p.detach().clone() for p in model.parameters()])
    for other in weights[1:]:
        for one, two in zip(weights[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_a_pair_drawn_twice_in_a_step_counts_twice() -> None:
    reference = make_model(dtype=torch.float64)
    data, target = pairs(), objective(compared(moved(reference), reference))
    once, other = (measure(target, data.take([u]), max_tokens=10_000)["margin"] for u in (1, 3))
    twice = measure(target, data.take([1, 3, 1]), max_tokens=10_000)["margin"]
    assert twice == pytest.approx((2 * once + other) / 3, rel=1e-12)


def test_a_gradient_that_is_not_finite_is_never_applied() -> None:
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    broken = replace(
        PREFERENCE_LOSSES["simpo"],
        function=lambda s, c: replace(PREFERENCE_LOSSES["simpo"].function(s, c), loss=s.chosen * math.inf),
    )
    target = PreferenceObjective(compared(model, False), broken, broken.config(), 10_000)
    metrics = learn(model, target, pairs())
    assert metrics["updates_skipped"] == 1.0
    assert all(map(torch.equal, before, model.parameters()))


# References ------------------------------------------------------------------------------------------------


def dropping() -> Any:
    """A GPT-2 whose own config asks for dropout."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = hf.GPT2Config(
            vocab_size=61, n_embd=16, n_layer=2, n_head=4, n_positions=128, resid_pdrop=0.3, embd_pdrop=0.3
        )
        return hf.GPT2LMHeadModel(config)


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_ls_018_with_dropout_configured_the_first_loss_is_still_log_2_and_accuracy_means_nothing(adapter: bool) -> None:
    model: nn.Module = dropping()
    model = add_lora(model, LoraConfig(dropout=0.4)) if adapter else model
    reference = True if adapter else frozen_copy(model)
    metrics = learn(model, objective(compared(model, reference)), pairs())
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert (metrics["accuracy"], metrics["ties"], metrics["log_ratio"]) == (0.0, 1.0, 0.0)


def test_with_a_fresh_adapter_the_reference_is_the_base_under_it_and_costs_no_copy() -> None:
    base = make_model(dtype=torch.float64)
    plain = copy.deepcopy(base)
    model = add_lora(base, LoraConfig(r=4))
    policy, data = compared(model), pairs()
    target = objective(policy)
    learn(model, target, data, rate=50.0)
    against_base = measure(target, data, max_tokens=10_000)
    assert against_base["loss"] < math.log(2) and against_base["margin"] > 0
    assert measure(objective(Policy(model, reference=plain)), data, max_tokens=10_000) == pytest.approx(against_base)


def test_from_an_sft_adapter_the_reference_is_that_adapter_and_the_distance_at_step_0_is_0() -> None:
    model = add_lora(make_model(dtype=torch.float64), LoraConfig(r=4))
    with torch.no_grad():  # something was learned by SFT
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(generator=torch.Generator().manual_seed(1))
    reference = frozen_copy(model)
    target, data = objective(compared(model, reference)), pairs()
    start = measure(target, data, max_tokens=10_000)
    assert (start["loss"], start["log_ratio"]) == (pytest.approx(math.log(2)), 0.0)
    base = measure(objective(compared(model, True)), data, max_tokens=10_000)
    assert abs(base["log_ratio"]) > 1e-3, "under the disabled adapter the distance would not begin at 0"
    shared = {id(p) for p in model.parameters()} & {id(p) for p in reference.parameters()}
    assert len(shared) == sum(not p.requires_grad for p in model.parameters()), "the base is there once"
    before = [p.detach().clone() for p in reference.parameters()]
    learn(model, target, data, rate=10.0)
    assert measure(target, data, max_tokens=10_000)["loss"] < math.log(2)
    assert all(map(torch.equal, before, reference.parameters())), "the reference stands still"


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_precomputed_log_probs_are_the_reference(name: str) -> None:
    reference, data = make_model(), labelled() if name == "kto" else pairs()
    model = moved(reference)
    online = measure(objective(compared(model, reference), name), data, max_tokens=10_000)
    kept = Policy(copy.deepcopy(reference))
    rows = data.rows.with_(ref=token_logprobs(kept, data.rows, max_tokens=25))
    assert rows.ref is not None and not any(
        r[~s.loss_mask].any() for r, s in zip(rows.ref, rows.samples, strict=True)
    ), "0 where nothing trains"
    mixed = data.mismatched
    if mixed is not None:
        mixed = mixed.with_(ref=token_logprobs(kept, mixed, max_tokens=25))
    offline = measure(
        objective(compared(model, False), name), replace(data, rows=rows, mismatched=mixed), max_tokens=10_000
    )
    assert offline == pytest.approx(online, rel=1e-4, abs=1e-5)


# KTO's baseline --------------------------------------------------------------------------------------------


def test_the_baseline_is_the_mean_log_ratio_of_replies_under_prompts_of_others() -> None:
    reference = make_model(dtype=torch.float64)
    model, data = moved(reference), labelled()
    assert data.mismatched is not None
    ratios = []
    for s in data.mismatched.samples:
        logs = [plain_logprobs(m, s.tokens)[torch.from_numpy(s.loss_mask)].sum() for m in (model, reference)]
        ratios.append((logs[0] - logs[1]).item())
    forth, back = compared(model, reference), compared(reference, model)
    values = [float(kto_baseline(policy, data, 25)) for policy in (forth, back)]
    assert sorted(values) == pytest.approx([0.0, abs(np.mean(ratios))], rel=1e-9), "one way it is negative, and 0 then"


def test_the_baseline_has_no_gradient_and_holds_for_the_whole_step() -> None:
    reference = make_model(dtype=torch.float64)
    target, data = objective(compared(moved(reference), reference), "kto"), labelled()
    ready = target.ready(data)
    assert ready.baseline is not None and not ready.baseline.requires_grad
    apart = [target.outcome(ready, [u], gradient=False).loss for u in range(8)]
    torch.testing.assert_close(torch.cat(apart), target.outcome(ready, range(8), gradient=False).loss)
    told = measure(target, data, max_tokens=25)["baseline_kl"]
    assert told == pytest.approx(float(ready.baseline), abs=1e-12), "as it was for every part of the step"


# Reward model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_reward_is_read_from_the_last_hidden_state_of_the_reply(family: str) -> None:
    plain = make_model(family, torch.float64)
    data = pairs()
    wanted = []
    model = RewardModel(copy.deepcopy(plain), renderer={"name": "plain"}, seed=3)
    for s in data.rows.samples:
        out = plain(input_ids=torch.from_numpy(s.tokens).long()[None], output_hidden_states=True)
        wanted.append((out.hidden_states[-1][0, -1] @ model.head.weight[0]).item())
    found = reply_rewards(model.eval(), data.rows, range(8))
    assert found.tolist() == pytest.approx(wanted, rel=1e-5)


def test_a_pairs_loss_is_of_the_reward_of_the_chosen_reply_less_that_of_the_rejected() -> None:
    model, data = RewardModel(make_model(dtype=torch.float64), renderer={"name": "plain"}), pairs()
    rewards = reply_rewards(model.eval(), data.rows, range(8)).tolist()
    out = RewardObjective(model, center=0.0).outcome(data, [2, 0], gradient=False)
    gaps = [rewards[4] - rewards[5], rewards[0] - rewards[1]]
    assert out.gap.tolist() == pytest.approx(gaps, rel=1e-6) and min(map(abs, gaps)) > 1e-3
    assert out.loss.tolist() == pytest.approx([math.log1p(math.exp(-g)) for g in gaps], rel=1e-6)


def test_one_forward_pass_serves_both_halves_and_the_cut_changes_no_gradient() -> None:
    data, weights = pairs(), []
    calls: list[int] = []
    for most, passes in ((10_000, 1), (1, 4)):
        model = RewardModel(make_model(dtype=torch.float64), renderer={"name": "plain"})
        calls.clear()
        model.register_forward_hook(lambda *_: calls.append(1))
        learn(model, RewardObjective(model, center=0.01), data, max_tokens=most, rate=1.0)
        assert len(calls) == passes
        weights.append([p.detach().clone() for p in model.parameters()])
    for one, two in zip(*weights, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_the_output_head_does_not_train_and_the_scalar_head_is_drawn_by_its_seed() -> None:
    plain = make_model()
    before = torch.random.get_rng_state()
    models = [RewardModel(copy.deepcopy(plain), renderer={"name": "plain"}, seed=s) for s in (0, 0, 1)]
    assert torch.equal(before, torch.random.get_rng_state()), "the global generator is left alone"
    heads = [m.head.weight for m in models]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert heads[0].std().item() == pytest.approx(1 / math.sqrt(SMALL["hidden_size"] + 1), rel=0.5)
    assert not models[0].model.lm_head.weight.requires_grad
