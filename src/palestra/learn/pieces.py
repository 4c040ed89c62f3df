# SPDX-License-Identifier: Apache-2.0
"""Log-probs of many tokens over a large vocabulary, from a piece of their logits at a time.

Logits are tokens × vocabulary: 32,000 trained tokens of a model that knows 150,000 are 19 GB, more than everything else
together. In pieces their memory has a bound; in return the backward pass multiplies by the last layer once more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from palestra.learn.scores import WithEntropy, log_probs
from palestra.model import attention
from palestra.model.fused import FAMILIES, is_one_of

KEPT = 1 << 27
"""Logits that are kept for the backward pass (512 MiB in float32); of more, each piece is computed again there."""
PIECE = 1 << 24
"""Logits of a piece."""
_PLAIN = frozenset(f"{family}ForCausalLM" for family in FAMILIES)


def head_of(model: nn.Module) -> nn.Module | None:
    """The last layer of a model that does nothing to its logits besides; None for others."""
    base = attention.hf_model(model)
    head: nn.Module | None = base.lm_head if is_one_of(base, _PLAIN) else None
    return head


def too_many(model: nn.Module, rows: int) -> bool:
    """Whether so many rows' logits are to be made in pieces."""
    vocabulary = int(attention.hf_model(model).config.get_text_config().vocab_size)
    return rows * vocabulary > (KEPT if torch.is_grad_enabled() else PIECE)


def log_probs_in_pieces(
    head: nn.Module, hidden: Tensor, at: Tensor, targets: Tensor, temperature: float, entropy: WithEntropy
) -> tuple[Tensor, Tensor | None]:
    """As :func:`~palestra.learn.scores.log_probs` of ``head(hidden)``, hidden (U, d), whose logits are never whole."""

    def piece(rows: Tensor, local: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
        return log_probs(head(rows), local, wanted, temperature, entropy)

    wide: Any = head.out_features
    size = max(1, PIECE // int(wide))
    order = torch.argsort(at, stable=True)
    firsts = range(0, len(hidden), size)
    cuts = torch.searchsorted(at[order], torch.tensor([*firsts, len(hidden)], device=at.device)).tolist()
    found: list[Tensor] = []
    spreads: list[Tensor] = []
    for first, begin, end in zip(firsts, cuts[:-1], cuts[1:], strict=True):
        mine = order[begin:end]
        given = hidden[first : first + size], at[mine] - first, targets[mine]
        again = torch.is_grad_enabled()
        made, spread = checkpoint(piece, *given, use_reentrant=False) if again else piece(*given)
        found.append(made)
        spreads += [] if spread is None else [spread]
    back = torch.argsort(order)
    return torch.cat(found)[back], torch.cat(spreads)[back] if spreads else None


__all__ = ["KEPT", "PIECE", "head_of", "log_probs_in_pieces", "too_many"]
