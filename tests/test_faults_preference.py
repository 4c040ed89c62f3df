# SPDX-License-Identifier: Apache-2.0
"""Memory that runs out while preferences are only measured: KTO's baseline, and a reference that is computed once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from listening import Listening
from torch import nn

from palestra.learn.policy import Policy
from palestra.learn.preference_step import Comparisons, kto_baseline, token_logprobs
from palestra.learn.robust import Guard, TrainingError
from palestra.model.loading import LoadedModel
from palestra.model.tiny import calculator_tokenizer, tiny_llama
from palestra.run.progress import Progress
from palestra.train import setup
from palestra.train.checkpoint import latest_checkpoint, load_checkpoint
from palestra.train.prefer import prepare, train_prefer
from palestra.train.preference_config import PreferConfig

SCARCE = 100
"""Tokens that go through the model at once, where memory is scarce. The replies of a step have more."""


def narrow(*, scarce: int | None = None) -> nn.Module:
    """One narrow layer; more than ``scarce`` tokens at once do not fit into its memory."""
    model = tiny_llama(calculator_tokenizer(), hidden=16, layers=1, heads=2, intermediate=16)

    def refuse(_: Any, args: Any, given: dict[str, Any]) -> None:
        if scarce is not None and given["input_ids"].numel() > scarce:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    return model


def config(out: Path, **more: Any) -> PreferConfig:
    given = {"data": {"name": "arithmetic", "count": 12}, "batch_size": 8, "steps": 2, "learning_rate": 1e-2}
    root: dict[str, Any] = {"model": "builtin:calculator", "renderer": "plain", "out": str(out)}
    return PreferConfig.model_validate(root | {"prefer": given | {"loss": "kto"} | more})


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Sets how much memory the models have that are loaded from here on."""

    def load(scarce: int | None) -> None:
        made = lambda given: LoadedModel(narrow(scarce=scarce), calculator_tokenizer(), given.path, (2,))  # noqa: E731
        monkeypatch.setattr(setup, "load", made)

    load(None)
    return load


@pytest.fixture
def data(loaded: Any, tmp_path: Path) -> Comparisons:
    given = config(tmp_path / "run")
    return prepare(given, given.prefer, paired=False).data


def test_the_baseline_is_that_of_a_smaller_budget_to_the_bit(data: Comparisons) -> None:
    told: list[str] = []
    guard = Guard(8192, tell=told.append)

    def measured(scarce: int | None, tokens: int, guard: Guard | None) -> torch.Tensor:
        model, reference = narrow(scarce=scarce), narrow(scarce=scarce)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.25)  # nearer to what it says anyway, so that the distance is not 0
        both = [
            kto_baseline(Policy(a, reference=b), data, tokens, guard)
            for a, b in ((model, reference), (reference, model))
        ]
        return torch.stack(both)

    got = measured(SCARCE, 8192, guard)
    assert guard.tokens < 8192 and told[-1].startswith(f"out of memory: passes of {guard.tokens} tokens")
    assert got.max() > 1e-3 and torch.equal(got, measured(None, guard.tokens, None))


def test_reference_log_probs_are_those_of_a_smaller_budget_to_the_bit(data: Comparisons) -> None:
    guard = Guard(8192, tell=lambda text: None)
    got = token_logprobs(Policy(narrow(scarce=SCARCE)), data.rows, max_tokens=8192, guard=guard)
    assert guard.tokens < 8192
    want = token_logprobs(Policy(narrow()), data.rows, max_tokens=guard.tokens)
    assert all(map(np.array_equal, got, want)) and any(values.any() for values in got)


@pytest.mark.parametrize("precompute", [False, True])
def test_a_run_that_ran_out_of_memory_while_it_measured_goes_on(
    loaded: Callable[[int | None], None], tmp_path: Path, precompute: bool
) -> None:
    def numbers(out: Path, progress: Progress) -> list[float]:
        train_prefer(config(out, precompute_reference=precompute), progress=progress)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return [row[f"prefer/{name}"] for row in rows for name in ("loss", "baseline_kl", "log_ratio")]

    progress = Listening()
    loaded(SCARCE)
    got = numbers(tmp_path / "scarce", progress)
    assert any(text.startswith("out of memory") for text in progress.told)
    found = latest_checkpoint(tmp_path / "scarce" / "checkpoints")
    assert found is not None
    guard = load_checkpoint(found).trainer["guard"]
    assert guard["tokens"] < guard["configured"] == 8192, "it stays lowered"
    loaded(None)
    assert got == pytest.approx(numbers(tmp_path / "plenty", Listening()), rel=1e-3, abs=1e-6)


def test_a_reply_that_does_not_fit_alone_is_an_error_with_remedies(data: Comparisons) -> None:
    for measured in (
        lambda policy, guard: kto_baseline(policy, data, 8192, guard),
        lambda policy, guard: token_logprobs(policy, data.rows, max_tokens=8192, guard=guard),
    ):
        with pytest.raises(TrainingError, match="one sample alone does not fit"):
            measured(Policy(narrow(scarce=3), reference=narrow(scarce=3)), Guard(8192, tell=lambda text: None))
