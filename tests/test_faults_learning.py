# SPDX-License-Identifier: Apache-2.0
"""Faults of learning as a run meets them: what it leaves for replay, when it ends, what it goes on with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from listening import Listening
from small_models import eight_samples

from palestra.errors import RunError
from palestra.learn.batch import Rows
from palestra.learn.robust import Fault, TrainingError
from palestra.model.loading import LoadedModel
from palestra.model.tiny import calculator_tokenizer, tiny_llama
from palestra.train import setup, sft
from palestra.train.checkpoint import latest_checkpoint, load_checkpoint
from palestra.train.config import ModelConfig, SFTConfig
from palestra.train.faults import Faults, read_fault, write_fault
from palestra.train.prefer import train_prefer
from palestra.train.preference_config import PreferConfig

Change = Callable[[torch.nn.Module], None]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Change]]:
    """One narrow layer in place of the built-in model; what the list holds is done to it."""
    changes: list[Change] = []

    def narrow(config: ModelConfig) -> LoadedModel:
        tokenizer = calculator_tokenizer()
        model = tiny_llama(tokenizer, hidden=16, layers=1, heads=2, intermediate=16)
        for change in changes:
            change(model)
        return LoadedModel(model, tokenizer, config.path, (2,))

    monkeypatch.setattr(setup, "load", narrow)
    yield changes


def supervised(out: Path, **more: Any) -> SFTConfig:
    given = {"data": {"name": "arithmetic", "count": 8}, "batch_size": 4, "steps": 5, "learning_rate": 1e-3}
    lora = {"r": 2, "dropout": 0.3}
    return SFTConfig.model_validate(
        {"model": "builtin:calculator", "renderer": "plain", "out": str(out), "lora": lora, "sft": given | more}
    )


def compared(out: Path, **more: Any) -> PreferConfig:
    given = {"data": {"name": "arithmetic", "count": 6}, "batch_size": 3, "steps": 2, "learning_rate": 1e-3}
    return PreferConfig.model_validate(
        {"model": "builtin:calculator", "renderer": "plain", "out": str(out), "prefer": given | more}
    )


def weights_in(run: Path) -> bytes:
    found = latest_checkpoint(run / "checkpoints")
    assert found is not None
    return next(found.glob("*.safetensors")).read_bytes()


def test_after_some_steps_in_a_row_a_run_ends_with_its_weights_and_the_batches(
    loads: list[Change], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, calls = sft.cross_entropy, 0

    def sick(logprobs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return loss(logprobs, weights) * (float("nan") if calls in (2, 4, 5) else 1.0)

    monkeypatch.setattr(sft, "cross_entropy", sick)
    out, progress = tmp_path / "run", Listening()
    with pytest.raises(TrainingError, match=r"2 optimiser steps in a row .*faults/sft_step_000005\.npz") as caught:
        sft.train_sft(supervised(out, max_nonfinite=2), progress=progress)
    assert "\n" not in str(caught.value)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["sft/updates_skipped"] for row in rows] == [0, 1, 0, 1, 1]
    assert sorted(p.name for p in (out / "faults").iterdir()) == [f"sft_step_00000{n}.npz" for n in (2, 4, 5)]
    assert [t for t in progress.told if "step 2 was skipped: the loss is nan" in t]
    about, batch = read_fault(out / "faults" / "sft_step_000004.npz")
    assert (about["step"], about["phase"]) == (4, "sft") and "loss is nan" in about["reason"] and len(batch) == 4
    found = latest_checkpoint(out / "checkpoints")
    assert found is not None and found.name == "step_000005", "the weights that the batches were met with"
    assert load_checkpoint(found).trainer["guard"]["in_a_row"] == 2


@pytest.mark.parametrize("kind", ["sft with dropout", "dpo"])
def test_a_run_that_ran_out_of_memory_ends_as_one_with_a_smaller_budget(
    loads: list[Change], tmp_path: Path, kind: str
) -> None:
    def train(out: Path, **more: Any) -> Listening:
        progress = Listening()
        if kind == "dpo":
            train_prefer(compared(out, **more), progress=progress)
        else:
            sft.train_sft(supervised(out, steps=2, **more), progress=progress)
        return progress

    def scarce(model: torch.nn.Module) -> None:
        def refuse(_: Any, args: Any, given: dict[str, Any]) -> None:
            if given["input_ids"].numel() > 100:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

        model.register_forward_pre_hook(refuse, with_kwargs=True)

    loads.append(scarce)
    progress = train(tmp_path / "a")
    said = [text for text in progress.told if text.startswith("out of memory")]
    found = latest_checkpoint(tmp_path / "a" / "checkpoints")
    assert found is not None
    guard = load_checkpoint(found).trainer["guard"]
    assert len(said) == 2 and guard["tokens"] < guard["configured"] == 8192, "lowered in the first step, and it stays"
    loads.clear()
    train(tmp_path / "b", micro_batch_tokens=guard["tokens"])
    assert weights_in(tmp_path / "a") == weights_in(tmp_path / "b")


def test_a_batch_is_kept_before_an_evaluation_may_fail_and_named_when_the_run_ends_behind_it(tmp_path: Path) -> None:
    faults = Faults(tmp_path, 100, 1, phase="rl", remedies="")
    faults.guard.faults.append(Fault("the loss is inf", Rows(tuple(eight_samples()))))
    faults.guard.in_a_row, faults.guard.whole = 1, False
    faults.keep(4)
    assert (tmp_path / "faults" / "rl_step_000004.npz").is_file() and not faults.whole
    with pytest.raises(TrainingError, match=r"faults/rl_step_000004\.npz"):
        faults.settle(4)
    assert faults.whole


def test_a_batch_comes_back_to_the_bit(tmp_path: Path) -> None:
    samples = tuple(eight_samples())
    rng = np.random.default_rng(0)
    tokens = [rng.normal(size=len(s.tokens)) for s in samples]
    tokens[2][:] = np.nan
    rows = Rows(samples, advantages=tuple(tokens), old=tuple(s.logprobs for s in samples), after=tuple(range(8)))
    write_fault(tmp_path / "faults" / "rl_step_000003.npz", Fault("the loss is inf", rows), step=3, phase="rl")
    about, back = read_fault(tmp_path / "faults" / "rl_step_000003.npz")
    assert dict(about) == {"format": 1, "step": 3, "phase": "rl", "reason": "the loss is inf"}
    assert back.after == rows.after and back.ref is None and back.advantages is not None and back.old is not None
    for got, want in zip(back.samples, samples, strict=True):
        assert (got.group, got.episode, got.reward, got.turn_ends) == (want.group, want.episode, want.reward, ())
        assert np.array_equal(got.tokens, want.tokens) and got.tokens.dtype == np.int32
        assert np.array_equal(got.loss_mask, want.loss_mask) and got.loss_mask.dtype == np.bool_
    for one, two in zip(back.advantages, tokens, strict=True):
        assert one.tobytes() == two.tobytes()


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 torn"])
def test_a_file_that_is_no_batch_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(RunError, match=r"x\.npz is no batch of a skipped step"):
        read_fault(tmp_path / "x.npz")
