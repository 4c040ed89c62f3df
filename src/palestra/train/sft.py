# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning on the assistant's tokens of every turn: ``palestra sft``, and RL's warm-up."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from palestra.chat import Renderer
from palestra.data.dialogues import Dialogue, make_dialogues, order
from palestra.env import Env
from palestra.env.base import Observation
from palestra.errors import DataError
from palestra.learn.batch import Rows, Sample, micro_batches, pack, token_weights
from palestra.learn.loss import cross_entropy
from palestra.learn.optim import linear_schedule, make_optimizer, restore
from palestra.learn.policy import Policy
from palestra.learn.robust import Guard
from palestra.model.lora import add_lora, is_adapter
from palestra.run.directory import Run
from palestra.run.health import Watch
from palestra.run.interrupt import deferred
from palestra.run.progress import Progress
from palestra.train import setup
from palestra.train.checkpoint import latest_checkpoint, load_checkpoint, restore_model, save_checkpoint, seed_rng
from palestra.train.config import RAILS, SFTConfig, SFTSettings, learning_rate
from palestra.train.faults import Faults, remedies

OnStep = Callable[[int, dict[str, float]], None]
Observe = Callable[[int, Policy, Renderer], None]


def dialogue_samples(
    dialogues: Sequence[Dialogue],
    renderer: Renderer,
    *,
    max_length: int,
    env_factory: Callable[[], Env] | None = None,
    tell: Callable[[str], None] | None = None,
) -> list[Sample]:
    """Dialogues as training rows: the mask is what the model itself would have written, end-of-turn included.

    With an environment, a dialogue that plays a task begins with what the environment shows for it, so warm-up
    and rollouts meet the same prompt. A dialogue longer than ``max_length`` is cut, and dropped when nothing to
    learn is left, which ``tell`` hears of; DataError when that leaves none.
    """
    played = [d for d in dialogues if d.task is not None and env_factory is not None]
    shown: dict[int, Observation] = {}
    if env_factory is not None:
        tasks = [d.task for d in played if d.task is not None]
        observations = asyncio.run(setup.first_observations(env_factory, tasks))
        shown = {id(d): o for d, o in zip(played, observations, strict=True)}
    samples, cut = [], 0
    for i, dialogue in enumerate(dialogues):
        messages, tools = dialogue.messages, dialogue.tools
        if (start := shown.get(id(dialogue))) is not None and dialogue.task is not None:
            messages, tools = (*start.messages, *messages[len(dialogue.task.messages()) :]), start.tools
        rendered = renderer.render(messages, tools=tools or None)
        tokens = np.asarray(rendered.token_ids[:max_length], np.int32)
        mask = np.asarray(rendered.sampled_mask[:max_length], np.bool_)
        if mask[1:].any():
            zeros = np.zeros(len(tokens), np.float32)
            samples.append(Sample(tokens, mask, zeros, np.zeros(len(tokens), np.int32), f"{i}", f"{i}", 0.0))
            cut += len(rendered.token_ids) > max_length
    if not samples:
        raise DataError(
            f"none of the {len(dialogues)} dialogues has an assistant token within max_length={max_length}: "
            "nothing would be trained on"
        )
    if tell is not None and (cut or len(samples) < len(dialogues)):
        tell(_kept(len(samples), len(dialogues), cut, max_length))
    return samples


def _kept(kept: int, of: int, cut: int, max_length: int) -> str:
    """What became of dialogues that are too long.

    >>> print(_kept(7, 9, 1, 512))
    kept 7 of 9 dialogues, the others have no assistant token within max_length=512; 1 of those kept is cut there
    """
    said = f"kept {kept:,} of {of:,} dialogues"
    if kept < of:
        said += f", the others have no assistant token within max_length={max_length}"
    return said + (f"; {cut:,} of those kept {'is' if cut == 1 else 'are'} cut there" if cut else "")


def steps_of(settings: SFTSettings, dialogues: int) -> int:
    """Optimiser steps of a supervised run."""
    return settings.steps or settings.epochs * math.ceil(dialogues / settings.batch_size)


def fit(
    policy: Policy,
    samples: Sequence[Sample],
    settings: SFTSettings,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    *,
    seed: int,
    start: int = 0,
    guard: Guard | None = None,
    on_step: OnStep,
) -> None:
    """Steps ``start``… of supervised training; which dialogues a step sees depends on (seed, step) alone.

    Dropout draws from torch's generator; the global generators are seeded at step 0, and a resumed run brings their
    states. Ctrl-C strikes between two steps, never within one.
    """
    if start == 0:
        seed_rng(seed)
    guard = guard or Guard(settings.micro_batch_tokens)
    rows = Rows(tuple(samples))
    indices = order(len(samples), seed)
    for _ in range(start * settings.batch_size):
        next(indices)
    with deferred() as safe_point:
        for step in range(start, steps_of(settings, len(samples))):
            chosen = [next(indices) for _ in range(settings.batch_size)]
            began = time.perf_counter()
            metrics = _step(policy, rows, chosen, settings, optimizer, guard)
            metrics["sft/learning_rate"] = float(optimizer.param_groups[0]["lr"])
            metrics["sft/epoch"] = (step + 1) * settings.batch_size / len(samples)
            scheduler.step()
            metrics["speed/trained_tokens_per_s"] = metrics["sft/tokens"] / (time.perf_counter() - began)
            on_step(step + 1, metrics)
            safe_point()


def _step(
    policy: Policy,
    rows: Rows,
    chosen: Sequence[int],
    settings: SFTSettings,
    optimizer: torch.optim.Optimizer,
    guard: Guard,
) -> dict[str, float]:
    # A dialogue may be drawn twice within one step; its rows are then two, and both count.
    step_rows = Rows(tuple(rows.samples[i] for i in chosen))
    weights = token_weights(step_rows.samples, "token_mean")
    policy.train_mode(dropout=True)

    def backward(part: Sequence[int]) -> float:
        batch = pack(step_rows, weights, part, device=policy.device)
        logprobs, _ = policy.logprobs(batch, dropout=True)
        loss = cross_entropy(logprobs, batch.weights.to(logprobs.dtype))
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    result = guard.update(
        optimizer,
        policy.parameters(),
        lambda tokens: micro_batches(step_rows.samples, range(len(chosen)), tokens),
        backward,
        rows=step_rows,
        max_grad_norm=settings.max_grad_norm,
    )
    return {
        "sft/loss": result.loss,
        "sft/grad_norm": result.norm,
        "sft/tokens": float(sum(len(s.tokens) for s in step_rows.samples)),
        "sft/updates_skipped": float(not result.taken),
    }


def train_sft(
    config: SFTConfig, *, progress: Progress, resume: bool = False, observe: Observe | None = None
) -> dict[str, Any]:
    """``palestra sft``: returns the summary that is also written to the run directory. observe: called after each step.

    Ctrl-C ends with a checkpoint of the last complete step and KeyboardInterrupt. What strikes within an update (a
    second Ctrl-C) leaves the checkpoints as they were.
    """
    began = time.perf_counter()
    loaded = setup.load(config.model)
    renderer = setup.renderer_for(config.renderer, loaded)
    dialogues = make_dialogues(config.sft.data.name, seed=config.seed, **config.sft.data.options)
    tell = partial(progress.note, warning=True)
    samples = dialogue_samples(dialogues, renderer, max_length=config.sft.max_length, tell=tell)
    steps = steps_of(config.sft, len(samples))
    checkpoints = Path(config.out) / "checkpoints"
    found = latest_checkpoint(checkpoints) if resume else None
    model = _model(config, loaded.model, found)
    rate, warning = learning_rate(config.sft, "sft", lora=is_adapter(model), from_scratch=config.model.from_scratch)
    with Run.open(config.out, config, resume=resume, trackers=config.trackers) as run:
        policy = make_policy(model, config.sft, reference=False)
        optimizer, scheduler = make_optimisers(policy, config.sft, rate=rate, steps=steps)
        watch = Watch(run.path, config.model_dump(mode="json"), rails=RAILS, tell=tell)
        faults = make_faults(run.path, config.sft, section="sft", adapter=is_adapter(model), tell=tell)
        done = 0
        if found:
            done = restore_trainer(found, optimizer, scheduler, faults.guard)
        if resume:
            run.rewind(done if found else -1)
        progress.phase("SFT", total=steps, done=done)
        if warning:
            progress.note(warning, warning=True)
        at = done
        last: dict[str, float] = {}

        def save() -> Path:
            state = trainer_state(optimizer, scheduler, faults.guard, step=at)
            things: Any = {"model": model, "tokenizer": loaded.tokenizer, "trainer_state": state}
            return save_checkpoint(checkpoints, at, **things, keep_last=config.keep_last)

        def on_step(step: int, metrics: dict[str, float]) -> None:
            nonlocal at, last
            at, last = step, metrics
            watch.observe(step, metrics, phase="sft")
            run.log(step, metrics, phase="sft")
            faults.settle(step)
            progress.update(step, metrics)
            if observe is not None:
                observe(step, policy, renderer)
            if config.save_every and step % config.save_every == 0 and step < steps:
                save()

        try:
            optimisers = (optimizer, scheduler)
            how: Any = {"seed": config.seed, "start": done, "guard": faults.guard, "on_step": on_step}
            fit(policy, samples, config.sft, *optimisers, **how)
        finally:
            final = save() if at > done and faults.whole else None
        counts = {"seed": config.seed, "steps": at, "dialogues": len(samples)}
        seconds = time.perf_counter() - began
        told: dict[str, Any] = {"final_loss": last.get("sft/loss"), "alarms": len(watch.monitor.alarms)}
        summary = counts | told | {"seconds": seconds, "checkpoint": str(final or found)}
        run.write_summary(summary)
    return summary


def _model(config: SFTConfig, model: torch.nn.Module, found: Path | None) -> torch.nn.Module:
    """The model as the checkpoint has it, or at the beginning, with a fresh adapter where one is asked for."""
    if found is not None:
        return restore_model(found, model)
    return model if config.lora is None else add_lora(model, config.lora, seed=config.seed)


def make_faults(
    run: Path, settings: SFTSettings, *, section: str, adapter: bool, tell: Callable[[str], None]
) -> Faults:
    """What guards the steps of supervised training. section: of the config, with these settings."""
    advice = remedies(section, settings, adapter=adapter, shorter=f"{section}.max_length")
    tokens, most = settings.micro_batch_tokens, settings.max_nonfinite
    return Faults(run, tokens, most, phase="sft", remedies=advice, tell=tell)


def make_policy(model: torch.nn.Module, optim: Any, *, reference: bool | torch.nn.Module) -> Policy:
    """The policy as an optimiser config wants it."""
    return Policy(
        model,
        reference=reference,
        compute_dtype=setup.torch_dtype(optim.compute_dtype, model),
        gradient_checkpointing=optim.gradient_checkpointing,
    )


def make_optimisers(
    policy: Policy, optim: Any, *, rate: float, steps: int
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW and its linear schedule."""
    optimizer = make_optimizer(
        policy.parameters(), learning_rate=rate, weight_decay=optim.weight_decay, betas=optim.betas
    )
    return optimizer, linear_schedule(optimizer, steps=steps, warmup_ratio=optim.warmup_ratio)


def trainer_state(
    optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler, guard: Guard, **more: Any
) -> dict[str, Any]:
    """What a checkpoint keeps beside the weights."""
    from palestra.train.checkpoint import rng_state

    state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "guard": guard.state_dict()}
    return {**state, "rng": rng_state(), **more}


def restore_trainer(
    checkpoint: Path,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LambdaLR,
    guard: Guard,
) -> int:
    """Put optimiser, schedule, guard and RNG back as they were, under the config's rates; returns the step."""
    from palestra.train.checkpoint import set_rng_state

    state: Any = load_checkpoint(checkpoint)
    restore(optimizer, scheduler, state.trainer)
    set_rng_state(state.trainer["rng"])
    if "guard" in state.trainer:  # checkpoints of the first versions have none
        guard.load_state_dict(state.trainer["guard"])
    return int(state.trainer["step"])
