# SPDX-License-Identifier: Apache-2.0
"""The forward pass of the Llama family without its module tree: all layers in one call of a kernel.

With a few dozen rows a pass is short, and modules and torch's small operations take longer than its products. Of a
model in bfloat16 the weights alone are: everything between them, keys and values included, is float32.
Models that are put together otherwise, other devices and other dtypes keep their own forward pass.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from palestra.engine.packing import is_linear, together
from palestra.engine.rows import Rows
from palestra.engine.store import SlotStore
from palestra.errors import EngineError
from palestra.model import attention, kernels
from palestra.model.fused import FAMILIES, is_gated, is_norm, is_one_of

_MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class FlatDecoder:
    """A pass over the store by the same parameters as ``model``, of which it keeps packed copies."""

    def __init__(self, model: nn.Module) -> None:
        base = attention.hf_model(model)
        self._model, self._head = base.model, base.lm_head
        self._parameters, self._versions = list(base.parameters()), list[int]()
        self._dtype = self._parameters[0].dtype
        self._decoder: kernels.Decoder | None = None
        self._packed_head: kernels.Packed | None = None

    def forget(self) -> None:
        """A weight may have changed in a way that torch does not count."""
        self._decoder = self._packed_head = None

    def __call__(self, rows: Rows, store: SlotStore) -> Tensor:
        """The rows of a pass → the logits (U, V) of those that decode."""
        decoder, (head, bias) = self._laid_out()
        x = self._model.embed_tokens(rows.tokens).float()
        cosines, sines = (angle[0] for angle in self._model.rotary_emb(x[None], rows.positions[None]))
        first = self._model.layers[0]  # the layers are alike
        key = x.new_empty(_key_heads(first), first.self_attn.head_dim)
        tables = [store.tables(i, key, key) for i in range(len(self._model.layers))]
        decoder(x, cosines, sines, tables, rows.as_pass)
        norm = self._model.norm
        last = kernels.rms_norm(x[rows.decoded], norm.weight.float(), norm.variance_epsilon)
        return kernels.product(last, head, bias, self._head.out_features)

    def _laid_out(self) -> tuple[kernels.Decoder, kernels.Packed]:
        """The weights as the kernels read them, made anew when one of them has changed."""
        versions = [p._version for p in self._parameters]
        if self._decoder is None or self._packed_head is None or versions != self._versions:
            if not kernels.multiplies(*self._parameters) or self._parameters[0].dtype != self._dtype:
                raise EngineError("the model was moved or converted after the engine was made; make another engine")
            self._versions = versions
            self._packed_head = kernels.pack(*together(self._head))
            layers = [_layer(layer) for layer in self._model.layers]
            inner = self._model.layers[0].mlp.down_proj.in_features
            self._decoder = kernels.Decoder(layers, epsilon=self._model.norm.variance_epsilon, inner=inner)
        return self._decoder, self._packed_head


def _layer(layer: Any) -> kernels.Layer:
    attends, mlp = layer.self_attn, layer.mlp
    norms = [getattr(attends, name, None) for name in ("q_norm", "k_norm")]
    query_norm, key_norm = (None if norm is None else norm.weight.detach().float() for norm in norms)
    return kernels.Layer(
        norm=layer.input_layernorm.weight.detach().float(),
        qkv=kernels.pack(*together(attends.q_proj, attends.k_proj, attends.v_proj)),
        mixed=kernels.pack(*together(attends.o_proj)),
        mlp_norm=layer.post_attention_layernorm.weight.detach().float(),
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
    family = type(base).__name__.removesuffix("ForCausalLM")
    if family not in FAMILIES or not kernels.multiplies(*base.parameters()):
        return None
    inner = base.model
    known = [(base, f"{family}ForCausalLM", {"model", "lm_head"}), (inner, f"{family}Model", _MODEL)]
    known += [(inner.rotary_emb, f"{family}RotaryEmbedding", set())]
    for layer in inner.layers:
        known += [(layer, f"{family}DecoderLayer", _LAYER), (layer.self_attn, f"{family}Attention", _ATTENTION)]
        known += [(layer.mlp, f"{family}MLP", _MLP)]
    if not all(is_one_of(m, frozenset({name})) and _children(m) - _HEAD_NORMS == names for m, name, names in known):
        return None
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in base.modules())
    plain = type(inner.embed_tokens) is nn.Embedding and is_linear(base.lm_head) and is_norm(inner.norm)
    return FlatDecoder(model) if plain and not hooked and _is_regular(inner) else None


def _is_regular(inner: Any) -> bool:
    """Whether all layers are alike, in the sizes that the kernels take."""
    epsilon, shapes = inner.norm.variance_epsilon, set()
    for layer in inner.layers:
        attends, mlp = layer.self_attn, layer.mlp
        q, k, v, o = (getattr(attends, f"{name}_proj") for name in "qkvo")
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(attends, name) for name in _HEAD_NORMS if hasattr(attends, name)]
        linears = [q, k, v, o, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if (
            not is_gated(mlp)
            or not all(map(is_linear, linears))
            or any(not is_norm(n) or n.variance_epsilon != epsilon for n in norms)
        ):
            return False
        if len({x.bias is None for x in (q, k, v)}) > 1 or (mlp.gate_proj.bias is None) != (mlp.up_proj.bias is None):
            return False
        width = attends.head_dim
        shapes.add((width, len(norms), *((x.in_features, x.out_features) for x in linears)))
    if len(shapes) != 1 or len(inner.layers) != inner.config.num_hidden_layers:
        return False
    whole = q.out_features % width == k.out_features % width == 0 and k.out_features == v.out_features
    eights = all(n % kernels.LANES == 0 for n in (width, mlp.down_proj.in_features, q.in_features))
    return whole and eights and o.in_features == q.out_features


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


__all__ = ["FlatDecoder", "flatten"]
