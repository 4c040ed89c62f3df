# SPDX-License-Identifier: Apache-2.0
"""Norms and gated activations of Llama-like layers by the kernels, with their gradients.

transformers writes each as half a dozen operations of torch, every one of which goes through memory and keeps what
its gradient needs. The modules stay and only their ``forward`` changes; what the kernels do not take (another dtype,
another device) goes the modules' own way.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from palestra.model import kernels

FAMILIES = frozenset({"Llama", "Mistral", "Qwen2", "Qwen3"})
_NORMS = frozenset(f"{family}RMSNorm" for family in FAMILIES)
_MLPS = frozenset(f"{family}MLP" for family in FAMILIES)


def fuse(model: nn.Module) -> None:
    """Let the modules that are known here run on kernels, where there are any (harmless to repeat)."""
    if next(model.parameters()).device.type != "cpu" or kernels.library() is None:
        return
    for module in model.modules():
        if is_norm(module):
            module.forward = MethodType(_norm, module)  # a method: a deep copy of the module gets one of its own
        elif is_gated(module):
            module.forward = MethodType(_gated, module)


def is_norm(module: nn.Module) -> bool:
    """Whether it is weight · x / √(mean x² + ε)."""
    return is_one_of(module, _NORMS)


def is_gated(module: nn.Module) -> bool:
    """Whether it is down(silu(gate(x)) · up(x))."""
    of: Any = module
    return is_one_of(module, _MLPS) and type(of.act_fn).__name__ in ("SiLU", "SiLUActivation")


def is_one_of(module: nn.Module, names: frozenset[str]) -> bool:
    """Whether its class is one of transformers' own of these names, with the forward pass of its class or ours."""
    kind, given = type(module), vars(module).get("forward")
    untouched = given is None or getattr(given, "__func__", None) in (_norm, _gated)
    return kind.__name__ in names and kind.__module__.startswith("transformers.models.") and untouched


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    if not kernels.takes(hidden_states, self.weight):
        plain: Tensor = type(self).forward(self, hidden_states)
        return plain
    normed: Tensor = _Norm.apply(hidden_states, self.weight, self.variance_epsilon)  # type: ignore[no-untyped-call]
    return normed


def _gated(self: Any, x: Tensor) -> Tensor:
    gate, up = self.gate_proj(x), self.up_proj(x)
    fused = kernels.takes(gate, up)
    inside = _SiluTimes.apply(gate, up) if fused else self.act_fn(gate) * up  # type: ignore[no-untyped-call]
    out: Tensor = self.down_proj(inside)
    return out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        scale = flat.new_empty(len(flat))
        normed = kernels.rms_norm(flat, weight, epsilon, scale=scale)
        ctx.save_for_backward(flat, weight, scale)
        return normed.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        grad = grads[0].reshape(x.shape).contiguous()
        dx, dw = kernels.rms_norm_backward(grad, x, weight, scale, wants_weight=ctx.needs_input_grad[1])
        return dx.view(grads[0].shape), dw, None


class _SiluTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        flat = gate.reshape(-1, gate.shape[-1]).contiguous(), up.reshape(-1, up.shape[-1]).contiguous()
        ctx.save_for_backward(*flat)
        return kernels.silu_times(*flat).view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate, dup = kernels.silu_times_backward(grads[0].reshape(gate.shape).contiguous(), gate, up)
        return dgate.view(grads[0].shape), dup.view(grads[0].shape)


__all__ = ["FAMILIES", "fuse", "is_gated", "is_norm", "is_one_of"]
