# SPDX-License-Identifier: Apache-2.0
"""What a reinforcement-learning run needs before it has a run directory: found, loaded, checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from palestra.data.dialogues import make_dialogues
from palestra.learn.batch import Sample
from palestra.model.loading import LoadedModel
from palestra.train import setup, sft
from palestra.train.config import RLConfig
from palestra.train.reference import load_teacher


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What a config names, found and checked before anything is written. began: when that started."""

    config: RLConfig
    loaded: LoadedModel
    world: setup.World
    demonstrations: Sequence[Sample]
    began: float
    teacher: LoadedModel | None = None


def prepare(config: RLConfig, tell: Callable[[str], None] | None = None) -> Prepared:
    """Load and check everything a run needs; a mistake of the user raises its UserError here. tell: hears which
    demonstrations are left out."""
    began = time.perf_counter()
    loaded = setup.load(config.model)
    teacher = load_teacher(config, loaded)
    world = setup.make_world(config, loaded)
    world.env_factory()
    samples: Sequence[Sample] = ()
    if (settings := config.warmup) is not None:
        dialogues = make_dialogues(settings.data.name, seed=config.seed, **settings.data.options)
        samples = sft.dialogue_samples(
            dialogues, world.renderer, max_length=settings.max_length, env_factory=world.env_factory, tell=tell
        )
    return Prepared(config, loaded, world, samples, began, teacher)


__all__ = ["Prepared", "prepare"]
