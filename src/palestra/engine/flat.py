# SPDX-License-Identifier: Apache-2.0
"""The forward pass of the Llama family without its module tree: all layers in one call of a kernel.

With a few dozen rows a pass is short, and modules and torch's small operations take longer than its products.
Models that are put together otherwise, other devices and other dtypes keep their own forward pass.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from palestra.engine.packing import is_linear, together
from palestra.engine.rows import Rows
from palestra.engine.store import SlotStore
from palestra.model import attention, kernels
from palestra.model.fused import is_gated, is_norm

FAMILIES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class FlatDecoder:
    """A pass over the store by the same parameters as ``model``, of which it keeps packed copies."""

    def __init__(self, model: nn.Module) -> None:
        base = attention.hf_model(model)
        self._model, self._head = base.model, base.lm_head
        self._parameters = list(base.parameters())
        self._versions: list[int] = []
        self._decoder: kernels.Decoder | None = None
        self._packed_head: kernels.Packed | None = None

    def forget(self) -> None:
        """A weight may have changed in a way that torch does not count."""
        self._decoder = self._packed_head = None

    def __call__(self, rows: Rows, store: SlotStore) -> Tensor:
        """The rows of a pass → the logits (U, V) of those that decode."""
        decoder, (head, bias) = self._laid_out()
        x = self._model.embed_tokens(rows.tokens)
        cosines, sines = (angle[0] for angle in self._model.rotary_emb(x[None], rows.positions[None]))
        shapes = (x.new_empty(_key_heads(layer), layer.self_attn.head_dim) for layer in self._model.layers)
        tables = [store.tables(i, key, key) for i, key in enumerate(shapes)]
        decoder(x, cosines, sines, tables, rows.as_pass)
        norm = self._model.norm
        last = kernels.rms_norm(x[rows.decoded], norm.weight, norm.variance_epsilon)
        return kernels.product(last, head, bias, self._head.out_features)

    def _laid_out(self) -> tuple[kernels.Decoder, kernels.Packed]:
        """The weights as the kernels read them, made anew when one of them has changed."""
        versions = [p._version for p in self._parameters]
        if self._decoder is None or self._packed_head is None or versions != self._versions:
            self._versions = versions
            self._packed_head = kernels.pack(*together(self._head))
            layers = [_layer(layer) for layer in self._model.layers]
            inner = self._model.layers[0].mlp.down_proj.in_features
            self._decoder = kernels.Decoder(layers, epsilon=self._model.norm.variance_epsilon, inner=inner)
        return self._decoder, self._packed_head


def _layer(layer: Any) -> kernels.Layer:
    attends, mlp = layer.self_attn, layer.mlp
    norms = [getattr(attends, name, None) for name in ("q_norm", "k_norm")]
    query_norm, key_norm = (None if norm is None else norm.weight for norm in norms)
    return kernels.Layer(
        norm=layer.input_layernorm.weight,
        qkv=kernels.pack(*together(attends.q_proj, attends.k_proj, attends.v_proj)),
        mixed=kernels.pack(*together(attends.o_proj)),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=kernels.pack(*together(mlp.gate_proj, mlp.up_proj)),
        down=kernels.pack(*together(mlp.down_proj)),
        heads=attends.q_proj.out_features // attends.head_dim,
        key_heads=_key_heads(layer),
        width=attends.head_dim,
        window=_window(attends),
        scale=attends.scaling,
        query_norm=query_norm,
        key_norm=key_norm,
    )


def _window(attends: Any) -> int | None:
    """Mistral's layers read it from the config, Qwen's from themselves, Llama's have none."""
    if type(attends).__name__.startswith("Mistral"):
        return getattr(attends.config, "sliding_window", None)
    return getattr(attends, "sliding_window", None)


def _key_heads(layer: Any) -> int:
    attends = layer.self_attn
    return int(attends.k_proj.out_features // attends.head_dim)


def flatten(model: nn.Module) -> FlatDecoder | None:
    """The flat forward pass of a model that is put together in the way it expects, down to the last module."""
    base = attention.hf_model(model)
    if type(base).__name__ not in FAMILIES or not kernels.available(*base.parameters()):
        return None
    inner = base.model
    known = _children(base) == {"model", "lm_head"} and _children(inner) == {
        "embed_tokens", "layers", "norm", "rotary_emb",
    }  # fmt: skip
    if not known or not all(map(_is_known_layer, inner.layers)) or not is_norm(inner.norm):
        return None
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in base.modules())
    plain = type(inner.embed_tokens) is nn.Embedding and is_linear(base.lm_head)
    return FlatDecoder(model) if plain and not hooked else None


def _is_known_layer(layer: nn.Module) -> bool:
    of: Any = layer
    if _children(layer) != _LAYER or not all(map(is_norm, (of.input_layernorm, of.post_attention_layernorm))):
        return False
    attends, mlp = of.self_attn, of.mlp
    norms = _children(attends) - _ATTENTION
    if not _children(attends) >= _ATTENTION or norms not in (set(), _HEAD_NORMS) or _children(mlp) != _MLP:
        return False
    linears = [getattr(attends, n) for n in _ATTENTION] + [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    widths = (attends.head_dim, of.input_layernorm.weight.numel(), mlp.down_proj.in_features)
    return (
        all(map(is_linear, linears))
        and all(is_norm(getattr(attends, n)) for n in norms)
        and all(width % kernels.LANES == 0 for width in widths)
        and len({getattr(attends, n).bias is None for n in ("q_proj", "k_proj", "v_proj")}) == 1
        and (mlp.gate_proj.bias is None) == (mlp.up_proj.bias is None)
        and is_gated(mlp)
    )


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


__all__ = ["FAMILIES", "FlatDecoder", "flatten"]
