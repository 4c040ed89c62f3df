# SPDX-License-Identifier: Apache-2.0
"""The optimiser and its schedule, the same for every kind of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import pydantic
import torch

from palestra.learn.masters import MasterAdamW, has_short


def _below_one(betas: tuple[float, float]) -> tuple[float, float]:
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError("each beta is at least 0 and below 1")
    return betas


Betas = Annotated[tuple[float, float], pydantic.AfterValidator(_below_one)]
"""AdamW's decay rates of its two moments, as a config has them."""

FUSED_ON = ("cpu", "cuda", "mps")
"""Where torch has AdamW as one kernel; elsewhere it is a dozen passes over the weights and their moments."""


def make_optimizer(
    parameters: Sequence[torch.nn.Parameter],
    *,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    critic: Sequence[torch.nn.Parameter] = (),
    critic_learning_rate: float | None = None,
) -> torch.optim.AdamW:
    """AdamW in one pass over each weight (``fused``); matrices decay, norms and biases do not. bfloat16 weights get
    float32 masters. critic: those of the parameters that have ``critic_learning_rate``."""
    apart = {id(p) for p in critic}
    own = [p for p in parameters if id(p) not in apart]
    groups = [
        {"params": [p for p in members if (p.ndim > 1) == matrix], "weight_decay": decay, "lr": rate}
        for members, rate in ((own, learning_rate), (critic, critic_learning_rate or learning_rate))
        for matrix, decay in ((True, weight_decay), (False, 0.0))
    ]
    kind = MasterAdamW if has_short(parameters) else torch.optim.AdamW
    fused = all(p.device.type in FUSED_ON for p in parameters)
    return kind([g for g in groups if g["params"]], lr=learning_rate, betas=betas, fused=fused)


def linear_schedule(
    optimizer: torch.optim.Optimizer, *, steps: int, warmup_ratio: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up over ``warmup_ratio`` of the steps, then linear to 0 after the last.

    With 10 steps and a ratio of 0.2 the factors are 0.5, 1, 1, 7/8, …, 1/8.
    """
    warm = round(steps * warmup_ratio)

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return max(0.0, (steps - step) / max(1, steps - warm))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def restore(
    optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LambdaLR, state: Mapping[str, Any]
) -> None:
    """Put moments and the place in the schedule back as ``state`` has them (``optimizer``, ``scheduler``). Rates, decay
    and betas stay as they were made: a config that was changed holds from here on.

    >>> weight = torch.nn.Parameter(torch.ones(2, 2))
    >>> def made(rate):
    ...     optimizer = make_optimizer([weight], learning_rate=rate, weight_decay=0.0, betas=(0.9, 0.999))
    ...     return optimizer, linear_schedule(optimizer, steps=4, warmup_ratio=0.0)
    >>> optimizer, schedule = made(1.0)
    >>> optimizer.step(), schedule.step()
    (None, None)
    >>> other, its_schedule = made(0.1)
    >>> restore(other, its_schedule, {"optimizer": optimizer.state_dict(), "scheduler": schedule.state_dict()})
    >>> round(other.param_groups[0]["lr"], 9), its_schedule.last_epoch
    (0.075, 1)
    """
    own, rates = [{name: group[name] for name in _OWN} for group in optimizer.param_groups], scheduler.base_lrs
    optimizer.load_state_dict(dict(state["optimizer"]))
    scheduler.load_state_dict(dict(state["scheduler"]))
    scheduler.base_lrs = rates
    for group, values, rate, factor in zip(optimizer.param_groups, own, rates, scheduler.lr_lambdas, strict=True):
        group.update(values, lr=rate * factor(scheduler.last_epoch))


_OWN = ("initial_lr", "weight_decay", "betas")
"""What the config says of a group of parameters."""

__all__ = ["linear_schedule", "make_optimizer", "restore"]
