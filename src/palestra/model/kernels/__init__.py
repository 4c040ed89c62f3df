# SPDX-License-Identifier: Apache-2.0
"""The small operations between a model's matrix products, and a whole decoder's pass, as kernels in C on tensors.

Where there is no compiler, or ``PALESTRA_KERNELS=0`` says so, :func:`available` is False and callers take their plain
path.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.model.kernels.build import library

LANES = 8
"""Widths that the kernels take are multiples of it."""
DRAW_BLOCK = 256
"""Tokens whose masses :func:`draw` sums apart."""
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def available(*tensors: Tensor) -> bool:
    """Whether the kernels are there and take these tensors: float32, on the CPU, the last axis dense."""
    fit = all(t.dtype == torch.float32 and t.device.type == "cpu" and t.stride(-1) == 1 for t in tensors)
    return fit and library() is not None


def multiplies(*weights: Tensor) -> bool:
    """Whether :func:`product` takes these weights: all in float32, or all in bfloat16 where the processor has no
    products of its own in it (torch's then take eight times as long as those in float32)."""
    if len({w.dtype for w in weights}) == 1 and weights[0].dtype == torch.bfloat16:
        dense = all(w.device.type == "cpu" and w.stride(-1) == 1 for w in weights)
        return dense and library() is not None and not bfloat16_products()
    return available(*weights)


def bfloat16_products() -> bool:
    """Whether this processor multiplies in bfloat16."""
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def takes(*tensors: Tensor) -> bool:
    """Whether they are there for tensors whose last axis is walked in whole vectors."""
    return all(t.shape[-1] % LANES == 0 for t in tensors) and available(*tensors)


# Attention over slots ------------------------------------------------------------------------------------------


class _Rows(ctypes.Structure):
    _fields_ = [(n, _POINTER) for n in ("query", "key", "value")] + [
        (f"{n}_{step}", _INT) for n in ("query", "key", "value") for step in ("row", "head")
    ]


class _Turn(ctypes.Structure):
    _fields_ = [(n, _POINTER) for n in ("cosines", "sines", "query_norm", "key_norm")] + [("epsilon", _FLOAT)]


class _Slots(ctypes.Structure):
    _fields_ = [
        *((n, _POINTER) for n in ("keys", "values")),
        *((n, _INT) for n in ("capacity", "heads", "key_heads", "width", "value_width", "window")),
        ("scale", _FLOAT),
    ]


class _Pass(ctypes.Structure):
    _fields_ = [
        *((n, _POINTER) for n in ("written", "write_slot", "write_place", "slot", "position", "prefix_slot", "prefix")),
        *((n, _INT) for n in ("writes", "count")),
    ]


@dataclass(frozen=True, slots=True)
class Pass:
    """What is written where and who attends where: row ``written[w]`` (w itself where None) goes to ``write_slot[w]``,
    ``write_place[w]``; row n attends in ``slot[n]`` up to ``position[n]``, and the first ``prefix[n]`` keys there are
    those of ``prefix_slot[n]``, where they are read: siblings that read one place find it in the cache. All int64."""

    written: Tensor | None
    write_slot: Tensor
    write_place: Tensor
    slot: Tensor
    position: Tensor
    prefix_slot: Tensor
    prefix: Tensor

    def _struct(self) -> _Pass:
        parts = (
            self.written,
            self.write_slot,
            self.write_place,
            self.slot,
            self.position,
            self.prefix_slot,
            self.prefix,
        )
        return _Pass(*map(_at, parts), len(self.write_slot), len(self.slot))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    of: Pass,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Write rows' keys and values into slots, then let every row attend to its slot up to its position: (N, H, Dv).

    query (N, H, D), key (N, Hkv, D), value (N, Hkv, Dv); keys (slots, Hkv, capacity, D) and values of the store.
    """
    count, heads, width = query.shape
    out = query.new_empty(count, heads, value.shape[2])
    rows = _Rows(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), *query.stride()[:2], *key.stride()[:2], *value.stride()[:2]
    )
    sizes = (keys.shape[2], heads, key.shape[1], width, value.shape[2], window or 0)
    slots = _Slots(keys.data_ptr(), values.data_ptr(), *sizes, scale)
    _check(_lib().attend(_ref(rows), _ref(slots), None, _ref(of._struct()), _at(out), torch.get_num_threads()))
    return out


# A decoder's layers ----------------------------------------------------------------------------------------------


class _Packed(ctypes.Structure):
    _fields_ = [("weight", _POINTER), ("bias", _POINTER), ("narrow", _INT)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((n, _POINTER) for n in ("norm", "mlp_norm")),
        *((n, _Packed) for n in ("qkv", "mixed", "gate_up", "down")),
        ("turns", _Turn),
        ("slots", _Slots),
    ]


Packed = tuple[Tensor, Tensor | None]
"""A weight and a bias as :func:`pack` gives them."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a Llama-like decoder: its packed weights, the weights of its norms (of queries and keys as well,
    where it has them), and how it attends."""

    norm: Tensor
    qkv: Packed
    mixed: Packed
    mlp_norm: Tensor
    gate_up: Packed
    down: Packed
    heads: int
    key_heads: int
    width: int
    window: int | None
    scale: float
    query_norm: Tensor | None
    key_norm: Tensor | None


class Decoder:
    """Layers that a pass goes through in one call. epsilon: of all norms; inner: how wide the gated part is."""

    def __init__(self, layers: Sequence[Layer], *, epsilon: float, inner: int) -> None:
        self._kept, self._epsilon, self._inner = layers, epsilon, inner  # kept: the tensors behind the pointers
        self._layers = (_Layer * len(layers))()
        for c, layer in zip(self._layers, layers, strict=True):
            c.norm, c.mlp_norm = layer.norm.data_ptr(), layer.mlp_norm.data_ptr()
            for name in ("qkv", "mixed", "gate_up", "down"):
                setattr(c, name, _packed(*getattr(layer, name)))
            c.turns = _Turn(None, None, _at(layer.query_norm), _at(layer.key_norm), epsilon)
            sizes = (layer.heads, layer.key_heads, layer.width, layer.width, layer.window or 0)
            c.slots = _Slots(None, None, 0, *sizes, layer.scale)

    def __call__(
        self, x: Tensor, cosines: Tensor, sines: Tensor, tables: Sequence[tuple[Tensor, Tensor]], of: Pass
    ) -> None:
        """Let x (N, hidden) go through the layers, in place. cosines, sines (N, D), dense; tables: each layer's keys
        and values in the store."""
        if cosines.shape != (len(x), self._layers[0].slots.width) or not available(x, cosines, sines):
            raise ValueError(f"angles of shape {tuple(cosines.shape)} do not turn whole heads in float32")
        for c, (keys, values) in zip(self._layers, tables, strict=True):
            c.turns.cosines, c.turns.sines = cosines.data_ptr(), sines.data_ptr()
            c.slots.keys, c.slots.values, c.slots.capacity = keys.data_ptr(), values.data_ptr(), keys.shape[2]
        _check(
            _lib().decode(
                self._layers,
                _INT(len(self._layers)),
                _ref(of._struct()),
                _at(x),
                _INT(x.shape[1]),
                _INT(self._inner),
                _FLOAT(self._epsilon),
                torch.get_num_threads(),
            )
        )


# Products -------------------------------------------------------------------------------------------------------


def pack(weight: Tensor, bias: Tensor | None) -> Packed:
    """A weight (O, d) and its bias (O,) as :func:`product` reads them: (panels of some outputs, d, outputs) with zeros
    behind the last, in the weight's dtype; the bias in float32."""
    (width, depth), size = weight.shape, _lib().panel()
    packed = weight.new_empty(-(-width // size), depth, size)
    narrow, threads = int(weight.dtype == torch.bfloat16), torch.get_num_threads()
    _lib().pack(_at(weight.contiguous()), _at(packed), *map(_INT, (width, depth)), narrow, threads)
    return packed, None if bias is None else F.pad(bias.float(), (0, -width % size))


def product(x: Tensor, packed: Tensor, bias: Tensor | None, width: int) -> Tensor:
    """x (N, d), in float32, times a packed weight of ``width`` outputs, and its bias: (N, width)."""
    out = x.new_empty(len(x), width)
    by = _packed(packed, bias)
    _lib().product(_at(x), _ref(by), _at(out), *map(_INT, (*x.shape, width)), torch.get_num_threads())
    return out


def _packed(weight: Tensor, bias: Tensor | None) -> _Packed:
    return _Packed(_at(weight), _at(bias), int(weight.dtype == torch.bfloat16))


# Sampling -------------------------------------------------------------------------------------------------------


def draw(logits: Tensor, factors: Tensor, rows: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """One token for each ``noise`` [n] in [0, 1) from softmax(logits · factor) of the row of logits (N, V) that
    ``rows`` [n] names, the likeliest where it is negative; and its log-probability. factors (N,)."""
    tokens, logprobs = torch.empty_like(rows), torch.empty_like(noise)
    top, sums = torch.empty_like(factors), logits.new_empty(len(logits), -(-logits.shape[1] // DRAW_BLOCK))
    tensors = (logits, factors, top, sums, rows, noise, tokens, logprobs)
    _lib().draw(*map(_at, tensors), *map(_INT, (*logits.shape, len(rows))), torch.get_num_threads())
    return tokens, logprobs


# Norms, activations, log-probabilities --------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, *, scale: Tensor | None = None) -> Tensor:
    """weight · x / √(mean x² + ε) over the last axis of x (N, d), dense. scale (N,): takes 1/√."""
    out = torch.empty_like(x)
    _lib().rms_norm(
        *map(_at, (x, weight, out, scale)),
        *map(_INT, x.shape),
        _FLOAT(epsilon),
        torch.get_num_threads(),
    )
    return out


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, *, wants_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x and, where wanted, of the weight."""
    threads = torch.get_num_threads()
    dx = torch.empty_like(x)
    parts = x.new_empty(threads, x.shape[1]) if wants_weight else None
    _lib().rms_norm_backward(*map(_at, (grad, x, weight, scale, dx, parts)), *map(_INT, x.shape), threads)
    return dx, None if parts is None else parts.sum(0)


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, both (N, d), dense."""
    out = gate.new_empty(gate.shape)
    _lib().silu_times(*map(_at, (gate, up, out)), *map(_INT, gate.shape), torch.get_num_threads())
    return out


def silu_times_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up; all dense, (N, d)."""
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    _lib().silu_times_backward(*map(_at, (grad, gate, up, dgate, dup)), *map(_INT, gate.shape), torch.get_num_threads())
    return dgate, dup


def log_sums(logits: Tensor, factor: float, *, entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """For each row of logits (U, V): the largest, log Σ exp((logits − largest) · factor) and, where asked for, the
    entropy of softmax(logits · factor) in nats."""
    top, total = logits.new_empty(len(logits)), logits.new_empty(len(logits))
    spread = logits.new_empty(len(logits)) if entropy else None
    _lib().log_sums(
        *map(_at, (logits, top, total, spread)),
        *map(_INT, logits.shape),
        _FLOAT(factor),
        torch.get_num_threads(),
    )
    return top, total, spread


def log_sums_backward(
    logits: Tensor,
    top: Tensor,
    total: Tensor,
    grads: Tensor,
    targets: Tensor,
    order: Tensor,
    starts: Tensor,
    factor: float,
) -> None:
    """Turn logits (U, V), in place, into the gradient of Σ grads[m] · log-prob of targets[m]; row r has the m that
    ``order[starts[r]:starts[r + 1]]`` lists."""
    _lib().log_sums_backward(
        *map(_at, (logits, top, total, grads, targets, order, starts)),
        *map(_INT, logits.shape),
        _FLOAT(factor),
        torch.get_num_threads(),
    )


def _lib() -> ctypes.CDLL:
    loaded = library()
    assert loaded is not None, "ask available() first"
    return loaded


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("no memory for a forward pass")


def _ref(structure: ctypes.Structure) -> Any:
    return ctypes.byref(structure)


def _at(tensor: Tensor | None) -> ctypes.c_void_p | None:
    return None if tensor is None else _POINTER(tensor.data_ptr())


__all__ = [
    "LANES",
    "Decoder",
    "Layer",
    "Packed",
    "Pass",
    "attend",
    "available",
    "bfloat16_products",
    "draw",
    "library",
    "log_sums",
    "log_sums_backward",
    "multiplies",
    "pack",
    "product",
    "rms_norm",
    "rms_norm_backward",
    "silu_times",
    "silu_times_backward",
    "takes",
]
