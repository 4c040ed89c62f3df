# SPDX-License-Identifier: Apache-2.0
"""The root config of ``palestra sample``."""

from __future__ import annotations

import pydantic
from pydantic import Field

from palestra.config import Config
from palestra.errors import ConfigError
from palestra.train.config import TaskConfig


class DialogueSettings(Config):
    """Episodes worth imitating. keep: so many of each task, the best. threshold: only with at least this reward."""

    keep: int = Field(default=1, ge=1)
    threshold: float | None = None


class PairSelection(Config):
    """Episodes to compare. per_task: so many pairs of each task: the best with the worst, the second best with the
    second worst. margin: the rewards of a pair differ by more than this.
    """

    per_task: int = Field(default=1, ge=1)
    margin: float = Field(default=0.0, ge=0)


class SampleSettings(Config):
    """``group_size`` (or ``n``) episodes of each of ``tasks`` tasks.

    dialogues: write the best episodes for ``palestra sft``. pairs: write better and worse ones for ``palestra prefer``
    and ``palestra reward-model``. save_every: tasks between rollout files, from which an interrupted run goes on.
    concurrency: episodes that run at once. retries: for episodes that fail.
    """

    tasks: int = Field(default=100, ge=1)
    group_size: int = Field(
        default=8, ge=1, validation_alias=pydantic.AliasChoices("group_size", "n", "num_generations")
    )
    dialogues: DialogueSettings | None = None
    pairs: PairSelection | None = None
    save_every: int = Field(default=64, ge=1)
    concurrency: int = Field(default=256, ge=1)
    retries: int = Field(default=1, ge=0)


class SampleConfig(TaskConfig):
    """``palestra sample``: play episodes of the training tasks and keep them, as they are and as data to train on."""

    sample: SampleSettings = SampleSettings()

    @pydantic.model_validator(mode="after")
    def _check(self) -> SampleConfig:
        if self.sampling.temperature == 0 and self.sample.group_size > 1:
            raise ConfigError(
                "sampling.temperature is 0: greedy sampling plays the same episode every time; use 0.7 to 1.0, or "
                "sample.group_size=1"
            )
        if self.sample.pairs is not None and self.sample.group_size < 2:
            raise ConfigError("sample.pairs compares episodes of a task; set sample.group_size to 2 or more")
        return self
