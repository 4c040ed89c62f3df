# SPDX-License-Identifier: Apache-2.0
"""RL's warm-up: supervised training on demonstrations, with checkpoints of its own until RL has its first."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from palestra.learn.batch import Sample
from palestra.learn.robust import TrainingError
from palestra.model.lora import is_adapter
from palestra.rollout.journal import Journal
from palestra.run.directory import Run
from palestra.run.progress import Progress
from palestra.train import sft
from palestra.train.checkpoint import latest_checkpoint, restore_model, save_checkpoint
from palestra.train.config import WarmupSettings

_FOLDER = "warmup"


def warm_up(
    model: nn.Module,
    tokenizer: Any,
    samples: Sequence[Sample],
    settings: WarmupSettings,
    run: Run,
    *,
    seed: int,
    rate: float,
    resume: bool,
    progress: Progress,
    journal: Journal,
    on_step: sft.OnStep,
) -> None:
    """Train ``model`` in place, with an optimiser of the warm-up's own. on_step: evaluates and logs each step.

    A checkpoint lies in ``RUN/warmup`` every ``save_every`` steps, and of the last whole step after Ctrl-C or a
    TrainingError; ``resume`` goes on from the newest, to the same weights as without a stop.
    """
    kept = run.path / _FOLDER
    found = latest_checkpoint(kept) if resume else None
    if found is not None:
        restore_model(found, model)
    policy = sft.make_policy(model, settings, reference=False)
    steps = sft.steps_of(settings, len(samples))
    optimizer, scheduler = sft.make_optimisers(policy, settings, rate=rate, steps=steps)
    tell = partial(progress.note, warning=True)
    faults = sft.make_faults(run.path, settings, section="warmup", adapter=is_adapter(model), tell=tell)
    at = sft.restore_trainer(found, optimizer, scheduler, faults.guard) if found is not None else 0
    run.rewind(at if at else -1)
    progress.phase("warm-up (SFT)", total=steps, done=at)

    def save() -> None:
        state = sft.trainer_state(optimizer, scheduler, faults.guard, step=at)
        save_checkpoint(kept, at, model=model, tokenizer=tokenizer, trainer_state=state)
        journal.settle("sft", at)

    def after_step(step: int, metrics: dict[str, float]) -> None:
        nonlocal at
        journal.at("sft", step)
        on_step(step, metrics)
        at = step
        faults.settle(step)
        progress.update(step, metrics)
        if settings.save_every and step % settings.save_every == 0 and step < steps:
            save()

    try:
        how: Any = {"seed": seed, "start": at, "guard": faults.guard, "on_step": after_step}
        sft.fit(policy, samples, settings, optimizer, scheduler, **how)
    except (KeyboardInterrupt, TrainingError):
        if faults.whole:
            save()
        raise


def clear(run: Run) -> None:
    """Remove the warm-up's checkpoints: those of what comes after it hold all that they held."""
    shutil.rmtree(run.path / _FOLDER, ignore_errors=True)


__all__ = ["clear", "warm_up"]
