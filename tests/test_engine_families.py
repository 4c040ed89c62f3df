# SPDX-License-Identifier: Apache-2.0
"""What the engine says it sampled equals what a plain forward pass says, for every supported family."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from palestra.engine.base import SamplingParams
from palestra.engine.local import LocalEngine
from palestra.model.lora import LoraConfig, add_lora
from palestra.types import Span

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 12

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**SMALL),
    "qwen2": lambda: hf.Qwen2Config(**SMALL),
    "qwen3": lambda: hf.Qwen3Config(**SMALL, head_dim=16),
    "phi3": lambda: hf.Phi3Config(**SMALL),
    "gpt2": lambda: hf.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=256),
    "neox": lambda: hf.GPTNeoXConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **SMALL, head_dim=16, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2
    ),
    "mistral": lambda: hf.MistralConfig(**SMALL, sliding_window=WINDOW),
    "gemma2": lambda: hf.Gemma2Config(**SMALL, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=16),
    "gemma3": lambda: hf.Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=16),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **(SMALL | {"num_key_value_heads": 4}),
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=12,
        first_k_dense_replace=1,
    ),
}


def make(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(FAMILIES[family](), attn_implementation="eager")
    for p in model.parameters():  # larger weights, so that a wrong key shows in the logits
        if p.ndim > 1:
            p.data.mul_(6.0)
    return model.eval()


def teacher_forced(model: torch.nn.Module, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """(T,): entry i is the log-prob of token i given those before it; 0 first."""
    ids = torch.tensor(tokens[None], dtype=torch.long)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    logp = (logits / temperature).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
    return np.concatenate([[0.0], logp])


TEMPERATURES = (0.7, 1.0, 1.6, 0.3, 0.7, 1.0)
"""Of the six episodes; the first three are a group's."""


async def episodes(engine: LocalEngine) -> list[tuple[np.ndarray, list[tuple[int, Span]]]]:
    """A group of three and three loners, two turns each, joining at different times: (all tokens, (start, span)…)."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 97, 20)] * 3 + [rng.integers(3, 97, n) for n in (1, 17, 33)]

    async def one(i: int, prompt: np.ndarray) -> tuple[np.ndarray, list[tuple[int, Span]]]:
        await asyncio.sleep(0.005 * (i % 3))
        heard = np.random.default_rng(i)
        tokens, spans = prompt.astype(np.int32), []
        for turn in range(2):
            params = SamplingParams(3 + 3 * i, temperature=TEMPERATURES[i], seed=1000 * i + turn)
            for span in (await engine.sample(tokens, params, session=str(i))).spans:
                spans.append((len(tokens), span))
                tokens = np.concatenate([tokens, span.tokens])
            tokens = np.concatenate([tokens, heard.integers(3, 97, 1 + i).astype(np.int32)])
        return tokens, spans

    return list(await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts))))


@pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys"
)  # peft, of experts' weights that it leaves alone
@pytest.mark.parametrize("adapter", [False, True], ids=["plain", "adapter"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_log_probs_equal_a_plain_forward_pass(family: str, adapter: bool) -> None:
    """Twice the same prompts, with other weights the second time: what was cached under the first must not show. With
    an adapter only its weights move."""
    model = make(family)
    if adapter:
        model = add_lora(model, LoraConfig(r=4, target_modules="all-linear"), seed=0)
    engine = LocalEngine(model, lambda ids: "")
    for version in range(2):
        for (tokens, spans), temperature in zip(asyncio.run(episodes(engine)), TEMPERATURES, strict=True):
            want = teacher_forced(model, tokens, temperature)
            assert len(spans) == 2
            for at, span in spans:
                bound = 1e-4 * max(1.0, 1.0 / temperature)
                np.testing.assert_allclose(span.logprobs, want[at : at + len(span)], rtol=0, atol=bound)
                assert span.version == version
        with torch.no_grad():  # the trainer moves its weights in place
            for p in (p for p in model.parameters() if p.requires_grad):
                p.add_(torch.randn_like(p) * 0.05)
        engine.load_weights(model, version + 1)
    engine.close()
