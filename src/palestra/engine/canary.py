# SPDX-License-Identifier: Apache-2.0
"""Two questions an engine is asked before it is trusted: are your log-probs those of a plain forward pass, and do
they depend on who else is in the batch, or on how a key came into the store?"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from palestra.engine.base import Completion, SamplingParams
from palestra.engine.local import LocalEngine
from palestra.errors import EngineError
from palestra.model import attention
from palestra.types import FloatArray, IntArray

TOLERANCE = 1e-3
"""Largest difference in float32 that is rounding; a wrong mask or a stale key shows as 0.1 and more."""
_COUNT, _HALF = 6, 3


@dataclass(frozen=True, slots=True)
class Canary:
    """max_difference: largest |log-prob − plain forward pass's| in nats. batch_invariant: whether requests got
    the very same tokens and bits alone, together and guessed ahead, and after a prompt that ends in what they said."""

    max_difference: float
    batch_invariant: bool


def sing(engine: LocalEngine, model: nn.Module) -> Canary:
    """Sample a few short completions alone and together and compare. EngineError when the log-probs are wrong.

    model: the policy whose weights the engine samples from.
    """
    vocabulary = int(attention.hf_model(model).config.get_text_config().vocab_size)
    length = max(2, min(24, engine.max_context // 3))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocabulary, n).astype(np.int32) for n in (length, max(1, length // 2), 2)]
    together = asyncio.run(_play(engine, prompts, at_once=True))
    alone = asyncio.run(_play(engine, prompts, at_once=False))
    guessed = asyncio.run(_play(engine, prompts, at_once=True))  # by now the engine knows what it is going to say
    gap = max(_gap(model, p, c) for p, c in zip(prompts, together, strict=True))
    if gap > TOLERANCE and engine.config.dtype == "auto" and next(model.parameters()).dtype == torch.float32:
        raise EngineError(
            f"the engine's log-probs differ from a plain forward pass by {gap:.3g}: this model or this version of "
            "transformers does something the engine does not know; please report the model"
        )
    # Sampled tokens have their keys from decode rows; as part of a prompt they are filled.
    greedy = asyncio.run(_play(engine, prompts, at_once=True, temperature=0.0))
    halves = [np.concatenate([p, _tokens(c)[:_HALF]]) for p, c in zip(prompts, greedy, strict=True)]
    filled = asyncio.run(_play(engine, halves, at_once=True, temperature=0.0, count=_COUNT - _HALF))
    same = all(_same(a, b) for other in (alone, guessed) for a, b in zip(together, other, strict=True))
    same = same and all(_same(a, b, _HALF) for a, b in zip(greedy, filled, strict=True))
    return Canary(gap, same)


def _tokens(completion: Completion) -> IntArray:
    return np.concatenate([span.tokens for span in completion.spans])


def _logprobs(completion: Completion) -> FloatArray:
    return np.concatenate([np.asarray(span.logprobs) for span in completion.spans])


def _same(one: Completion, other: Completion, start: int = 0) -> bool:
    """Whether ``other`` is what ``one`` says from its token ``start`` on, bit by bit."""
    return np.array_equal(_tokens(one)[start:], _tokens(other)) and np.array_equal(
        _logprobs(one)[start:], _logprobs(other)
    )


async def _play(
    engine: LocalEngine, prompts: list[IntArray], *, at_once: bool, temperature: float = 1.0, count: int = _COUNT
) -> list[Completion]:
    async def one(i: int) -> Completion:
        name = f"canary/{at_once}/{i}"
        try:
            return await engine.sample(prompts[i], SamplingParams(count, temperature, seed=i), session=name)
        finally:
            engine.release(name)

    if at_once:
        return await asyncio.gather(*(one(i) for i in range(len(prompts))))
    return [await one(i) for i in range(len(prompts))]


@torch.no_grad()
def _gap(model: nn.Module, prompt: IntArray, completion: Completion) -> float:
    """Against the model's own attention code, which knows nothing of ours."""
    tokens = torch.tensor(np.concatenate([prompt, _tokens(completion)]), dtype=torch.long)
    plain = attention.hf_model(model)
    ours, training = plain.config._attn_implementation, model.training
    plain.set_attn_implementation("eager")
    try:
        device = next(model.parameters()).device
        logits = model.eval()(input_ids=tokens[None].to(device), use_cache=False).logits[0].float().cpu()
    finally:
        plain.set_attn_implementation(ours)
        model.train(training)
    wanted = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(-1, tokens[len(prompt) :, None])[:, 0]
    return float(np.abs(wanted.numpy() - _logprobs(completion)).max())
