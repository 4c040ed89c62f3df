# SPDX-License-Identifier: Apache-2.0
"""Packed weights: the same numbers as the plain layer, the newest weights, and only where it pays."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from small_models import plain_logprobs
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from palestra.engine.base import Completion, SamplingParams
from palestra.engine.local import EngineConfig, LocalEngine
from palestra.engine.packing import MIN_ELEMENTS, PackedLinear, pack_linears
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
