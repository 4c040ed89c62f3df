# SPDX-License-Identifier: Apache-2.0
"""Weights laid out once for the CPU's matrix products instead of anew in every call.

With few rows a product spends as long copying the weight into blocks as multiplying. Our own kernel takes blocks that
are kept, and so can oneDNN, which torch reaches through operators of its own compiler; they are no public interface.
Where neither takes a layer, the layer stays as it is. Layers that read the same input become one product, and a LoRA
adapter is added to the weight that it stands beside: W + s·B·A costs what W costs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from palestra.model import kernels

MIN_ELEMENTS = 1 << 18
"""Smaller weights gain less than the call through Python costs."""
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names under which the layers of one module read one input, in the families that transformers writes like Llama."""
_ROWS = 32  # what oneDNN chooses the blocks for; other numbers of rows work on the same ones


class PackedLinear:
    """The forward pass of layers that are called one after the other on the same input: one product with a packed copy
    of their weights, made when it is needed and again when a weight has changed. A layer is linear, or LoRA around one.
    """

    def __init__(self, *layers: nn.Module) -> None:
        self._layers = layers
        self._linears = [_linear(layer) for layer in layers]
        self._sources = [p for layer in layers for p in layer.parameters()]
        self._sizes = [linear.out_features for linear in self._linears]
        self._ours = all(kernels.multiplies(linear.weight) for linear in self._linears)
        self._packed: Tensor | None = None
        self._bias: Tensor | None = None
        self._versions: list[int] = []
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def forget(self) -> None:
        """A weight may have changed in a way that torch does not count."""
        self._packed = None

    def __call__(self, x: Tensor, at: int = 0) -> Tensor:
        """What layer ``at`` makes of ``x``. The first to be called computes for all, the last lets go of it."""
        if self._input is not x:
            self._input, self._outputs = x, torch.split(self._product(x), self._sizes, -1)
        out = self._outputs[at]
        if at == len(self._layers) - 1:
            self._input, self._outputs = None, ()
        return out

    def _product(self, x: Tensor) -> Tensor:
        """What all the layers make of ``x``, one after the other in the last axis."""
        versions = [source._version for source in self._sources]
        if self._packed is None or versions != self._versions:
            self._versions = versions
            self._packed, self._bias = self._laid_out()
        if self._ours:
            if (x.dtype, x.device) != (self._packed.dtype, self._packed.device):
                raise TypeError(f"a layer in {self._packed.dtype} on the CPU was given {x.dtype} on {x.device.type}")
            dense = x.reshape(-1, x.shape[-1]).float().contiguous()
            made = kernels.product(dense, self._packed, self._bias, sum(self._sizes))
            return made.to(x.dtype).view(*x.shape[:-1], -1)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out

    def _laid_out(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = together(*self._layers)
        return kernels.pack(weight, bias) if self._ours else (_pack(weight), bias)


def together(*layers: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The weight and bias of layers that read one input, one below the other."""
    weights = [_weight(layer) for layer in layers]
    biases = [linear.bias.detach() for layer in layers if (linear := _linear(layer)).bias is not None]
    return torch.cat(weights) if len(weights) > 1 else weights[0], torch.cat(biases) if biases else None


def pack_linears(model: nn.Module) -> list[PackedLinear]:
    """Give every large linear layer of ``model`` on the CPU a packed forward pass (inference only); return them."""
    found: list[PackedLinear] = []
    for layers in _groups(model):
        if not _worth_packing(layers):
            continue
        packed = PackedLinear(*layers)
        found.append(packed)
        for at, layer in enumerate(layers):
            layer.forward = partial(packed, at=at)
    return found


def _groups(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Every layer that can be packed, once: those that read one input together, the others alone."""
    seen: set[nn.Module] = set()
    for module in model.modules():
        for names in TOGETHER:
            layers = [_reached(child) for n in names if (child := getattr(module, n, None)) is not None]
            if seen.intersection(layers):
                continue  # peft's wrappers show the attributes of what they wrap as their own
            if len(layers) == len(names) and all(map(_packable, layers)) and _alike(list(map(_linear, layers))):
                seen.update(layers, map(_linear, layers))
                yield layers
    for module in model.modules():
        if module not in seen and _packable(module):
            seen.update((module, _linear(module)))
            yield [module]


def _worth_packing(layers: Sequence[nn.Module]) -> bool:
    weights = [_linear(layer).weight for layer in layers]
    return all(map(_takes, weights)) and sum(w.numel() for w in weights) >= MIN_ELEMENTS


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by one weight: a linear layer, or LoRA and nothing else around one."""
    return type(module) is nn.Linear or _is_plain_adapter(module)


def _packable(module: nn.Module) -> bool:
    return is_linear(module) and _takes(_linear(module).weight)


def _takes(weight: Tensor) -> bool:
    return kernels.multiplies(weight) or _supported(weight)


def _is_plain_adapter(module: nn.Module) -> bool:
    """LoRA and nothing else around a linear layer, in float32: in bfloat16 most of a small change would be rounded away
    from the weight. Its relatives (DoRA, …) keep their own forward."""
    if "peft" not in sys.modules:
        return False
    from peft.tuners.lora.layer import Linear as Lora

    if type(module) is not Lora or type(module.base_layer) is not nn.Linear:
        return False
    odd = module.disable_adapters, module.merged, module.lora_variant, any(module.lora_bias.values())
    return not any(odd) and {p.dtype for p in module.parameters()} == {torch.float32}


def _linear(layer: nn.Module) -> nn.Linear:
    """The layer itself, or the one under its adapter."""
    inner: Any = getattr(layer, "base_layer", layer)
    linear: nn.Linear = inner
    return linear


def _reached(child: nn.Module) -> nn.Module:
    """What of a layer can be packed: where an adapter has to stay, the layer under it, which gets the same input."""
    return child if _is_plain_adapter(child) else _linear(child)


def _weight(layer: nn.Module) -> Tensor:
    """The one weight that a layer multiplies by."""
    weight = _linear(layer).weight.detach()
    if layer is _linear(layer):
        return weight
    adapter: Any = layer
    deltas = [adapter.get_delta_weight(name).detach() for name in adapter.active_adapters if name in adapter.lora_A]
    return sum(deltas, start=weight)


def _alike(layers: list[nn.Linear]) -> bool:
    """One product takes a bias for all of its outputs or for none."""
    return len({(layer.in_features, layer.bias is None, layer.weight.dtype) for layer in layers}) == 1


def _supported(weight: Tensor) -> bool:
    ops: Any = torch.ops.mkldnn
    backend: Any = torch.backends.mkldnn
    if weight.device.type != "cpu" or not backend.is_available() or not backend.enabled:
        return False
    if not hasattr(ops, "_linear_pointwise") or not hasattr(ops, "_reorder_linear_weight"):
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _bfloat16_kernels())


def _bfloat16_kernels() -> bool:
    ops: Any = torch.ops.mkldnn
    return hasattr(ops, "_is_mkldnn_bf16_supported") and bool(ops._is_mkldnn_bf16_supported())


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return packed
