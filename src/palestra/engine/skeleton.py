# SPDX-License-Identifier: Apache-2.0
"""The engine's own module tree over the trainer's parameters."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from palestra.errors import EngineError
from palestra.model import attention


def skeleton(model: nn.Module, dtype: str) -> nn.Module:
    """A second module tree over the same parameters: ``train()``, dropout or ``disable_adapter()`` on the
    trainer's side do not reach it. With another dtype the parameters are a converted copy."""
    attention.check_supported(model)
    if dtype == "auto":
        twin: nn.Module = copy.deepcopy(model, memo={id(p): p for p in model.parameters()})
    else:
        twin = copy.deepcopy(model).to(getattr(torch, dtype)).requires_grad_(requires_grad=False)
    attention.use(twin)
    return twin.eval()


def copy_weights(policy: Any, model: nn.Module) -> None:
    """Copy into the engine's parameters those of ``policy`` that are not the very same tensors."""
    if policy is None:
        return
    source = dict(policy.named_parameters())
    own = dict(model.named_parameters())
    if absent := [name for name in own if name not in source]:
        raise EngineError(f"load_weights: the policy has no parameter {absent[0]!r}; it is not the engine's model")
    with torch.no_grad():
        for name, mine in own.items():
            if source[name] is not mine:
                mine.copy_(source[name])
