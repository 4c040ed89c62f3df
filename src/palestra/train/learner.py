# SPDX-License-Identifier: Apache-2.0
"""Policy, critic and optimiser of a reinforcement-learning run, as its config wants them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from palestra.errors import RunError
from palestra.learn.optim import linear_schedule, make_optimizer
from palestra.learn.policy import Policy
from palestra.model.value_head import Critic
from palestra.train import setup
from palestra.train.config import RLConfig

CRITIC_FACTOR = 10.0
"""A critic's learning rate over the policy's, where none is given: its head begins at 0."""


def make_learner(
    config: RLConfig, model: nn.Module, *, reference: bool | nn.Module, rate: float
) -> tuple[Policy, torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """The policy, with a critic where the advantage needs one, AdamW over both, and its linear schedule."""
    train, algorithm = config.train, config.algorithm
    critic = Critic(model, separate=algorithm.critic == "separate") if algorithm.needs_critic else None
    policy = Policy(
        model,
        reference=reference,
        compute_dtype=setup.torch_dtype(train.compute_dtype, model),
        gradient_checkpointing=train.gradient_checkpointing,
        critic=critic,
    )
    optimizer = make_optimizer(
        policy.parameters(),
        learning_rate=rate,
        weight_decay=train.weight_decay,
        betas=train.betas,
        critic=policy.critic_parameters(),
        critic_learning_rate=algorithm.critic_learning_rate or CRITIC_FACTOR * rate,
    )
    return policy, optimizer, linear_schedule(optimizer, steps=train.steps, warmup_ratio=train.warmup_ratio)


def critic_state(policy: Policy) -> dict[str, Any] | None:
    """The critic for a checkpoint, or None where there is none."""
    return None if policy.critic is None else policy.critic.state()


def restore_critic(policy: Policy, state: Mapping[str, Any]) -> None:
    """Put the critic of a checkpoint's trainer ``state`` back. Raises RunError unless both or neither have one."""
    found = state.get("critic")
    if (found is None) != (policy.critic is None):
        has = "no critic" if found is None else "a critic"
        raise RunError(
            f"the checkpoint has {has}, for its algorithm was another; resume with that, or start another run"
        )
    if policy.critic is not None and found is not None:
        policy.critic.load_state(found)


__all__ = ["critic_state", "make_learner", "restore_critic"]
