# SPDX-License-Identifier: Apache-2.0
"""What the machine could do at most: floating-point work over its matrix-product rate, bytes over its bandwidth.

A limit leaves out attention, norms, sampling and all overhead, so nothing reaches it; and it credits sharing (a
group's prompt is computed once, logits only where they are needed), so who does not share cannot come near.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What was measured of the machine. flops: of the best large matrix product, per second, by dtype. bandwidth:
    bytes read per second."""

    flops: dict[str, float]
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder as its matrix products see it. body: weights of all layers; head: those of the output layer (an
    embedding that is only looked up costs nothing); keys: key and value entries of one token in all layers.

    >>> smollm2 = Shape.of(dict(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
    ...                         num_hidden_layers=30, vocab_size=49152))
    >>> smollm2.body, smollm2.head, smollm2.keys
    (106168320, 28311552, 11520)
    >>> round(2 * (smollm2.body + smollm2.head) / 1e9, 3)  # GFLOP per decoded token
    0.269
    """

    body: int
    head: int
    keys: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """From a ``config.json`` of the Llama kind (gated feed-forward, grouped queries)."""
        hidden, layers, heads = (config[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        wide = config.get("head_dim") or hidden // heads
        queries, keys = heads * wide, config.get("num_key_value_heads", heads) * wide
        layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * config["intermediate_size"]
        return cls(layers * layer, config["vocab_size"] * hidden, layers * 2 * keys)

    @classmethod
    def read(cls, model: str | Path) -> Shape:
        """Of a checkpoint directory."""
        return cls.of(json.loads((Path(model) / "config.json").read_text(encoding="utf-8")))

    @property
    def weights(self) -> int:
        return self.body + self.head


@dataclass(frozen=True, slots=True)
class Limit:
    """Least seconds of a model's work in one dtype on a machine."""

    shape: Shape
    ceilings: Ceilings
    dtype: str

    @property
    def _rate(self) -> float:
        """FLOP per second. bfloat16 can be widened on the way, so its products need not be slower than float32's."""
        rates = self.ceilings.flops
        return max(rates[self.dtype], rates["float32"])

    def prefill_s(self, tokens: int) -> float:
        """2 FLOP per weight and token, without the head: a prompt needs no logits."""
        return 2 * self.shape.body * tokens / self._rate

    def decode_s(self, rows: int, context: float) -> float:
        """One pass over ``rows`` sequences of ``context`` tokens: arithmetic, or reading the weights and the keys,
        whichever takes longer."""
        arithmetic = 2 * self.shape.weights * rows / self._rate
        entries = self.shape.weights + rows * context * self.shape.keys
        return max(arithmetic, entries * ITEM_BYTES[self.dtype] / self.ceilings.bandwidth)

    def decodes_s(self, lengths: Sequence[int], context: int) -> float:
        """All passes until sequences that begin at ``context`` tokens have grown by ``lengths``; who is done leaves."""
        return sum(self.decode_s(sum(n > i for n in lengths), context + i) for i in range(max(lengths, default=0)))

    def sampling_s(self, prompts: int, prompt: int, lengths: Sequence[int]) -> float:
        """``len(lengths)`` samples of ``prompts`` prompts of ``prompt`` tokens, each prompt computed once."""
        return self.prefill_s(prompts * prompt) + self.decodes_s(lengths, prompt)

    def episodes_s(self, prompts: int, samples: int, prompt: int, turns: Iterable[tuple[int, int]]) -> float:
        """Episodes of several turns ``(added, sampled)``: what the environment adds is computed once per episode and
        nothing is computed again."""
        rows, context = prompts * samples, prompt
        seconds = self.prefill_s(prompts * prompt)
        for added, sampled in turns:
            seconds += self.prefill_s(rows * added) + self.decodes_s([sampled] * rows, context + added)
            context += added + sampled
        return seconds

    def forward_s(self, tokens: int, scored: int) -> float:
        """A forward pass over ``tokens``, with logits at ``scored`` of them."""
        return 2 * (self.shape.body * tokens + self.shape.head * scored) / self._rate

    def update_s(self, tokens: int, scored: int) -> float:
        """Forward and backward: three times the products of a forward pass."""
        return 3 * self.forward_s(tokens, scored)

    def optimiser_s(self) -> float:
        """AdamW in float32: reads parameter, gradient and two moments, writes all but the gradient."""
        return 7 * 4 * self.shape.weights / self.ceilings.bandwidth
