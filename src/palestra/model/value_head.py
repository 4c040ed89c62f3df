# SPDX-License-Identifier: Apache-2.0
"""A critic: one number per state, from the policy's own hidden states or from a backbone of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from palestra.errors import ModelError
from palestra.model import attention
from palestra.model.attention import AttentionPlan


class Critic(nn.Module):
    """V = w·h + b, h a backbone's last hidden state; w and b begin at 0, so every state is worth 0 at first.

    model: a Hugging Face causal LM or a PEFT model on one. separate: take a copy of its backbone as it is now, adapter
    included, whose trainable parameters are the critic's own; frozen ones stay shared. Otherwise h is the policy's and
    the value loss moves the policy's backbone too. The head computes in float32 at least. Neither the model's module
    tree nor its parameters change, so an engine on them knows nothing of the critic.

    >>> from palestra.model.tiny import calculator_tokenizer, tiny_llama
    >>> critic = Critic(tiny_llama(calculator_tokenizer(), hidden=16, layers=1, heads=2, intermediate=16))
    >>> critic(torch.ones(3, 16)).tolist(), [tuple(p.shape) for p in critic.parameters()]
    ([0.0, 0.0, 0.0], [(1, 16), (1,)])
    """

    def __init__(self, model: nn.Module, *, separate: bool = False) -> None:
        super().__init__()
        attention.use(model)
        weight = next(model.parameters())
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        size = int(attention.hf_model(model).config.get_text_config().hidden_size)
        self.head = nn.Linear(size, 1, dtype=wide, device="meta")  # a real device would draw weights
        self.head.weight = nn.Parameter(torch.zeros(1, size, dtype=wide, device=weight.device))
        self.head.bias = nn.Parameter(torch.zeros(1, dtype=wide, device=weight.device))
        self.backbone: Any = _copy(backbone_of(model)) if separate else None

    def forward(self, hidden: Tensor) -> Tensor:
        """(N, hidden size) → values (N,)."""
        return cast(Tensor, self.head(hidden.to(self.head.weight.dtype))[:, 0])

    def trainable(self) -> dict[str, nn.Parameter]:
        """The critic's own parameters by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: the parameters that train."""
        return {name: p.detach() for name, p in self.trainable().items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Put :meth:`state` back, in place. Raises ModelError where it is that of another critic."""
        own = self.trainable()
        if {k: p.shape for k, p in own.items()} != {k: t.shape for k, t in state.items()}:
            raise ModelError(
                "the critic of the checkpoint is not the one of the config; resume with the algorithm.critic, lora and "
                "model that it was trained with"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(state[name])


def backbone_of(model: nn.Module) -> Any:
    """The part of a causal LM, adapter included, that makes hidden states."""
    return attention.hf_model(model).base_model


def run_backbone(backbone: Any, tokens: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
    """tokens, positions (1, N) of a flat batch → last hidden states (1, N, hidden size)."""
    out = backbone(input_ids=tokens, position_ids=positions, use_cache=False, plan=plan)
    return cast(Tensor, out.last_hidden_state)


@contextmanager
def hidden_states(model: nn.Module) -> Iterator[list[Tensor]]:
    """Inside the block each forward pass of ``model`` adds its last hidden states, (1, N, hidden size), to the list."""
    seen: list[Tensor] = []
    handle = backbone_of(model).register_forward_hook(lambda module, given, out: seen.append(out.last_hidden_state))
    try:
        yield seen
    finally:
        handle.remove()


def _copy(backbone: nn.Module) -> nn.Module:
    """The backbone as it is now; parameters that do not train are shared."""
    shared = {id(p): p for p in backbone.parameters() if not p.requires_grad}
    return copy.deepcopy(backbone, memo=dict(shared))


__all__ = ["Critic", "backbone_of", "hidden_states", "run_backbone"]
