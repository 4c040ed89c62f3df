# SPDX-License-Identifier: Apache-2.0
"""One attention function, registered with transformers, through which we own keys and values.

A forward pass gets a *plan* as a keyword; the plan says how each layer attends: the engine's plan reads and
writes a slot store, the learner's plan keeps packed sequences apart. The models' own code stays untouched,
and because transformers builds no mask for this name, nothing of size T² is made twice.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.errors import ModelError

NAME = "palestra"


class AttentionPlan(Protocol):
    """How one forward pass attends."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        dropout: float,
    ) -> Tensor:
        """query (1, H, N, D), key (1, Hkv, N, D), value (1, Hkv, N, Dv) of N flat tokens → (1, N, H, Dv).

        window: a token sees itself and the ``window - 1`` before it; None = all.
        """
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: AttentionPlan,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = plan.attend(
        layer, query, key, value, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux, dropout=dropout
    )
    return out, None


def hf_model(model: nn.Module) -> Any:
    """The Hugging Face model itself, under an adapter or not."""
    unwrap: Any = getattr(model, "get_base_model", None)
    return model if unwrap is None else unwrap()


def register() -> None:
    """Make ``attn_implementation="palestra"`` known to transformers (once; harmless to repeat)."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


def check_supported(model: nn.Module) -> None:
    """Refuse a model whose layers do not all attend through the interface (recurrent and mixed families)."""
    base = hf_model(model)
    config = base.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    odd = kinds - {"full_attention", "sliding_attention"}
    if not getattr(base, "_supports_attention_backend", False) or odd:
        why = f"layers of type {', '.join(sorted(odd))}" if odd else "no attention backend interface"
        raise ModelError(
            f"{type(base).__name__} has {why}; the in-process engine needs full or sliding attention in every "
            "layer. Use a Llama-, Qwen-, Mistral-, Gemma-, Phi- or GPT-like model"
        )


def use(model: nn.Module) -> None:
    """Switch a model (or the base under an adapter) to our attention function."""
    register()
    check_supported(model)
    hf_model(model).set_attn_implementation(NAME)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of a padded batch: query (S, H, Lq, D), key/value (S, Hkv, Lk, D) → (S, H, Lq, Dv).

    mask: bool (S, 1, Lq, Lk), True = may look; None = causal with Lq == Lk. Soft-capping (Gemma 2) and
    sinks (gpt-oss) take the plain matmul road, everything else torch's fused kernel.
    """
    if softcap is None and sinks is None:
        gqa = key.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scale, dropout_p=dropout, enable_gqa=gqa
        )
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    weights = masked_softmax(query @ key.transpose(-1, -2) * scale, mask, softcap=softcap, sinks=sinks)
    return F.dropout(weights, dropout) @ value if dropout else weights @ value


def masked_softmax(scores: Tensor, mask: Tensor, *, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """softmax over the last axis where ``mask`` is True, in float32 at least; scores (…, H, Lq, Lk).

    sinks (H,): one extra logit per head that takes part in the normalisation and is then dropped.
    """
    wide = scores if scores.dtype == torch.float64 else scores.float()
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    wide = wide.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        extra = sinks.to(wide.dtype).view(-1, 1, 1).expand(*wide.shape[:-1], 1)
        wide = torch.cat([wide, extra], dim=-1).softmax(-1)[..., :-1]
    else:
        wide = wide.softmax(-1)
    return wide.to(scores.dtype)


__all__ = ["NAME", "AttentionPlan", "attend", "check_supported", "hf_model", "masked_softmax", "register", "use"]
