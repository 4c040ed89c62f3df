# SPDX-License-Identifier: Apache-2.0
"""Pipelines with every kind of stage, as small as can be: from data to export, and by feedback."""

from __future__ import annotations

from pathlib import Path

import torch

from palestra.model.loading import load_model
from palestra.pipeline import PipelineConfig


def small(out: Path, steps: int = 3) -> PipelineConfig:
    """Everything from data to export, on the built-in model, with as little of each as there can be."""
    stages = {
        "data": {"tasks": "arithmetic", "train": 6, "test": 3, "demonstrations": {"name": "arithmetic", "count": 6}},
        "check": {"train": "stage:data/train.jsonl", "test": "stage:data/test.jsonl"},
        "sft": {
            "model": "builtin:calculator",
            "sft": {
                "data": {"name": "jsonl", "path": "stage:data/demonstrations.jsonl"},
                "steps": steps,
                "batch_size": 2,
                "learning_rate": 1e-3,
            },
        },
        "eval_sft": {"kind": "eval", "model": "stage:sft"},
        "gate": {"of": "eval_sft", "require": "accuracy >= 0"},
        "rl": {
            "model": "stage:sft",
            "algorithm": {"preset": "grpo", "group_size": 2, "kl_coef": 0.0},
            "train": {"steps": 1, "tasks_per_step": 1, "guard": "off", "dump_every": 0},
            "eval": {"size": 0},
        },
        "eval_rl": {"kind": "eval", "model": "stage:rl"},
        "compare": {"before": "eval_sft", "after": "eval_rl"},
        "export": {"model": "stage:rl"},
    }
    common = {
        "renderer": "plain",
        "env": "calculator",
        "data": {"name": "jsonl", "path": "stage:data"},
        "rewards": {"accuracy": {"function": "calculator_accuracy"}},
        "sampling": {"max_new_tokens": 4},
        "limits": {"max_turns": 2},
        "eval": {"size": 2},
    }
    return PipelineConfig(out=str(out), common=common, stages=stages)


def feedback(out: Path) -> PipelineConfig:
    """Episodes, judged by a function ``likes_variety:liked``, become pairs, those a reward model, and that RL."""
    model = {"model": "builtin:calculator"}
    stages = {
        "sample": {**model, "rewards": {"format": {"function": "calculator_format"}}}
        | {"sample": {"tasks": 3, "group_size": 4}},
        "judge": {"rollouts": "stage:sample", "rewards": {"liked": {"function": "likes_variety:liked"}}},
        "pairs": {"rollouts": "stage:judge"},
        "reward_model": {**model, "reward_model": {"data": {"name": "table", "path": "stage:pairs"}, "steps": 1}},
        "prefer": {**model, "prefer": {"data": {"name": "table", "path": "stage:pairs"}, "steps": 2}},
        "rl": {
            **model,
            "rewards": {"reward_model": {"path": "stage:reward_model"}},
            "algorithm": {"preset": "grpo", "group_size": 2, "kl_coef": 0.0},
            "train": {"steps": 1, "tasks_per_step": 1},
            "eval": {"size": 0},
        },
    }
    common = {
        "renderer": "plain",
        "env": "calculator",
        "data": "arithmetic",
        "sampling": {"max_new_tokens": 40, "stop": [*"0123456789abcdefgh"]},  # or most would be cut off
        "limits": {"max_turns": 1},
    }
    return PipelineConfig(out=str(out), common=common, stages=stages)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(str(path), device="cpu").model.state_dict())
