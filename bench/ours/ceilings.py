# SPDX-License-Identifier: Apache-2.0
"""What this machine does at most, by torch's own kernels: the rate of large matrix products, and of reading memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.peers.serve import Reply, timed

TIMES, BUDGET_S = 7, 3.0


def ceilings(size: int = 2048, floats: int = 2**28) -> Callable[[dict[str, Any]], Reply]:
    """size: of square matrices. floats: how many are read for the bandwidth. The best of several, since a ceiling is
    what the machine can do when nothing disturbs it."""

    def measure(_: dict[str, Any]) -> Reply:
        return {"flops": {name: _product(size, getattr(torch, name)) for name in DTYPES}, "bandwidth": _reading(floats)}

    return measure


DTYPES = ("float32", "bfloat16")


def _product(size: int, dtype: torch.dtype) -> float:
    """FLOP per second of x @ w.T, both (size, size)."""
    x, w = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    return 2 * size**3 / _best(lambda: torch.nn.functional.linear(x, w))


def _reading(floats: int) -> float:
    """Bytes per second of a sum over float32s."""
    x = torch.ones(floats)
    return 4 * floats / _best(x.sum)


def _best(work: Callable[[], Any]) -> float:
    """Seconds of the best of up to seven, within the budget: where a dtype has no fast kernel, one is enough."""
    runs: list[float] = []
    while len(runs) < TIMES and sum(runs) < BUDGET_S:
        runs.append(timed(work)[0])
    return min(runs)
