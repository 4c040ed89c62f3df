# SPDX-License-Identifier: Apache-2.0
"""The engine's own module tree over the trainer's parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from palestra.errors import EngineError
from palestra.model import attention


def skeleton(model: nn.Module, dtype: str, *, apart: bool = False) -> nn.Module:
    """A second module tree over the same parameters: ``train()``, dropout or ``disable_adapter()`` on the
    trainer's side do not reach it. With another dtype the parameters are a converted copy; ``apart``, those that train
    are a copy, and only those."""
    attention.check_supported(model)
    if dtype == "auto":
        shared: dict[int, Any] = {id(p): p for p in model.parameters() if not (apart and p.requires_grad)}
        twin: nn.Module = copy.deepcopy(model, memo=shared)
        if apart:
            twin.requires_grad_(requires_grad=False)  # what it shares does not train
    else:
        twin = copy.deepcopy(model).to(getattr(torch, dtype)).requires_grad_(requires_grad=False)
    attention.use(twin)
    return twin.eval()


def copy_weights(policy: nn.Module | Mapping[str, Tensor] | None, model: nn.Module) -> None:
    """Copy into the engine's parameters those of ``policy`` that are not the very same tensors. Parameters by name may
    be some of them; the others stay."""
    if policy is None:
        return
    own = dict(model.named_parameters())
    if isinstance(policy, Mapping):
        source: Mapping[str, Tensor] = policy
        absent = [name for name in source if name not in own]
        own = {name: own[name] for name in source if name in own}
    else:
        source = dict(policy.named_parameters())
        absent = [name for name in own if name not in source]
    if absent:
        raise EngineError(f"load_weights: the policy has no parameter {absent[0]!r}; it is not the engine's model")
    with torch.no_grad():
        for name, mine in own.items():
            if source[name] is not mine:
                mine.copy_(source[name])
