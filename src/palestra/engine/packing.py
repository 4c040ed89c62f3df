# SPDX-License-Identifier: Apache-2.0
"""Weights laid out once for the CPU's matrix products instead of anew in every call.

With few rows a product spends as long copying the weight into blocks as multiplying. oneDNN can keep the blocks; torch
reaches that through operators of its own compiler, which are not a public interface: where they are missing, or do
not take a layer's dtype, the layer stays as it is. Layers that read the same input become one product.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

MIN_ELEMENTS = 1 << 18
"""Smaller weights gain less than the call through Python costs."""
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names under which the layers of one module read one input, in the families that transformers writes like Llama."""
_ROWS = 32  # what oneDNN chooses the blocks for; other numbers of rows work on the same ones


class PackedLinear:
    """The forward pass of layers that are called one after the other on the same input: one product with a packed copy
    of their weights, made when it is needed and again when a weight has changed."""

    def __init__(self, *linears: nn.Linear) -> None:
        self._linears = linears
        self._sizes = [linear.out_features for linear in linears]
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
        if at == len(self._linears) - 1:
            self._input, self._outputs = None, ()
        return out

    def _product(self, x: Tensor) -> Tensor:
        weights = [linear.weight for linear in self._linears]
        versions = [weight._version for weight in weights]
        if self._packed is None or versions != self._versions:
            self._packed, self._versions = _pack(torch.cat([w.detach() for w in weights])), versions
            biases = [linear.bias.detach() for linear in self._linears if linear.bias is not None]
            self._bias = torch.cat(biases) if biases else None
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out


def pack_linears(model: nn.Module) -> list[PackedLinear]:
    """Give every large ``nn.Linear`` of ``model`` on the CPU a packed forward pass (inference only); return them."""
    found: list[PackedLinear] = []
    for linears in _groups(model):
        if sum(linear.weight.numel() for linear in linears) < MIN_ELEMENTS:
            continue
        packed = PackedLinear(*linears)
        found.append(packed)
        for at, linear in enumerate(linears):
            linear.forward = partial(packed, at=at)  # type: ignore[method-assign]
    return found


def _groups(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """Every ``nn.Linear`` that can be packed, once: those that read one input together, the others alone."""
    seen: set[nn.Module] = set()
    for module in model.modules():
        for names in TOGETHER:
            # An adapter wraps the layer and hands its own input on to it.
            layers = [
                getattr(child, "base_layer", child) for n in names if (child := getattr(module, n, None)) is not None
            ]
            if len(layers) == len(names) and all(map(_packable, layers)) and _alike(layers):
                seen.update(layers)
                yield layers
    for module in model.modules():
        if module not in seen and _packable(module):
            seen.add(module)
            yield [module]  # type: ignore[list-item]


def _packable(module: nn.Module) -> bool:
    return type(module) is nn.Linear and _supported(module.weight)


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
