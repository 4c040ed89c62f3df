# SPDX-License-Identifier: Apache-2.0
"""One update's forward and backward pass, its gradients beside a plain padded one's, and its memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.peers.serve import Reply, peak_gib, reset_peak, resident_gib, timed
from palestra.learn.batch import Rows, Sample, micro_batches, pack, token_weights
from palestra.learn.policy import Policy
from palestra.learn.update import Sums, UpdateConfig, annotate, policy_loss
from palestra.model.loading import load_model

CONFIG = UpdateConfig(kl_coef=0.0, old_logprobs="recompute")


def update(
    model: str, prompts: Sequence[Sequence[int]], samples: int, new: int, dtype: str = "float32"
) -> Callable[[dict[str, Any]], Reply]:
    """Forward and backward over made-up samples of these prompts (or the first ``rows`` of them), as a training step
    would run them."""
    loaded = load_model(model, device="cpu")
    policy = Policy(loaded.model, compute_dtype=torch.bfloat16 if dtype == "bfloat16" else None)
    rows = annotate(policy, _made_up(prompts, samples, new, _vocabulary(loaded.model)), CONFIG, temperature=1.0)

    def measure(request: dict[str, Any]) -> Reply:
        seconds, _ = timed(lambda: _backward(policy, rows, request.get("rows", len(rows))))
        reply: Reply = {"seconds": seconds}
        if request.get("check"):
            reply["gradient_error"] = _error(policy.model, load_model(model, device="cpu").model.double(), rows)
        return reply

    return measure


def _vocabulary(model: nn.Module) -> int:
    config: Any = model.config
    return int(config.vocab_size)


def _made_up(prompts: Sequence[Sequence[int]], samples: int, new: int, vocabulary: int) -> Rows:
    """``samples`` random continuations of each prompt, with rewards that differ."""
    rng = random.Random("update")
    made = []
    for p, prompt in enumerate(prompts):
        for member in range(samples):
            tokens = [*prompt, *(rng.randrange(vocabulary) for _ in range(new))]
            mask = np.arange(len(tokens)) >= len(prompt)
            zeros = np.zeros(len(tokens), np.float32)
            ints = np.zeros(len(tokens), np.int32)
            # A lone sample has nobody to be compared with: the group's name says who shares a prompt, and for an
            # advantage two of them are compared.
            group, episode = f"g{p if samples > 1 else p // 2}", f"{p}/{member}"
            made.append(Sample(np.asarray(tokens, np.int32), mask, zeros, ints, group, episode, rng.random()))
    return Rows(tuple(made))


def _backward(policy: Policy, rows: Rows, count: int) -> None:
    policy.model.zero_grad(set_to_none=True)
    weights = token_weights(rows.samples, CONFIG.reduction)
    for chosen in micro_batches(rows.samples, range(count), CONFIG.micro_batch_tokens):
        batch = pack(rows, weights, chosen, device=policy.device)
        loss = policy_loss(policy, batch, CONFIG, 1.0, Sums({}), first=True)
        loss.backward()  # type: ignore[no-untyped-call]


def _error(model: nn.Module, plain: nn.Module, rows: Rows) -> float:
    """‖g − g'‖ / ‖g'‖, g' by the plain model's own forward pass, one sequence at a time, without packing or sharing.
    Both take the ratio against their own log-probs, as at a step's beginning, so that it is 1."""
    assert rows.advantages is not None
    weights = token_weights(rows.samples, CONFIG.reduction)
    for sample, weight, advantage in zip(rows.samples, weights, rows.advantages, strict=True):
        ids = torch.as_tensor(sample.tokens, dtype=torch.long)[None]
        logits = plain(input_ids=ids, use_cache=False).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        w, a = (torch.as_tensor(x[1:], dtype=logprobs.dtype) for x in (weight, advantage))
        ratio = (logprobs - logprobs.detach()).exp()
        clipped = ratio.clamp(1 - CONFIG.clip_low, 1 + CONFIG.clip_high)
        (-(w * torch.minimum(ratio * a, clipped * a))).sum().backward()  # type: ignore[no-untyped-call]
    off = _norm(g - p for g, p in zip(_gradients(model), _gradients(plain), strict=True))
    return off / _norm(_gradients(plain))


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for _, p in sorted(model.named_parameters()) if p.grad is not None]


def _norm(parts: Any) -> float:
    return float(torch.stack([part.double().square().sum() for part in parts]).sum().sqrt())


@dataclass(frozen=True, slots=True)
class _Narrow:
    """Two layers, 64 wide: small beside its logits."""

    vocabulary: int

    def model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        made: Any = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=self.vocabulary,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=8192,
                tie_word_embeddings=True,
            )
        )
        return made.eval()  # type: ignore[no-any-return]


def growth(vocabulary: int, tokens: int) -> Callable[[dict[str, Any]], Reply]:
    """Peak memory that an update adds on a narrow model with a vocabulary of this size, in GiB, gradients included."""
    policy = Policy(_Narrow(vocabulary).model())
    prompt = [1] * 8
    data = _made_up([prompt, [2] * 8], 1, tokens, vocabulary)
    rows = annotate(policy, data, UpdateConfig(kl_coef=0.0), temperature=1.0)

    def measure(_: dict[str, Any]) -> Reply:
        reset_peak()
        before = resident_gib()
        seconds, _nothing = timed(lambda: _backward(policy, rows, len(rows)))
        return {"seconds": seconds, "gib": peak_gib() - before}

    return measure
