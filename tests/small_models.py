# SPDX-License-Identifier: Apache-2.0
"""Tiny models of several families, training rows written by hand, and the plain way to score them."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from palestra.learn.batch import Sample

VOCABULARY = 61
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 4

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**SMALL),
    "mistral": lambda: hf.MistralConfig(**SMALL, sliding_window=WINDOW),
    "gemma2": lambda: hf.Gemma2Config(
        **SMALL, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=2.0
    ),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    ),
    "qwen3": lambda: hf.Qwen3Config(**SMALL, head_dim=8),
}
"""Grouped-query attention, a window shorter than the prompts, soft-capping with a window, learned positions, norms
of queries and keys."""


def make_model(family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Random weights, fifteen times as large as usual: what a token attends to then shows in its log-prob."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = hf.AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation="eager")
    for p in model.parameters():
        if p.ndim > 1:
            p.data.mul_(15.0)
    model = model.to(dtype).eval()
    return double_norms(model) if dtype is torch.float64 else model


def double_norms(model: Any) -> Any:
    """transformers computes RMS norms in float32 whatever the model's dtype; for float64 comparisons they must not."""

    def forward(self: Any, x: Tensor) -> Tensor:
        eps = self.eps if "Gemma" in type(self).__name__ else self.variance_epsilon
        weight = 1.0 + self.weight if "Gemma" in type(self).__name__ else self.weight
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(forward, module)
    return model


@contextmanager
def double_softmax() -> Iterator[None]:
    """The models' eager attention rounds its weights to float32; here it keeps the dtype of its scores."""
    softmax = F.softmax
    with mock.patch.object(F, "softmax", lambda x, dim=-1, dtype=None: softmax(x, dim=dim)):
        yield


def plain_logprobs(model: nn.Module, tokens: Any, temperature: float = 1.0) -> Tensor:
    """(T,): entry i is log π(tokens[i] | tokens[:i]) by the model's own forward pass of this sequence; 0 first."""
    ids = torch.as_tensor(np.asarray(tokens), dtype=torch.long)[None]
    with double_softmax():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    logp = (logits / temperature).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return torch.cat([logp.new_zeros(1), logp])


def sample(
    tokens: Sequence[int],
    mask: Sequence[int],
    *,
    group: str = "g",
    episode: str = "a",
    reward: float = 0.0,
    logprobs: Sequence[float] | None = None,
    trained: bool = True,
) -> Sample:
    """A training row written by hand; without log-probs the sampler is said to have been certain."""
    n = len(tokens)
    return Sample(
        np.asarray(tokens, np.int32),
        np.asarray(mask, np.bool_),
        np.zeros(n, np.float32) if logprobs is None else np.asarray(logprobs, np.float32),
        np.zeros(n, np.int32),
        group,
        episode,
        reward,
        trained=trained,
    )


def eight_samples() -> list[Sample]:
    """Two groups with shared prompts, one whose prompts part early, one of a single member; tool tokens in the
    middle of some; lengths from 3 to 29."""
    rng = np.random.default_rng(0)

    def ids(n: int) -> list[int]:
        return [int(t) for t in rng.integers(3, VOCABULARY, n)]

    a, b, c = ids(9), ids(5), ids(4)
    return [
        sample([*a, *ids(6)], [0] * 9 + [1] * 6, group="A", episode="A0", reward=1.0),
        sample([*a, *ids(20)], [0] * 9 + [1] * 7 + [0] * 8 + [1] * 5, group="A", episode="A1", reward=0.0),
        sample([*a, *ids(1)], [0] * 9 + [1], group="A", episode="A2", reward=0.5),
        sample([*b, *ids(12)], [0] * 5 + [1, 1] + [0] * 9 + [1], group="B", episode="B0", reward=0.0),
        sample([*b, *ids(4)], [0] * 5 + [1] * 4, group="B", episode="B1", reward=2.0),
        sample([*c[:2], *ids(10)], [0] * 6 + [1] * 6, group="C", episode="C0", reward=1.0),
        sample([*c, *ids(3)], [0] * 4 + [1] * 3, group="C", episode="C1", reward=0.25),
        sample(ids(3), [0, 1, 1], group="D", episode="D0", reward=1.0),
    ]
