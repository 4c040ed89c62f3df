# SPDX-License-Identifier: Apache-2.0
"""Weights laid out once for the CPU's matrix products instead of anew in every call.

With few rows a product spends as long copying the weight into blocks as multiplying. oneDNN can keep the blocks; torch
reaches that through operators of its own compiler, which are not a public interface: where they are missing, or do
not take a layer's dtype, the layer stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

MIN_ELEMENTS = 1 << 18
"""Smaller weights gain less than the call through Python costs."""
_ROWS = 32  # what oneDNN chooses the blocks for; other numbers of rows work on the same ones


class PackedLinear:
    """The forward pass of one ``nn.Linear`` on a packed copy of its weight, made when it is needed and again when
    the weight has changed."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear
        self._packed: Tensor | None = None
        self._version = -1

    def forget(self) -> None:
        """The weight may have changed in a way that torch does not count."""
        self._packed = None

    def __call__(self, x: Tensor) -> Tensor:
        weight = self._linear.weight
        if self._packed is None or weight._version != self._version:
            self._packed, self._version = _pack(weight.detach()), weight._version
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._linear.bias, "none", [], "")
        return out


def pack_linears(model: nn.Module) -> list[PackedLinear]:
    """Give every large ``nn.Linear`` of ``model`` on the CPU a packed forward pass (inference only); return them."""
    found: dict[nn.Linear, PackedLinear] = {}
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= MIN_ELEMENTS and _supported(module.weight):
            found[module] = PackedLinear(module)
            module.forward = found[module]  # type: ignore[method-assign,assignment]
    return list(found.values())


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
