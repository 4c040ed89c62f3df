# SPDX-License-Identifier: Apache-2.0
"""The parameters of each action. A parameter that nothing would read is an error, and an unknown one names the
nearest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import pydantic
from pydantic import AliasChoices, Field

from palestra import config as configuration
from palestra.config import Config
from palestra.errors import ConfigError, unknown

GROUP = 8
"""Completions of a prompt where nobody says how many."""
_SAMPLED = (
    *("num_generations", "max_new_tokens", "temperature", "kl_coef", "clip_range"),
    *("reward_type", "reward_config", "custom_reward"),
)
READ_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_SAMPLED, ("grpo", "ppo")),
    "kl_coef": ("grpo", "ppo", "dpo"),
    "max_length": ("sft", "dpo", "reward"),
    "format": ("sft", "grpo", "ppo"),
}
"""Parameters of training that not every algorithm has a use for → those that do."""


class Data(Config):
    """dataset: a registered name, ``gsm8k``, a file or directory, or a data set on the Hub. custom_dataset: rows
    instead of a name. max_samples: the first rows only (none = all)."""

    dataset: str | None = None
    split: str = "train"
    max_samples: int | None = Field(default=None, ge=1)
    custom_dataset: Any = None


class TrainParameters(Data):
    """``action: train``.

    format: of the rows that are trained on: sft for sft, rl for grpo and ppo, or raw questions and answers, which are
    brought into it (none = as they look). batch_size: rows per optimiser step; completions for grpo and ppo, so a
    multiple of num_generations. logging_steps, save_steps, eval_steps: steps between lines of progress, checkpoints,
    and measurements on held-out rows (none = no measurement). kl_coef: for dpo its β. clip_range: on both sides.
    output_dir: the trained model, and its run.
    """

    action: Literal["train"] = "train"
    algorithm: Literal["sft", "grpo", "ppo", "dpo", "reward"] = "sft"
    model_name: str = "Qwen/Qwen3-0.6B"
    format: Literal["raw", "sft", "rl"] | None = None
    num_epochs: int = Field(default=3, ge=1)
    batch_size: int | None = Field(default=None, ge=1)
    learning_rate: float | None = Field(default=None, gt=0)
    use_lora: bool = True
    lora_rank: int | None = Field(default=None, ge=1, validation_alias=AliasChoices("lora_rank", "lora_r"))
    lora_alpha: float | None = Field(default=None, gt=0)
    lora_target_modules: tuple[str, ...] | None = Field(
        default=None, validation_alias=AliasChoices("lora_target_modules", "target_modules")
    )
    warmup_ratio: float = Field(default=0.1, ge=0, le=1)
    weight_decay: float = Field(default=0.01, ge=0)
    save_steps: int = Field(default=500, ge=1)
    logging_steps: int = Field(default=100, ge=1)
    eval_steps: int | None = Field(default=None, ge=1)
    max_length: int = Field(default=1024, ge=2)
    num_generations: int | None = Field(default=None, ge=1)
    max_new_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    kl_coef: float | None = Field(default=None, ge=0)
    clip_range: float | None = Field(default=None, gt=0, lt=1)
    reward_type: str | None = None
    reward_config: dict[str, Any] | None = None
    custom_reward: Any = None
    use_wandb: bool = False
    use_tensorboard: bool = True
    wandb_project: str | None = None
    output_dir: str | None = None
    seed: int = 0

    @pydantic.model_validator(mode="after")
    def _check(self) -> TrainParameters:
        for name in self.model_fields_set:
            if self.algorithm not in READ_BY.get(name, (self.algorithm,)):
                raise ConfigError(
                    f"{name} is not read by algorithm {self.algorithm}, only by {' and '.join(READ_BY[name])}; "
                    "leave it out"
                )
        read = "sft" if self.algorithm == "sft" else "rl"
        if self.format not in (None, "raw", read):
            raise ConfigError(
                f"algorithm {self.algorithm} reads format {read} (or raw, which is brought into it), not {self.format}"
            )
        for name in ("lora_rank", "lora_alpha", "lora_target_modules"):
            if not self.use_lora and getattr(self, name) is not None:
                raise ConfigError(f"{name} is given and use_lora is false: set use_lora, or leave {name} out")
        if self.wandb_project is not None and not self.use_wandb:
            raise ConfigError("wandb_project is given and use_wandb is not: set use_wandb, or leave wandb_project out")
        _ = self.group
        return self

    @property
    def batch(self) -> int:
        """Rows per optimiser step."""
        if self.batch_size is not None:
            return self.batch_size
        return 4 if self.algorithm not in ("grpo", "ppo") else self.num_generations or GROUP

    @property
    def group(self) -> int:
        """Completions of each prompt: those that are asked for; left out, as many of the usual 8 as the batch holds
        (ppo, which compares nothing with its siblings, needs 1). Raises ConfigError when a batch is no whole groups.

        >>> TrainParameters(algorithm="grpo", batch_size=4).group
        4
        >>> read({"algorithm": "grpo", "batch_size": 6, "num_generations": 4}, TrainParameters)
        Traceback (most recent call last):
        palestra.errors.ConfigError: batch_size is 6 and num_generations 4, and a batch holds whole groups: …
        """
        divisors = [n for n in range(2, self.batch + 1) if self.batch % n == 0]
        if self.num_generations is None:
            fitting = [n for n in divisors if n <= GROUP]
            return 1 if self.algorithm == "ppo" else max(fitting, default=self.batch)
        size = self.num_generations
        if self.algorithm in ("grpo", "ppo") and self.batch % size:
            listed = " or ".join(map(str, divisors)) or "nothing but 1, so a larger batch_size"
            raise ConfigError(
                f"batch_size is {self.batch} and num_generations {size}, and a batch holds whole groups: set "
                f"num_generations to {listed}, or batch_size to {size}, {2 * size} or {3 * size}"
            )
        return size


class LoadParameters(Data):
    """``action: load_dataset``. format: raw, sft or rl. model_name: prompts go through this model's chat template."""

    action: Literal["load_dataset"] = "load_dataset"
    format: Literal["raw", "sft", "rl"] = "sft"
    model_name: str | None = None


class RewardParameters(Config):
    """``action: create_reward``. completions, ground_truth: replies to try it on, and their answers. name: registers
    the reward under it. target_length, penalty_weight, step_bonus: the same as in reward_config."""

    action: Literal["create_reward"] = "create_reward"
    reward_type: str = "accuracy"
    reward_config: dict[str, Any] | None = None
    target_length: int | None = Field(default=None, ge=0, validation_alias=AliasChoices("target_length", "max_length"))
    penalty_weight: float | None = None
    step_bonus: float | None = None
    custom_reward: Any = None
    name: str | None = None
    completions: tuple[str, ...] = ()
    ground_truth: tuple[str | int | float, ...] = ()

    @pydantic.model_validator(mode="after")
    def _check(self) -> RewardParameters:
        if len(self.completions) != len(self.ground_truth):
            raise ConfigError(
                f"{len(self.completions)} completions and {len(self.ground_truth)} ground_truth: give one for each"
            )
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The options of the reward, wherever they were given."""
        beside = {name: getattr(self, name) for name in ("target_length", "penalty_weight", "step_bonus")}
        return {**(self.reward_config or {}), **{name: v for name, v in beside.items() if v is not None}}


METRICS: dict[str, str] = {
    "accuracy": "accuracy",
    "average_reward": "average_reward",
    "avg_reward": "average_reward",
    "reward": "average_reward",
    "average_length": "average_length",
    "avg_length": "average_length",
    "length": "average_length",
    "format_correctness": "format_correctness",
    "format": "format_correctness",
    "accuracy_at_k": "accuracy_at_k",
    "pass_at_k": "accuracy_at_k",
    "numeric_error": "numeric_error",
    "error": "numeric_error",
    "average_steps": "average_steps",
    "avg_steps": "average_steps",
    "steps": "average_steps",
    "average_time": "average_time",
    "inference_time": "average_time",
    "error_analysis": "error_analysis",
    "difficulty": "difficulty",
}
"""Accepted name of a metric → the key of the result."""


class EvaluateParameters(Data):
    """``action: evaluate``. model_path: what ``train`` returned, or any model. use_lora: false leaves an adapter off.
    k: samples of each question, for ``accuracy_at_k``. temperature: none = greedy, 0.7 with several samples.
    return_details: every example with what was decided about it. output_dir: keep the run and its report there."""

    action: Literal["evaluate"] = "evaluate"
    model_path: str = Field(validation_alias=AliasChoices("model_path", "model_name"))
    split: str = "test"
    use_lora: bool | None = None
    metrics: tuple[str, ...] | None = None
    k: int = Field(default=1, ge=1)
    batch_size: int = Field(default=64, ge=1)
    max_new_tokens: int = Field(default=256, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    reward_type: str | None = None
    reward_config: dict[str, Any] | None = None
    custom_reward: Any = None
    return_details: bool = False
    output_dir: str | None = None
    seed: int = 0

    @pydantic.model_validator(mode="after")
    def _check(self) -> EvaluateParameters:
        if "accuracy_at_k" in self.wanted and self.metrics is not None and self.k < 2:
            raise ConfigError("accuracy_at_k needs k samples of each question: set k to 2 or more")
        if self.k > 1 and self.temperature == 0:
            raise ConfigError(f"k is {self.k} and temperature 0: greedy samples are all alike; use 0.7 to 1.0")
        return self

    @property
    def wanted(self) -> tuple[str, ...]:
        """Keys of the result, in the order asked for; all where nothing is asked."""
        if self.metrics is None:
            every = tuple(dict.fromkeys(METRICS.values()))
            return every if self.k > 1 else tuple(name for name in every if name != "accuracy_at_k")
        for name in self.metrics:
            if name not in METRICS:
                raise ConfigError(unknown("metric", name, METRICS))
        return tuple(dict.fromkeys(METRICS[name] for name in self.metrics))


P = TypeVar("P", bound=Config)


def read(given: Mapping[str, Any], cls: type[P]) -> P:
    """Parameters as a user gives them; None stands for "left out"."""
    objects = {k: v for k, v in given.items() if k in ("custom_dataset", "custom_reward") and k in cls.model_fields}
    plain = {k: v for k, v in given.items() if v is not None and k not in objects}
    try:
        found = configuration.load(plain, [], cls)
    except ConfigError as error:
        raise ConfigError(str(error).replace("(config)", "(parameters)").replace("key", "parameter", 1)) from error
    # Functions and data sets are no values of a config: they are set beside it, and checked like the rest.
    return cls.model_validate({name: getattr(found, name) for name in found.model_fields_set} | objects)
