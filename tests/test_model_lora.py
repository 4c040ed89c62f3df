# SPDX-License-Identifier: Apache-2.0
"""Adapters: what learns, what stays as it was, what the reference is, what an export holds."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from palestra.errors import ModelError
from palestra.model.lora import (
    LoraConfig,
    Reference,
    add_lora,
    base_model,
    is_adapter,
    merged_copy,
    trainable_parameters,
    trainable_report,
)
from palestra.model.tiny import calculator_tokenizer, tiny_llama

IDS = torch.tensor([[13, 14, 15, 16, 17]])


def small(seed: int = 0) -> LlamaForCausalLM:
    return tiny_llama(calculator_tokenizer(), hidden=32, layers=2, heads=4, intermediate=48, seed=seed)


def train(model: nn.Module, steps: int, lr: float = 1e-2) -> None:
    optimizer = torch.optim.AdamW(trainable_parameters(model), lr=lr)
    for _ in range(steps):
        loss = model(IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


class OneMatrix(nn.Module):
    """A single 4096 × 4096 projection, enough of a model for peft to adapt."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"model_type": "matrix", "tie_word_embeddings": False}
        self.q_proj = nn.utils.skip_init(nn.Linear, 4096, 4096, bias=False)

    def prepare_inputs_for_generation(self) -> None:
        raise NotImplementedError("never generates")


def test_rank_8_on_a_4096_by_4096_matrix_trains_65536_of_16777216_numbers() -> None:
    model = add_lora(OneMatrix(), LoraConfig(r=8, target_modules=("q_proj",)))
    report = trainable_report(model)
    assert report.trainable == 65_536 == 8 * (4096 + 4096)
    assert report.total - report.trainable == 16_777_216


def test_alpha_defaults_to_twice_the_rank_and_scales_the_update() -> None:
    for alpha, expected in ((None, 2.0), (8, 0.5), (16, 1.0)):
        model = add_lora(small(), LoraConfig(r=16, alpha=alpha))
        assert model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj").scaling == {"default": expected}


def test_attention_and_all_linear_choose_the_projections_they_name() -> None:
    def adapted(choice: str) -> set[str]:
        model = add_lora(small(), LoraConfig(r=2, target_modules=choice))
        return {n.split(".lora_")[0].split(".")[-1] for n, p in model.named_parameters() if p.requires_grad}

    assert adapted("attention") == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert adapted("all-linear") == adapted("attention") | {"gate_proj", "up_proj", "down_proj"}


def test_attention_tells_gpt2_s_two_c_proj_apart() -> None:
    config = GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    model = add_lora(GPT2LMHeadModel(config), LoraConfig(r=2))
    adapted = {n for n, p in model.named_parameters() if p.requires_grad}
    assert any("attn.c_proj" in n for n in adapted) and any("attn.c_attn" in n for n in adapted)
    assert not any("mlp" in n for n in adapted)


def test_a_fresh_adapter_changes_nothing_and_trains_only_itself() -> None:
    plain = small()
    before = logits(plain)
    base = {n: p.clone() for n, p in plain.named_parameters()}
    model = add_lora(plain, LoraConfig(r=4))
    assert torch.equal(logits(model), before)
    train(model, 3)
    assert not torch.equal(logits(model), before)
    for name, parameter in base_model(model).named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, base[name.replace(".base_layer", "")])


def test_the_same_seed_draws_the_same_adapter_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    one, two, other = (add_lora(small(), LoraConfig(r=2), seed=s) for s in (5, 5, 6))
    assert torch.equal(torch.rand(1), expected)
    drawn = [torch.cat([p.flatten() for p in trainable_parameters(m)]) for m in (one, two, other)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_modules_that_do_not_exist_are_an_error_that_lists_those_that_do() -> None:
    with pytest.raises(ModelError, match=r"c_attn.*it has: down_proj, gate_proj, k_proj"):
        add_lora(small(), LoraConfig(target_modules=("c_attn",)))


def test_a_second_adapter_on_top_is_refused() -> None:
    with pytest.raises(ModelError, match="already carries an adapter"):
        add_lora(add_lora(small(), LoraConfig(r=2)), LoraConfig(r=2))


def test_cp_007_a_model_without_trainable_parameters_is_refused() -> None:
    model = add_lora(small(), LoraConfig(r=2))
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameters"):
        trainable_parameters(model)
    with pytest.raises(ModelError, match="no trainable parameters"):
        trainable_report(model)


def test_full_fine_tuning_counts_tied_weights_once() -> None:
    model = small()
    report = trainable_report(model)
    assert report.trainable == report.total == sum(p.numel() for p in model.parameters())


def test_the_reference_of_an_adapter_is_the_base_under_it_and_costs_no_copy() -> None:
    plain = small()
    before = logits(plain)
    model = add_lora(plain, LoraConfig(r=4, dropout=0.5))
    reference = Reference(model)
    train(model, 3)
    trained = logits(model.eval())
    with reference.using(model.train()) as frozen:
        assert {id(p) for p in frozen.parameters()} == {id(p) for p in model.parameters()}
        assert torch.equal(frozen(IDS).logits, before)
    assert model.training and len(trainable_parameters(model)) == 2 * 4 * 2
    assert torch.equal(logits(model.eval()), trained)


def test_the_reference_leaves_frozen_adapter_weights_frozen() -> None:
    model = add_lora(small(), LoraConfig(r=4))
    model.requires_grad_(False)
    with Reference(model).using(model):
        pass
    assert not any(p.requires_grad for p in model.parameters())


def test_the_reference_of_full_fine_tuning_is_a_copy_that_training_does_not_move() -> None:
    model = small()
    before = logits(model)
    reference = Reference(model)
    train(model, 2)
    with reference.using(model) as frozen:
        assert torch.equal(frozen(IDS).logits, before)
        assert not any(p.requires_grad for p in frozen.parameters())
    assert not torch.equal(logits(model), before)


def test_cp_005_merging_keeps_the_update_and_does_not_touch_the_base() -> None:
    model = add_lora(small(), LoraConfig(r=4))
    train(model, 5)
    model.eval()
    with_adapter = logits(model)
    bits = copy.deepcopy(model.state_dict())
    merged = merged_copy(model)
    assert not is_adapter(merged) and is_adapter(model)
    assert (logits(merged) - with_adapter).abs().max() <= 1e-5
    assert all(torch.equal(bits[name], now) for name, now in model.state_dict().items())
    assert torch.equal(logits(model), with_adapter)
    plain = logits(small())
    with model.disable_adapter():
        assert (logits(model) - plain).abs().max() <= 1e-6
    assert (logits(merged) - plain).abs().max() > 1e-3, "the update must not be lost on the way"


def test_merging_a_model_without_an_adapter_is_a_copy_with_its_ties() -> None:
    model = small()
    twin = merged_copy(model)
    assert twin is not model and torch.equal(logits(twin), logits(model))
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
