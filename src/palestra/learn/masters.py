# SPDX-License-Identifier: Apache-2.0
"""AdamW for weights in a short format: the update is made on a float32 copy, of which the weight is the rounding.

In bfloat16 neighbouring numbers lie 1/256 to 1/128 of their size apart, so an update of a thousandth of a weight would
be rounded away, in every step again. The copies ("masters", arXiv:1710.03740, section 3.1) keep it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

SHORT = (torch.bfloat16, torch.float16)


class MasterAdamW(torch.optim.AdamW):
    """AdamW whose parameters are float32 masters of those weights that are shorter; others train as they are.

    Gradients are added up on the masters, in float32, as each backward pass makes them: the weights' own ``.grad``
    stays None, and clipping means the optimiser's parameters (:func:`holders`). Weights that were changed by somebody
    else, such as a checkpoint that was loaded, are what the next step starts from.

    >>> weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    >>> optimizer = MasterAdamW([{"params": [weight]}], lr=1e-3, weight_decay=0.0)
    >>> for step in range(4):
    ...     weight.sum().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     print(f"{optimizer.master(weight).item():.3f} {weight.item()}")
    0.999 1.0
    0.998 0.99609375
    0.997 0.99609375
    0.996 0.99609375
    """

    def __init__(self, groups: Sequence[dict[str, Any]], **options: Any) -> None:
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        held = [{**group, "params": [self._held(p) for p in group["params"]]} for group in groups]
        super().__init__(held, **options)

    def _held(self, weight: nn.Parameter) -> nn.Parameter:
        if weight.dtype not in SHORT:
            return weight
        master = self._masters[weight] = nn.Parameter(weight.detach().float())

        def collect(_: Tensor) -> None:
            assert weight.grad is not None
            gradient, weight.grad = weight.grad.float(), None
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)

        weight.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]
        return master

    def master(self, weight: nn.Parameter) -> nn.Parameter:
        """Where this weight is updated: its float32 copy, or itself."""
        return self._masters.get(weight, weight)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the masters, then round them into the weights."""
        for weight, master in self._masters.items():
            mine = master.to(weight.dtype)
            if not torch.equal(mine, weight):
                master.copy_(torch.where(mine == weight, master, weight.float()))
        result = super().step(closure)
        for weight, master in self._masters.items():
            weight.copy_(master)
        return result

    def state_dict(self) -> dict[str, Any]:
        """AdamW's, and the masters in the order in which the weights were given."""
        return {**super().state_dict(), "masters": [m.detach().clone() for m in self._masters.values()]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`; without masters in it, those of the weights as they are stay."""
        rest = {name: value for name, value in state_dict.items() if name != "masters"}
        super().load_state_dict(rest)
        if "masters" in state_dict:
            for master, kept in zip(self._masters.values(), state_dict["masters"], strict=True):
                master.copy_(kept)


def holders(optimizer: torch.optim.Optimizer, weights: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that hold the gradients of these weights."""
    if isinstance(optimizer, MasterAdamW):
        return [optimizer.master(weight) for weight in weights]
    return list(weights)


def has_short(weights: Iterable[nn.Parameter]) -> bool:
    """Whether any of these weights needs a master."""
    return any(weight.dtype in SHORT for weight in weights)


__all__ = ["MasterAdamW", "has_short", "holders"]
