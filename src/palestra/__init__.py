# SPDX-License-Identifier: Apache-2.0
"""Palestra: train language agents with reinforcement learning.

Episodes, token truth, rewards, advantages, losses, the loop and an in-process engine. Nothing heavy is imported
until it is used: ``import palestra`` costs milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_WHERE = {
    "Action": "palestra.env",
    "Author": "palestra.types",
    "ByteTokenizer": "palestra.model.testing",
    "CalculatorEnv": "palestra.env",
    "ChatTemplateRenderer": "palestra.chat",
    "Completion": "palestra.engine.base",
    "Engine": "palestra.engine.base",
    "Env": "palestra.env",
    "Episode": "palestra.types",
    "Group": "palestra.types",
    "Limits": "palestra.rollout.episode",
    "LocalEngine": "palestra.engine.local",
    "Message": "palestra.types",
    "Observation": "palestra.env",
    "PalestraError": "palestra.errors",
    "PlainRenderer": "palestra.chat",
    "PreferConfig": "palestra.train.preference_config",
    "RLConfig": "palestra.train.config",
    "RewardModelConfig": "palestra.train.preference_config",
    "RewardTerm": "palestra.types",
    "Rubric": "palestra.reward.rubric",
    "SFTConfig": "palestra.train.config",
    "SamplingConfig": "palestra.rollout.episode",
    "SamplingParams": "palestra.engine.base",
    "ScriptedEngine": "palestra.engine.scripted",
    "SelfRefineEnv": "palestra.env",
    "Span": "palestra.types",
    "StepResult": "palestra.env",
    "StopReason": "palestra.types",
    "Task": "palestra.types",
    "ToolEnv": "palestra.env",
    "Trajectory": "palestra.types",
    "Turn": "palestra.types",
    "UserError": "palestra.errors",
    "collect": "palestra.rollout.collect",
    "evaluate": "palestra.eval.evaluate",
    "load_model": "palestra.model.loading",
    "make_env": "palestra.env",
    "make_renderer": "palestra.chat",
    "make_rubric": "palestra.reward.build",
    "run_episode": "palestra.rollout.episode",
    "tool": "palestra.env",
    "train_prefer": "palestra.train.prefer",
    "train_reward_model": "palestra.train.reward_model",
    "train_rl": "palestra.train.rl",
    "train_sft": "palestra.train.sft",
}

try:
    __version__ = version("palestra")
except PackageNotFoundError:  # run from a source tree that was not installed
    __version__ = "0.0.0"

__all__ = sorted([*_WHERE, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'palestra' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
