# SPDX-License-Identifier: Apache-2.0
"""A model that scores replies, trained on pairs: ``palestra reward-model``."""

from __future__ import annotations

import time
from typing import Any

from palestra.learn.preference_step import RewardObjective
from palestra.learn.update import linear_schedule, make_optimizer
from palestra.model.lora import is_adapter, trainable_parameters
from palestra.model.reward_head import RewardModel
from palestra.run.directory import Run
from palestra.run.progress import Progress
from palestra.train import setup
from palestra.train.checkpoint import latest_checkpoint, restore_model
from palestra.train.config import learning_rate
from palestra.train.prefer import Session, prepare, steps_of
from palestra.train.preference_config import RewardModelConfig


def train_reward_model(config: RewardModelConfig, *, progress: Progress, resume: bool = False) -> dict[str, Any]:
    """``palestra reward-model``: returns the summary that is also written to the run directory. A checkpoint of it is a
    reward by name: ``rewards: {reward_model: {path: RUN/checkpoints/step_…}}``."""
    began, settings = time.perf_counter(), config.reward_model
    # The reward is read at a row behind the reply's last token, which needs a position of its own.
    prepared = prepare(config, settings, paired=True, spare_tokens=1)
    data = prepared.data
    steps = steps_of(settings, len(data))
    adapter = is_adapter(prepared.model)
    rate, warning = learning_rate(settings, "sft", lora=adapter, from_scratch=config.model.from_scratch)
    with Run.open(config.out, config, resume=resume, trackers=config.trackers) as run:
        found = latest_checkpoint(run.path / "checkpoints") if resume else None
        if found:
            restore_model(found, prepared.model)
        model = RewardModel(
            prepared.model,
            renderer=config.renderer.model_dump(mode="json"),
            seed=config.seed,
            compute_dtype=setup.torch_dtype(settings.compute_dtype, prepared.model),
            gradient_checkpointing=settings.gradient_checkpointing,
        )
        if found:
            model.load_head(found)
        optimizer = make_optimizer(
            trainable_parameters(model), learning_rate=rate, weight_decay=settings.weight_decay, betas=settings.betas
        )
        scheduler = linear_schedule(optimizer, steps=steps, warmup_ratio=settings.warmup_ratio)
        objective = RewardObjective(model, settings.center_coefficient)
        session = Session(
            "reward_model",
            config,
            settings,
            run,
            progress,
            model,
            prepared.loaded.tokenizer,
            objective,
            optimizer,
            scheduler,
        )
        if resume:
            session.resume(found)
        for text in (warning, *prepared.left_out):
            if text:
                progress.note(text, warning=True)
        session.train(data, prepared.held_out, phase="reward model")
        return session.summary(data, time.perf_counter() - began)
