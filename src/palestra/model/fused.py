# SPDX-License-Identifier: Apache-2.0
"""Norms and gated activations of Llama-like layers by the kernels, with their gradients.

transformers writes each as half a dozen operations of torch, every one of which goes through memory and keeps what
its gradient needs. The modules stay and only their ``forward`` changes; what the kernels do not take (another dtype,
another device) goes the modules' own way. What norms and gates give is a third of what a backward pass keeps, and
quick to work out again: inside :func:`recomputed` it is not kept.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    x, weight, epsilon = hidden_states.detach(), self.weight.detach(), self.variance_epsilon
    _may_go(normed, lambda: kernels.rms_norm(_flat(x), weight, epsilon))
    return normed


def _gated(self: Any, x: Tensor) -> Tensor:
    gate, up = self.gate_proj(x), self.up_proj(x)
    if not kernels.takes(gate, up):
        plain: Tensor = self.down_proj(self.act_fn(gate) * up)
        return plain
    inside = _SiluTimes.apply(gate, up)  # type: ignore[no-untyped-call]
    g, u = gate.detach(), up.detach()
    _may_go(inside, lambda: kernels.silu_times(_flat(g), _flat(u)))
    out: Tensor = self.down_proj(inside)
    return out


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


# What is worked out again ---------------------------------------------------------------------------------------


class _Known(threading.local):
    """By where its memory begins, what :func:`recomputed` need not keep: of this thread, since engines run beside."""

    tensors: dict[int, _Again] | None = None


_known = _Known()


class _Again:
    """A tensor that the backward pass makes anew when it is first asked for and lets go of when it was asked for as
    often as it was to be kept."""

    def __init__(self, make: Callable[[], Tensor], alive: weakref.ref[Tensor]) -> None:
        self._make, self._alive = make, alive  # the reference tells when the memory is somebody else's
        self._uses = self._left = 0
        self._made: Tensor | None = None

    def kept(self, shape: torch.Size) -> Callable[[], Tensor]:
        """In place of one view of it that was to be kept."""
        self._uses += 1

        def made() -> Tensor:
            if self._made is None:
                with torch.no_grad():
                    self._made, self._left = self._make(), self._uses
            view, self._left = self._made.view(shape), self._left - 1
            if not self._left:
                self._made = None
            return view

        return made


@contextmanager
def recomputed() -> Iterator[None]:
    """A forward pass inside keeps neither norms nor gated activations for its backward pass, which makes them anew from
    what else was kept: the same bits, and about a third of what a Llama-like layer keeps is not."""
    if not torch.is_grad_enabled():
        yield
        return
    before, _known.tensors = _known.tensors, {}
    known = _known.tensors

    def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        again = known.get(tensor.untyped_storage().data_ptr())
        whole = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
        return tensor if again is None or not whole else again.kept(tensor.shape)

    def unpack(kept: Tensor | Callable[[], Tensor]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept()

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        _known.tensors = before


def _may_go(tensor: Tensor, make: Callable[[], Tensor]) -> None:
    """Inside :func:`recomputed`, let ``make`` give the numbers of ``tensor`` again."""
    known = _known.tensors
    if known is not None:
        at = tensor.untyped_storage().data_ptr()
        known[at] = _Again(make, weakref.ref(tensor, lambda _: known.pop(at, None)))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        flat = _flat(x)
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
        flat = _flat(gate), _flat(up)
        ctx.save_for_backward(*flat)
        return kernels.silu_times(*flat).view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate, dup = kernels.silu_times_backward(grads[0].reshape(gate.shape).contiguous(), gate, up)
        return dgate.view(grads[0].shape), dup.view(grads[0].shape)


__all__ = ["FAMILIES", "fuse", "is_gated", "is_norm", "is_one_of", "recomputed"]
