# SPDX-License-Identifier: Apache-2.0
"""The root configs of the verbs ``prefer`` and ``reward-model``."""

from __future__ import annotations

from typing import Literal

import pydantic
from pydantic import Field

from palestra import config as configuration
from palestra.config import Config
from palestra.errors import ConfigError, unknown
from palestra.learn.preference import PREFERENCE_LOSSES, PreferenceLoss
from palestra.model.lora import LoraConfig
from palestra.train.config import Choice, MaybeSource, ModelConfig, OptimConfig, Source


class PairSettings(OptimConfig):
    """Training on preferences: either ``epochs`` over the data or a number of optimiser ``steps``.

    data: where they come from: `arithmetic`, or `table` (a file or the Hub). held_out: preferences that are only
    measured: before, after, and every ``eval_every`` steps (0 = not in between). batch_size: pairs (or labelled
    replies) per optimiser step. max_length: tokens of prompt and reply together, each side by itself; never more than
    the model's context. too_long: ``drop`` a pair with a longer side, or ``cut`` each reply that is over its own budget
    at its end; a pair that would lose a whole reply is dropped. What is dropped is counted.
    """

    data: Source
    held_out: MaybeSource = None
    eval_every: int = Field(default=0, ge=0)
    epochs: int = Field(default=1, ge=1)
    steps: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=16, ge=1)
    micro_batch_tokens: int = Field(default=8192, ge=1)
    max_length: int = Field(default=1024, ge=2)
    too_long: Literal["drop", "cut"] = "drop"
    max_grad_norm: float = Field(default=1.0, gt=0)

    @pydantic.model_validator(mode="after")
    def _check_eval(self) -> PairSettings:
        if self.eval_every and self.held_out is None:
            raise ConfigError("eval_every needs held_out: name the preferences that are to be measured")
        return self


class PreferenceSettings(PairSettings):
    """Direct learning from preferences.

    learning_rate: None takes that of RL (1e-6, with an adapter 1e-5), whose rails hold. loss: `dpo`, `ipo`,
    `kto`, `orpo` or `simpo`, with its own options beside it; see preferences.md. precompute_reference: one pass over
    the data before training instead of one beside every step, and no reference in memory then.
    """

    loss: Choice = Choice(name="dpo")
    precompute_reference: bool = False

    @pydantic.model_validator(mode="after")
    def _check_loss(self) -> PreferenceSettings:
        chosen = self.chosen_loss
        _ = self.loss_config
        if self.precompute_reference and not chosen.reference:
            raise ConfigError(f"precompute_reference: the loss {self.loss.name!r} has no reference; take it out")
        if not chosen.paired and self.batch_size < 2:
            raise ConfigError(
                f"batch_size is {self.batch_size}: {self.loss.name} compares a reply with the others of its batch; use "
                "at least 2, better 16"
            )
        return self

    @property
    def chosen_loss(self) -> PreferenceLoss:
        """The registered loss."""
        return PREFERENCE_LOSSES[self.loss.name]

    @property
    def loss_config(self) -> Config:
        """Its options, checked."""
        config, name = self.chosen_loss.config, self.loss.name
        for option in self.loss.options:
            if option not in config.model_fields:
                raise ConfigError(unknown(f"option of preference loss {name!r}:", option, config.model_fields))
        try:
            return configuration.load(self.loss.options, [], config)
        except ConfigError as error:
            raise ConfigError(f"loss {name}: {error}") from None


class RewardModelSettings(PairSettings):
    """Training a reward model on pairs.

    learning_rate: None takes that of SFT (5e-5, with an adapter 1e-4), whose rails hold. center_coefficient:
    weight of (r_c + r_r)², which keeps rewards around 0; 0 = off.
    """

    center_coefficient: float = Field(default=0.01, ge=0)


class PairConfig(Config):
    """What both verbs share."""

    seed: int = 0
    out: str = "runs/latest"
    model: ModelConfig
    lora: LoraConfig | None = None
    renderer: Choice = Choice(name="chat")
    save_every: int = Field(default=500, ge=0)
    keep_last: int = Field(default=2, ge=1)
    trackers: tuple[str, ...] = ()


class PreferConfig(PairConfig):
    """``palestra prefer``: learn from preferences directly (DPO and its family)."""

    prefer: PreferenceSettings


class RewardModelConfig(PairConfig):
    """``palestra reward-model``: train a model that scores replies."""

    reward_model: RewardModelSettings
