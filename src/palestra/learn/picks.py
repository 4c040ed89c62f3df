# SPDX-License-Identifier: Apache-2.0
"""Rows picked by number, some of them often, with a gradient that is the same bits every time.

The gradient of ``x[index]`` adds up at each row what its copies received. torch does so with several threads at once
and atomic additions, in the order in which they come; here each row sums its own copies, in their order, which is also
some twenty times as fast on a CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor


class Picks:
    """The rows ``index`` (any shape, -1 where padded) of tensors with ``rows`` rows.

    >>> picks = Picks(np.array([[0, 1, -1], [0, 2, 1]]), rows=3)
    >>> x = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    >>> y = picks(x)
    >>> y[..., 0].tolist()  # what stands at padded places is row 0, and no gradient comes back from there
    [[1.0, 2.0, 1.0], [1.0, 3.0, 2.0]]
    >>> y.sum().backward()
    >>> x.grad.tolist()
    [[2.0], [2.0], [1.0]]
    """

    def __init__(self, index: npt.NDArray[np.int64], *, rows: int, device: torch.device | str = "cpu") -> None:
        flat = index.ravel()
        order = np.argsort(flat, kind="stable")
        order = order[np.searchsorted(flat[order], 0) :]  # without the padding
        starts = np.searchsorted(flat[order], np.arange(rows))
        self.index, self._order, self._starts = (torch.from_numpy(x).to(device) for x in (index, order, starts))
        self._at = self.index.clamp(min=0)

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` (rows, …) → (*index.shape, …)."""
        if x.device.type not in ("cpu", "cuda"):  # where torch may lack the sum by rows
            return x[self._at]
        picked: Tensor = _Pick.apply(x, self._at, self._order, self._starts)  # type: ignore[no-untyped-call]
        return picked


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Tensor, order: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(order, starts)
        ctx.dims = at.dim()
        return x[at]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        order, starts = ctx.saved_tensors
        shape = grads[0].shape[ctx.dims :]
        summed = F.embedding_bag(order, grads[0].reshape(-1, shape.numel()), starts, mode="sum")
        return summed.view(-1, *shape), None, None, None


__all__ = ["Picks"]
