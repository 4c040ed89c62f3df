# SPDX-License-Identifier: Apache-2.0
"""Steps of supervised training and of DPO, optimiser included."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.peers.serve import Reply, peak_gib
from palestra.learn.batch import Rows, Sample
from palestra.learn.policy import Policy
from palestra.learn.update import make_optimizer
from palestra.model.loading import LoadedModel, load_model
from palestra.train import sft as supervised
from palestra.train.config import SFTSettings

RATE = 1e-6


def sft(model: str, batch: int, length: int) -> Callable[[dict[str, Any]], Reply]:
    """One optimiser step on ``batch`` sequences of ``length`` tokens, all of them trained on."""
    loaded = load_model(model, device="cpu")
    policy = Policy(loaded.model)
    rng = random.Random("sft")
    samples = [_sample(loaded, rng, 0, length, f"{i}") for i in range(batch)]
    options = SFTSettings.model_validate({"data": "jsonl", "batch_size": batch, "learning_rate": RATE})
    optimizer, scheduler = supervised.make_optimisers(policy, options, rate=RATE, steps=10**6)
    done = itertools.count()

    def measure(_: dict[str, Any]) -> Reply:
        step = next(done)
        seen: list[float] = []
        supervised.fit(
            policy,
            samples,
            options.model_copy(update={"steps": step + 1}),
            optimizer,
            scheduler,
            seed=0,
            start=step,
            on_step=lambda _step, metrics: seen.append(metrics["speed/trained_tokens_per_s"]),
        )
        return {"seconds": batch * length / seen[0], "tokens": batch * length, "peak_gib": peak_gib()}

    return measure


def dpo(model: str, batch: int, length: int) -> Callable[[dict[str, Any]], Reply]:
    """One optimiser step on ``batch`` pairs whose sides have ``length`` tokens each, half of them the prompt."""
    from palestra.learn.policy import frozen_copy
    from palestra.learn.preference import PREFERENCE_LOSSES, DPOConfig
    from palestra.learn.preference_step import Comparisons, PreferenceObjective, preference_step

    loaded = load_model(model, device="cpu")
    policy = Policy(loaded.model, reference=frozen_copy(loaded.model))
    rng = random.Random("dpo")
    rows = []
    for pair in range(batch):
        chosen = _sample(loaded, rng, length // 2, length, f"{pair}")
        tokens = chosen.tokens.copy()
        tokens[length // 2 :] = _sample(loaded, rng, 0, length - length // 2, "").tokens
        rows += [chosen, Sample(tokens, *_rest(length // 2, length), f"{pair}", f"{pair}/1", 0.0)]
    objective = PreferenceObjective(policy, PREFERENCE_LOSSES["dpo"], DPOConfig(), 8192)
    optimizer = make_optimizer(policy.parameters(), learning_rate=RATE, weight_decay=0.0, betas=(0.9, 0.999))
    data = Comparisons(Rows(tuple(rows)))

    def measure(_: dict[str, Any]) -> Reply:
        from bench.peers.serve import timed

        seconds, found = timed(lambda: preference_step(objective, data, optimizer, max_tokens=8192, max_grad_norm=1.0))
        return {"seconds": seconds, "tokens": found["tokens"], "peak_gib": peak_gib()}

    return measure


def _sample(loaded: LoadedModel, rng: random.Random, prompt: int, length: int, name: str) -> Sample:
    """Random tokens, all but the first ``prompt`` trained on."""
    vocabulary: Any = loaded.model.config
    tokens = np.asarray([rng.randrange(vocabulary.vocab_size) for _ in range(length)], np.int32)
    return Sample(tokens, *_rest(prompt, length), name, f"{name}/0", 0.0)


def _rest(prompt: int, length: int) -> tuple[Any, Any, Any]:
    """(loss mask, log-probs, versions)."""
    return np.arange(length) >= prompt, np.zeros(length, np.float32), np.zeros(length, np.int32)
