# SPDX-License-Identifier: Apache-2.0
"""Packed weights: the same numbers as the plain layer, the newest weights, and only where it pays."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import peft
import pytest
import torch
from small_models import plain_logprobs
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from palestra.engine.base import Completion, SamplingParams
from palestra.engine.local import EngineConfig, LocalEngine
from palestra.engine.packing import MIN_ELEMENTS, PackedLinear, _is_plain_adapter, pack_linears
from palestra.model import kernels
from palestra.model.lora import quiet_peft
from palestra.model.tiny import calculator_tokenizer, tiny_llama

needs_onednn = pytest.mark.skipif(not pack_linears(nn.Linear(512, 512)), reason="this torch has no packed products")


def wide() -> LlamaForCausalLM:
    """One layer whose feed-forward weights are just large enough."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=MIN_ELEMENTS // 256, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def said(engine: LocalEngine, seed: int = 0) -> Completion:
    prompt = np.arange(3, 20, dtype=np.int32)
    return asyncio.run(engine.sample(prompt, SamplingParams(12, seed=seed), session=str(seed)))


def gap(model: nn.Module, completion: Completion) -> float:
    (span,) = completion.spans
    assert span.logprobs is not None
    tokens = np.concatenate([np.arange(3, 20), span.tokens])
    with torch.no_grad():
        want = plain_logprobs(model, tokens)[17:].numpy()
    return float(np.abs(want - span.logprobs).max())


@pytest.mark.skipif(not kernels.multiplies(torch.ones(8, 8, dtype=torch.bfloat16)), reason="oneDNN's are quicker")
def test_a_layer_in_bfloat16_multiplies_without_rounding_in_between() -> None:
    layer, x = nn.Linear(512, 513).bfloat16(), torch.randn(3, 5, 512).bfloat16()
    with torch.no_grad():
        want = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
        assert len(pack_linears(nn.ModuleList([layer]))) == 1
        got = layer(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-4)  # half of its last bit, with room


@needs_onednn
def test_only_large_layers_are_packed_and_their_sums_are_those_of_the_plain_layer() -> None:
    large, small = nn.Linear(512, 512), nn.Linear(16, 16)
    x = torch.randn(3, 5, 512)
    with torch.no_grad():
        want = large(x)
        packed = pack_linears(nn.ModuleList([large, small]))
        assert len(packed) == 1
        torch.testing.assert_close(large(x), want, rtol=1e-5, atol=1e-5)
    assert pack_linears(tiny_llama(calculator_tokenizer())) == []


@needs_onednn
def test_a_row_has_the_same_bits_beside_any_number_of_others() -> None:
    layer = nn.Linear(512, 768)
    rows = torch.randn(256, 512)
    with torch.inference_mode():
        packed = PackedLinear(layer)
        first = packed(rows[:8])
        assert all(torch.equal(packed(rows[:n])[:8], first) for n in range(16, 257, 24))


def shifted_adapter(model: nn.Module, **options: Any) -> Any:
    """``model`` under an adapter whose B is not zero."""
    config = peft.LoraConfig(r=4, lora_alpha=12, **options)
    with quiet_peft():
        adapted: Any = peft.get_peft_model(cast(Any, model), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return adapted.eval()


class Attention(nn.Module):
    """Three projections of one input, as models name them."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(512, n, bias=False) for n in (512, 128, 128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


@needs_onednn
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj"]])
def test_an_adapter_is_part_of_the_packed_weight(targets: list[str]) -> None:
    torch.manual_seed(1)
    model = shifted_adapter(Attention(), target_modules=targets, lora_dropout=0.5)
    x = torch.randn(3, 5, 512)
    with torch.no_grad():
        want = model(x)
        (packed,) = pack_linears(model)
        calls = sum(isinstance(m, nn.Linear) and "forward" in vars(m) for m in model.modules())
        assert calls == 3 - len(targets)  # the others' adapters are what is replaced
        torch.testing.assert_close(model(x), want, rtol=1e-5, atol=1e-5)
        before = {n: p.clone() for n, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.mul_(2.0)  # s·B·2A: twice the adapter's part
        base = torch.cat([x @ before[name].T for name in weights(targets)], -1)
        torch.testing.assert_close(model(x), base + 2 * (want - base), rtol=1e-5, atol=1e-5)
    assert packed


def weights(targets: list[str]) -> list[str]:
    names = ("q_proj", "k_proj", "v_proj")
    return [f"base_model.model.{n}.{'base_layer.' if n in targets else ''}weight" for n in names]


@needs_onednn
def test_what_is_more_than_an_adapter_keeps_its_own_forward_around_the_packed_layer() -> None:
    torch.manual_seed(1)
    model = shifted_adapter(Attention(), target_modules=["q_proj"], use_dora=True)
    x = torch.randn(3, 5, 512)
    with torch.no_grad():
        want = model(x)
        pack_linears(model)
        assert "forward" not in vars(model.base_model.model.q_proj)
        assert "forward" in vars(model.base_model.model.q_proj.base_layer)
        torch.testing.assert_close(model(x), want, rtol=1e-5, atol=1e-5)


def test_an_adapter_that_is_not_float32_is_not_added_to_its_weight() -> None:
    """In bfloat16 a weight of 1 swallows a change of 1e-3: the engine would sample as if nothing had been learned."""
    layer = shifted_adapter(Attention(), target_modules=["q_proj"]).base_model.model.q_proj
    assert _is_plain_adapter(layer)
    assert not _is_plain_adapter(layer.to(torch.bfloat16))


@needs_onednn
def test_an_engine_samples_from_an_adapter_and_from_its_next_weights() -> None:
    model = shifted_adapter(wide(), target_modules="all-linear", task_type="CAUSAL_LM")
    engine = LocalEngine(model, lambda tokens: "")
    assert gap(model, said(engine)) < 1e-4
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-3.0)
    engine.load_weights(model, 1)
    assert gap(model, said(engine, 1)) < 1e-4
    with model.disable_adapter():  # the trainer's matter: its reference is the base
        assert gap(model, said(engine, 2)) > 1e-2
    engine.close()


@needs_onednn
def test_new_weights_are_used_at_once_however_they_were_written() -> None:
    layer = nn.Linear(512, 512, bias=False)
    packed, x = PackedLinear(layer), torch.randn(8, 512)
    with torch.no_grad():
        before = packed(x)
        layer.weight.mul_(2.0)
        torch.testing.assert_close(packed(x), 2 * before, rtol=1e-5, atol=1e-5)
        layer.weight.data.mul_(2.0)  # torch does not count this one
        packed.forget()
        torch.testing.assert_close(packed(x), 4 * before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pack", [True, False])
def test_an_engine_with_packed_weights_scores_as_the_model_does_before_and_after_an_update(pack: bool) -> None:
    model = wide()
    engine = LocalEngine(model, lambda ids: "", EngineConfig(pack_weights=pack))
    try:
        assert gap(model, said(engine)) < 1e-5
        with torch.no_grad():
            for p in model.parameters():
                p.data.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
        engine.load_weights(model, 1)
        assert gap(model, said(engine, seed=1)) < 1e-5
    finally:
        engine.close()
