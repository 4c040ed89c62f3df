# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what is written comes back, and no kill, full disk or overwrite costs the previous one."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from palestra.errors import RunError
from palestra.model.loading import load_model
from palestra.model.lora import LoraConfig, add_lora, trainable_parameters
from palestra.model.tiny import calculator_tokenizer, tiny_llama
from palestra.train import sealed
from palestra.train.checkpoint import (
    clean_leftovers,
    latest_checkpoint,
    load_checkpoint,
    restore_model,
    rng_state,
    save_checkpoint,
    set_rng_state,
)

IDS = torch.tensor([[13, 14, 15, 16]])
TOKENIZER = calculator_tokenizer()


def small(seed: int = 0) -> Any:
    return tiny_llama(TOKENIZER, hidden=32, layers=1, heads=2, intermediate=32, seed=seed)


def train(model: nn.Module, steps: int, lr: float = 1e-3) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(trainable_parameters(model), lr=lr)
    for _ in range(steps):
        loss = model(IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return optimizer


def save(directory: Path, step: int, model: Any = None, *, keep_last: int | None = 2, **state: object) -> Path:
    model = small() if model is None else model
    return save_checkpoint(directory, step, model=model, tokenizer=TOKENIZER, trainer_state=state, keep_last=keep_last)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_a_checkpoint_gives_back_weights_optimizer_and_counters(tmp_path: Path) -> None:
    model = small()
    optimizer = train(model, 2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    cursor = {"epoch": 1, "position": 48}
    path = save(
        tmp_path, 10, model, optimizer=optimizer.state_dict(), lr=scheduler.state_dict(), cursor=cursor, seen=96
    )
    state = load_checkpoint(path)
    assert (path.name, state.step, state.adapter) == ("step_000010", 10, False)
    assert state.trainer["cursor"] == cursor and state.trainer["seen"] == 96
    assert state.trainer["lr"] == scheduler.state_dict()
    readable = json.loads((path / "trainer" / "state.json").read_text())["state"]
    assert sorted(readable) == ["cursor", "lr", "seen"], "what is no tensor can be read by people"
    other = small(seed=5)
    parameters = [id(p) for p in other.parameters()]
    assert restore_model(path, other) is other
    assert [id(p) for p in other.parameters()] == parameters, "in place: an engine may share these parameters"
    assert torch.equal(logits(other), logits(model))
    # One more step from the restored state is the step that would have followed.
    resumed = torch.optim.AdamW(other.parameters(), lr=1e-3)
    resumed.load_state_dict(state.trainer["optimizer"])
    for net, opt in ((model, optimizer), (other, resumed)):
        opt.zero_grad()
        net(IDS, labels=IDS).loss.backward()
        opt.step()
    assert torch.equal(logits(other), logits(model))


def test_a_checkpoint_is_a_model_directory_with_tied_weights_still_tied(tmp_path: Path) -> None:
    model = small()
    train(model, 1)
    path = save(tmp_path, 3, model)
    loaded = load_model(str(path), device="cpu").model
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    restored = restore_model(path, small(seed=9))
    assert restored.lm_head.weight is restored.model.embed_tokens.weight


def test_cp_008_the_saved_adapter_is_the_trained_one(tmp_path: Path) -> None:
    model = add_lora(small(), LoraConfig(r=2))
    first = save(tmp_path, 0, model)
    train(model, 3, lr=1e-3)
    last = save(tmp_path, 3, model)
    sums = [json.loads((p / "COMPLETE").read_text())["files"]["adapter_model.safetensors"] for p in (first, last)]
    assert sums[0]["sha256"] != sums[1]["sha256"]
    assert not (last / "model.safetensors").exists(), "the base is not saved again with every adapter"


def test_an_adapter_comes_back_onto_a_bare_base_and_onto_a_wrapped_one(tmp_path: Path) -> None:
    model = add_lora(small(), LoraConfig(r=2))
    train(model, 3, lr=1e-2)
    path = save(tmp_path, 3, model)
    assert load_checkpoint(path).adapter
    bare = restore_model(path, small())
    wrapped = add_lora(small(), LoraConfig(r=2), seed=8)
    held = [id(p) for p in trainable_parameters(wrapped)]
    assert restore_model(path, wrapped) is wrapped
    assert [id(p) for p in trainable_parameters(wrapped)] == held
    for restored in (bare, wrapped):
        assert torch.equal(logits(restored), logits(model))
        assert len(trainable_parameters(restored)) == 4 * 2


def test_checkpoint_and_model_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    full = save(tmp_path / "full", 1)
    adapter = save(tmp_path / "adapter", 1, add_lora(small(), LoraConfig(r=2)))
    with pytest.raises(RunError, match="full weights but the model carries an adapter"):
        restore_model(full, add_lora(small(), LoraConfig(r=2)))
    with pytest.raises(RunError, match="does not fit"):
        restore_model(adapter, add_lora(small(), LoraConfig(r=4)))
    with pytest.raises(RunError, match="does not fit"):
        restore_model(full, tiny_llama(TOKENIZER, hidden=16, layers=1, heads=2, intermediate=16))


def test_random_generators_continue_where_they_stood(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.standard_normal()), float(torch.rand(()))]

    random.gauss(0, 1), np.random.standard_normal()  # leaves a second value waiting in each
    path = save(tmp_path, 1, rng=rng_state())
    expected = [draw(), draw()]
    set_rng_state(load_checkpoint(path).trainer["rng"])
    assert [draw(), draw()] == expected


@pytest.mark.parametrize(
    "value",
    [[1, None, "a", 0.5, True], (1, 2), {3: 4}, float("inf"), {"a": [torch.ones(2)]}, {"b": (0.9, 0.999)}, 10**30],
)
def test_trainer_state_comes_back_as_it_went(tmp_path: Path, value: object) -> None:
    again = load_checkpoint(save(tmp_path, 1, value=value)).trainer["value"]
    assert type(again) is type(value) and str(again) == str(value)


def test_trainer_state_that_could_not_be_loaded_safely_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"trainer_state a\.b\.0 is a float64"):
        save(tmp_path / "new", 1, a={"b": [np.float64(1)]})
    with pytest.raises(TypeError, match="trainer_state f is a function"):
        save(tmp_path / "new", 1, f=names)
    assert not (tmp_path / "new").exists()


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    model = small()
    for step in (5, 10, 15, 20):
        save(tmp_path, step, model, keep_last=2)
    assert names(tmp_path) == ["step_000015", "step_000020"]
    save(tmp_path, 25, model, keep_last=None)
    assert names(tmp_path) == ["step_000015", "step_000020", "step_000025"]
    save(tmp_path, 30, model, keep_last=1)
    assert names(tmp_path) == ["step_000030"]
    with pytest.raises(RunError, match="keep_last is 0"):
        save(tmp_path, 35, model, keep_last=0)


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        save(tmp_path, step)
    latest = latest_checkpoint(tmp_path)
    assert latest is not None and latest.name == "step_1000000"


def test_an_incomplete_checkpoint_is_neither_counted_nor_kept_instead_of_a_good_one(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / "step_000020").mkdir()
    save(tmp_path, 30, keep_last=2)
    assert names(tmp_path) == ["step_000010", "step_000020", "step_000030"]


def test_cp_002_only_a_finished_checkpoint_is_the_latest(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None and latest_checkpoint(tmp_path / "absent") is None
    good = save(tmp_path, 10)
    shutil.copytree(good, tmp_path / "step_000020")
    (tmp_path / "step_000020" / "COMPLETE").unlink()
    with pytest.warns(UserWarning, match="incomplete, not used: step_000020"):
        assert latest_checkpoint(tmp_path) == good
    with pytest.raises(RunError, match="step_000020 is no complete checkpoint"):
        load_checkpoint(tmp_path / "step_000020")


def test_a_checkpoint_with_a_shortened_file_is_not_the_latest(tmp_path: Path) -> None:
    good, bad = save(tmp_path, 10), save(tmp_path, 20)
    with (bad / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    with pytest.warns(UserWarning, match="step_000020"):
        assert latest_checkpoint(tmp_path) == good


def test_one_changed_byte_is_found_on_loading(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    weights = path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(RunError, match=r"model\.safetensors is missing or damaged"):
        load_checkpoint(path)
    assert load_checkpoint(path, verify=False).step == 10


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    mark = json.loads((path / "COMPLETE").read_text())
    (path / "COMPLETE").write_text(json.dumps({**mark, "format": 2}))
    with pytest.raises(RunError, match="checkpoint format 2; this version reads format 1"):
        load_checkpoint(path)


def killed_while_saving(directory: Path, step: int) -> None:
    """A process of its own saves, and meets SIGKILL when the weights are written and the mark is not."""
    ready, tell = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns that a fork of a process with threads may hang; this child starts no parallel work.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)
            sealed.seal = lambda *_: (os.write(tell, b"!"), time.sleep(60))
            save(directory, step)
        finally:
            os._exit(1)
    os.close(tell)
    assert os.read(ready, 1) == b"!"
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    os.close(ready)


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process in which torch is loaded")
def test_cp_003_a_kill_while_writing_leaves_the_previous_checkpoint_and_the_next_save_cleans_up(tmp_path: Path) -> None:
    good = save(tmp_path, 10)
    killed_while_saving(tmp_path, 20)
    assert names(tmp_path) == [".writing-step_000020", "step_000010"]
    assert (tmp_path / ".writing-step_000020" / "model.safetensors").is_file()
    with pytest.warns(UserWarning, match="not used: step_000020"):
        assert latest_checkpoint(tmp_path) == good
    assert torch.equal(logits(restore_model(good, small(seed=4))), logits(small()))
    save(tmp_path, 20)
    assert names(tmp_path) == ["step_000010", "step_000020"]


def test_cp_003_a_kill_between_the_renames_of_an_overwrite_loses_nothing(tmp_path: Path) -> None:
    good = save(tmp_path, 10, mine="first")
    # What the disk holds at that instant: the old one has stepped back, the new one has not stepped forward.
    shutil.copytree(good, tmp_path / ".writing-step_000010")
    good.rename(tmp_path / "step_000010.old")
    with pytest.warns(UserWarning, match="not used: step_000010"):
        latest = latest_checkpoint(tmp_path)
    assert latest is not None and load_checkpoint(latest).trainer == {"mine": "first"}
    clean_leftovers(tmp_path)
    assert names(tmp_path) == ["step_000010"]
    assert load_checkpoint(good).trainer == {"mine": "first"}


def test_cp_003_a_kill_after_the_renames_leaves_the_new_one_in_force(tmp_path: Path) -> None:
    good = save(tmp_path, 10, mine="first")
    shutil.copytree(good, tmp_path / "aside")
    save(tmp_path, 10, mine="second")
    (tmp_path / "aside").rename(tmp_path / "step_000010.old")
    latest = latest_checkpoint(tmp_path)
    assert latest == good and load_checkpoint(latest).trainer == {"mine": "second"}
    clean_leftovers(tmp_path)
    assert names(tmp_path) == ["step_000010"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 10, mine="first")
    path = save(tmp_path, 10, mine="second")
    assert names(tmp_path) == ["step_000010"] and load_checkpoint(path).trainer == {"mine": "second"}


def test_ctrl_c_while_writing_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = save(tmp_path, 10)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sealed, "seal", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 20)
    assert names(tmp_path) == ["step_000010"] and latest_checkpoint(tmp_path) == good


@pytest.mark.parametrize("culprit", ["weights", "optimizer"])
def test_a_file_that_cannot_be_written_to_its_end_is_one_line_and_no_directory(tmp_path: Path, culprit: str) -> None:
    good = save(tmp_path, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Every write past this size fails, as on a full disk, inside safetensors or inside torch.save.
    limit = {"weights": 8_000, "optimizer": 200_000}[culprit]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        with pytest.raises(RunError, match=r"cannot write checkpoint .*step_000020: .*earlier checkpoints") as caught:
            save(tmp_path, 20, moments=torch.zeros(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["step_000010"] and latest_checkpoint(tmp_path) == good


def test_a_full_disk_is_called_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sealed, "sync", full)
    with pytest.raises(RunError, match="the disk is full; free some space"):
        save(tmp_path, 20)
    assert names(tmp_path) == []


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match="cannot write checkpoint"):
        save(tmp_path / "file", 1)
