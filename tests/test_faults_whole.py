# SPDX-License-Identifier: Apache-2.0
"""Only whole states become checkpoints: what strikes within an update leaves those that are there as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume_matrix import KINDS, PAIRS, PLAYED, end_of, one_thread, run, small  # noqa: F401

from palestra.learn.robust import Guard, TrainingError
from palestra.run.directory import Run
from palestra.train import sft
from palestra.train.checkpoint import latest_checkpoint
from palestra.train.config import RLConfig
from palestra.train.rl import train_rl

WARMED: dict[str, Any] = {"algorithm": {"group_size": 2}, "eval": {"size": 1, "warmup_every": 2}}


@pytest.fixture(autouse=True)
def warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    warmup = PAIRS | {"learning_rate": 1e-3, "save_every": 2}
    monkeypatch.setitem(KINDS, "warm-up", (RLConfig, train_rl, PLAYED | WARMED | {"warmup": warmup}))


def within_the_third_step(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    """The optimiser has written some weights and not the others, then something strikes."""
    apply, calls = Guard._apply, 0

    def half(self: Guard, optimizer: torch.optim.Optimizer) -> None:
        nonlocal calls
        calls += 1
        if calls != 3:
            return apply(self, optimizer)
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].add_(1.0)
        raise error

    patch.setattr(Guard, "_apply", half)


def while_the_third_step_is_logged(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    log = Run.log

    def fails(self: Run, step: int, metrics: Any, *, phase: str) -> None:
        if step == 3:
            raise error
        log(self, step, metrics, phase=phase)

    patch.setattr(Run, "log", fails)


@pytest.mark.parametrize("strike", [within_the_third_step, while_the_third_step_is_logged])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), TrainingError("enough")], ids=["second Ctrl-C", "error"])
@pytest.mark.parametrize("kind", ["sft", "dpo", "reward model", "warm-up"])
def test_half_an_update_is_never_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, error: BaseException, strike: Any
) -> None:
    run(kind, tmp_path / "whole", adapter=False)
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        strike(patch, error)
        run(kind, tmp_path / "cut", adapter=False)
    found = latest_checkpoint(tmp_path / "cut" / ("warmup" if kind == "warm-up" else "checkpoints"))
    assert found is not None and found.name == "step_000002", "the one of save_every"
    run(kind, tmp_path / "cut", adapter=False, resume=True)
    want, got = end_of(tmp_path / "whole"), end_of(tmp_path / "cut")
    for part in ("rows", "state", "weights"):
        assert got[part] == want[part], part


def test_what_ends_a_forward_pass_leaves_the_last_step_to_be_saved_random_state_included(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run("sft", tmp_path / "whole", adapter=True)
    loss, calls = sft.cross_entropy, 0

    def fails(logprobs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:  # dropout has drawn by then
            raise ValueError("an illness of the fourth batch")
        return loss(logprobs, weights)

    with monkeypatch.context() as patch, pytest.raises(ValueError, match="fourth batch"):
        patch.setattr(sft, "cross_entropy", fails)
        run("sft", tmp_path / "cut", adapter=True)
    found = latest_checkpoint(tmp_path / "cut" / "checkpoints")
    assert found is not None and found.name == "step_000003", "the last whole step"
    run("sft", tmp_path / "cut", adapter=True, resume=True)
    assert end_of(tmp_path / "cut") == end_of(tmp_path / "whole")
