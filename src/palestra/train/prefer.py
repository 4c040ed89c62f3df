# SPDX-License-Identifier: Apache-2.0
"""Learning from preferences directly: ``palestra prefer``; and the loop that a reward model is trained in as well."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from palestra.data.dialogues import order
from palestra.data.preferences import Counts, Encoded, Labelled, encode, make_preferences, unpaired
from palestra.errors import DataError
from palestra.learn.batch import Rows, Sample
from palestra.learn.policy import frozen_copy
from palestra.learn.preference_step import (
    Comparisons,
    Objective,
    PreferenceObjective,
    measure,
    preference_step,
    token_logprobs,
)
from palestra.learn.robust import Guard
from palestra.model.loading import LoadedModel
from palestra.model.lora import add_lora, is_adapter
from palestra.run.directory import Run
from palestra.run.interrupt import deferred
from palestra.run.progress import Progress
from palestra.train import setup, sft
from palestra.train.checkpoint import latest_checkpoint, load_checkpoint, restore_model, save_checkpoint, seed_rng
from palestra.train.config import Choice, learning_rate
from palestra.train.faults import Faults, remedies
from palestra.train.preference_config import PairConfig, PairSettings, PreferConfig, PreferenceSettings

Results = dict[str, dict[str, float]]


# From preferences to rows ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What a config names, found and checked before anything is written. model: the loaded one, or a fresh adapter on
    it. left_out: what is told about rows that nothing can be learned from."""

    loaded: LoadedModel
    model: nn.Module
    data: Comparisons
    held_out: Comparisons | None
    left_out: tuple[str, ...]


def prepare(config: PairConfig, settings: PairSettings, *, paired: bool, spare_tokens: int = 0) -> Prepared:
    """Load the model and read the data; a mistake of the user raises its UserError here. spare_tokens: positions that
    the model must keep free behind a reply."""
    loaded = setup.load(config.model)
    renderer = setup.renderer_for(config.renderer, loaded)
    limit = min(settings.max_length, loaded.max_context - spare_tokens)

    def read(choice: Choice) -> tuple[Comparisons, str | None]:
        found = make_preferences(choice.name, seed=config.seed, **choice.options)
        single = [one for one in found if isinstance(one, Labelled)]
        if paired and single:
            raise DataError(
                f"{single[0].where} is a reply with a label, and this training compares pairs; give `chosen` and "
                "`rejected`, or choose the loss kto"
            )
        encoded, counts = encode(
            found if paired else unpaired(found), renderer, max_length=limit, too_long=settings.too_long
        )
        return comparisons(encoded), _told(counts, len(encoded), choice.name, limit)

    data, said = read(settings.data)
    held_out, also = read(settings.held_out) if settings.held_out is not None else (None, None)
    model = add_lora(loaded.model, config.lora, seed=config.seed) if config.lora is not None else loaded.model
    return Prepared(loaded, model, data, held_out, tuple(text for text in (said, also) if text))


def comparisons(encoded: Sequence[Encoded]) -> Comparisons:
    """Pairs, or labelled replies, as rows. Both replies of a pair are one group, whose prompt is stored once."""
    if encoded[0].label is None:
        replies = (
            (str(p), side, one.prompt, one.replies[side], one.trained[side])
            for p, one in enumerate(encoded)
            for side in (0, 1)
        )
        return Comparisons(Rows(tuple(_sample(*reply) for reply in replies)))
    rows = [_sample(str(i), 0, one.prompt, one.replies[0], one.trained[0]) for i, one in enumerate(encoded)]
    others = [encoded[_other(encoded, i)] for i in range(len(encoded))]
    mixed = [
        _sample(str(i), 1, a.prompt, b.replies[0], b.trained[0])
        for i, (a, b) in enumerate(zip(encoded, others, strict=True))
    ]
    labels = np.array([bool(one.label) for one in encoded])
    return Comparisons(Rows(tuple(rows)), labels, Rows(tuple(mixed)))


def _other(encoded: Sequence[Encoded], i: int) -> int:
    """The next reply that was written for another prompt; the next one at all where there is a single prompt."""
    count = len(encoded)
    nexts = ((i + step) % count for step in range(1, count))
    return next((j for j in nexts if not np.array_equal(encoded[j].prompt, encoded[i].prompt)), (i + 1) % count)


def _sample(group: str, side: int, prompt: Any, reply: Any, trained: Any) -> Sample:
    tokens = np.concatenate([prompt, reply])
    mask = np.concatenate([np.zeros(len(prompt), np.bool_), trained])
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(tokens, mask, zeros, np.zeros(len(tokens), np.int32), group, f"{group}/{side}", 0.0)


def _told(counts: Counts, kept: int, name: str, limit: int) -> str | None:
    reasons = {
        f"longer than {limit} tokens": ("too_long", counts.too_long),
        "with equal replies": ("equal", counts.equal),
        "with an empty reply": ("empty", counts.empty),
    }
    parts = [f"{n} {text} (first: {counts.examples[key]})" for text, (key, n) in reasons.items() if n]
    return f"{name}: {counts.dropped} of {kept + counts.dropped} left out, {', '.join(parts)}" if parts else None


# The loop --------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Session:
    """A run on comparisons in its run directory: ``area`` names its metrics, ``saved`` is what checkpoints hold. at:
    steps done; results: what was measured on held-out data, ``before`` and ``after``."""

    area: str
    config: PairConfig
    settings: PairSettings
    run: Run
    progress: Progress
    saved: nn.Module
    tokenizer: Any
    objective: Objective
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    at: int = 0
    results: Results | None = None
    last: dict[str, float] | None = None
    checkpoint: Path | None = None
    faults: Faults = field(init=False)

    def __post_init__(self) -> None:
        settings, tell = self.settings, partial(self.progress.note, warning=True)
        adapter, shorter = self.config.lora is not None, f"{self.area}.max_length"
        advice = remedies(self.area, settings, adapter=adapter, shorter=shorter)
        tokens, most = settings.micro_batch_tokens, settings.max_nonfinite
        self.faults = Faults(self.run.path, tokens, most, phase=self.area, remedies=advice, tell=tell)

    def resume(self, found: Path | None) -> None:
        """Go on where a checkpoint stands, or forget what a run logged that never came to one."""
        if found is not None:
            self.at = sft.restore_trainer(found, self.optimizer, self.scheduler, self.faults.guard)
            self.results = dict(load_checkpoint(found, verify=False).trainer["results"])
            self.checkpoint = found
        self.run.rewind(self.at if found is not None else -1)

    def train(self, data: Comparisons, held_out: Comparisons | None, *, phase: str) -> None:
        """The steps that are left; which pairs a step sees depends on (seed, step) alone. Ctrl-C strikes between two
        steps, never within one, and leaves a checkpoint of the last whole one."""
        steps = steps_of(self.settings, len(data))
        self.progress.phase(phase, total=steps, done=self.at)
        results = self.results = self.results or {}
        if held_out is not None and self.at == 0:
            results["before"] = self._measured(held_out)
            self.run.log(0, results["before"], phase=self.area)
        units = order(len(data), self.config.seed)
        if self.at == 0:
            seed_rng(self.config.seed)  # of dropout; later steps go on with what the checkpoint holds
        began_at, size = self.at, self.settings.batch_size
        for _ in range(self.at * size):
            next(units)
        try:
            with deferred() as safe_point:
                while self.at < steps:
                    metrics = self._step(data.take([next(units) for _ in range(size)]), len(data))
                    if held_out is not None and self._due(steps):
                        measured = self._measured(held_out)
                        results["after"] = measured
                        metrics |= measured
                    self._after_step(metrics, steps)
                    safe_point()
        finally:
            if self.at > began_at and self.faults.whole:
                self.save()

    def _due(self, steps: int) -> bool:
        every = self.settings.eval_every
        return self.at == steps or (every > 0 and self.at % every == 0)

    def _step(self, batch: Comparisons, size: int) -> dict[str, float]:
        began, rate = time.perf_counter(), float(self.optimizer.param_groups[0]["lr"])
        found = preference_step(
            self.objective,
            batch,
            self.optimizer,
            max_tokens=self.settings.micro_batch_tokens,
            max_grad_norm=self.settings.max_grad_norm,
            guard=self.faults.guard,
        )
        self.scheduler.step()
        self.at += 1
        metrics = {f"{self.area}/{name}": value for name, value in found.items()}
        metrics[f"{self.area}/learning_rate"] = rate
        metrics[f"{self.area}/epoch"] = self.at * self.settings.batch_size / size
        return metrics | {"speed/trained_tokens_per_s": found["tokens"] / (time.perf_counter() - began)}

    def _after_step(self, metrics: dict[str, float], steps: int) -> None:
        self.last = metrics
        self.run.log(self.at, metrics, phase=self.area)
        self.faults.settle(self.at)
        self.progress.update(self.at, metrics)
        if self.config.save_every and self.at % self.config.save_every == 0 and self.at < steps:
            self.save()

    def _measured(self, held_out: Comparisons) -> dict[str, float]:
        most, guard = self.settings.micro_batch_tokens, self.faults.guard
        found = measure(self.objective, held_out, max_tokens=most, guard=guard)
        return {f"eval/{name}": value for name, value in found.items()}

    def save(self) -> None:
        """A checkpoint of the last whole step."""
        more: Any = {"step": self.at, "results": self.results}
        state = sft.trainer_state(self.optimizer, self.scheduler, self.faults.guard, **more)
        self.checkpoint = save_checkpoint(
            self.run.path / "checkpoints",
            self.at,
            model=self.saved,
            tokenizer=self.tokenizer,
            trainer_state=state,
            keep_last=self.config.keep_last,
        )

    def summary(self, data: Comparisons, seconds: float) -> dict[str, Any]:
        """What is also written to ``summary.json``."""
        summary: dict[str, Any] = {"seed": self.config.seed, "steps": self.at}
        summary["pairs" if data.labels is None else "replies"] = len(data)
        summary["final_loss"] = (self.last or {}).get(f"{self.area}/loss")
        for when, found in (self.results or {}).items():
            summary |= {f"{name}_{when}": found[f"eval/{name}"] for name in ("accuracy", "margin", "loss")}
        summary |= {"seconds": seconds, "checkpoint": str(self.checkpoint)}
        self.run.write_summary(summary)
        return summary


def steps_of(settings: PairSettings, units: int) -> int:
    """Optimiser steps of a run on ``units`` pairs or labelled replies."""
    return settings.steps or settings.epochs * -(-units // settings.batch_size)


# The verb --------------------------------------------------------------------------------------------------


def train_prefer(config: PreferConfig, *, progress: Progress, resume: bool = False) -> dict[str, Any]:
    """``palestra prefer``: returns the summary that is also written to the run directory.

    The reference is what ``model:`` names, as it was loaded; so a policy that starts as an SFT adapter is compared with
    that adapter, and its distance at step 0 is 0.
    """
    began, settings = time.perf_counter(), config.prefer
    loss = settings.chosen_loss
    prepared = prepare(config, settings, paired=loss.paired)
    model, data, held_out = prepared.model, prepared.data, prepared.held_out
    rate, warning = learning_rate(settings, "rl", lora=is_adapter(model), from_scratch=config.model.from_scratch)
    with Run.open(config.out, config, resume=resume, trackers=config.trackers) as run:
        found = latest_checkpoint(run.path / "checkpoints") if resume else None
        reference: bool | nn.Module = False
        if settings.precompute_reference:
            progress.phase("reference log-probs", total=1)
            guard = Guard(settings.micro_batch_tokens, tell=partial(progress.note, warning=True))
            data = _with_reference(model, data, settings, guard)
            held_out = held_out and _with_reference(model, held_out, settings, guard)
        elif loss.reference:
            # A fresh adapter is switched off for the reference; weights that train themselves need a copy.
            reference = True if config.lora is not None else frozen_copy(model)
        if found:
            restore_model(found, model)
        policy = sft.make_policy(model, settings, reference=reference)
        optimizer, scheduler = sft.make_optimisers(policy, settings, rate=rate, steps=steps_of(settings, len(data)))
        objective = PreferenceObjective(policy, loss, settings.loss_config, settings.micro_batch_tokens)
        session = Session(
            "prefer", config, settings, run, progress, model, prepared.loaded.tokenizer, objective, optimizer, scheduler
        )
        if resume:
            session.resume(found)
        for text in (warning, *prepared.left_out, *_advice(config, data)):
            if text:
                progress.note(text, warning=True)
        session.train(data, held_out, phase=f"preferences ({settings.loss.name})")
        return session.summary(data, time.perf_counter() - began)


def _with_reference(model: nn.Module, data: Comparisons, settings: PreferenceSettings, guard: Guard) -> Comparisons:
    """The log-probs of the model as it was loaded, kept with the rows."""
    policy = sft.make_policy(model, settings, reference=False)

    def known(rows: Rows) -> Rows:
        return rows.with_(ref=token_logprobs(policy, rows, max_tokens=guard.tokens, guard=guard))

    mixed = data.mismatched
    return replace(data, rows=known(data.rows), mismatched=None if mixed is None else known(mixed))


def _advice(config: PreferConfig, data: Comparisons) -> list[str]:
    said = []
    if config.lora is not None and config.lora.dropout:
        said.append(
            "lora.dropout is held at 0 here: with dropout, policy and reference would differ before the first update"
        )
    if data.labels is not None:
        options: Any = config.prefer.loss_config
        desirable = int(data.labels.sum())
        weights = options.desirable_weight * desirable, options.undesirable_weight * (len(data) - desirable)
        if not min(weights) or not 1 <= weights[0] / weights[1] <= 4 / 3:
            said.append(
                f"{desirable} of {len(data)} replies are desirable: desirable_weight·{desirable} : undesirable_weight·"
                f"{len(data) - desirable} is best between 1:1 and 4:3 (arXiv:2402.01306)"
            )
    return said
