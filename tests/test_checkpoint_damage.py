# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on a disk that loses and changes things, and in processes that are killed at any moment."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_rl import config, logged, train, weights_in

from palestra.errors import RunError
from palestra.model.tiny import calculator_tokenizer, tiny_llama
from palestra.train import sealed
from palestra.train.checkpoint import (
    best_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    restore_model,
    save_checkpoint,
)

TOKENIZER = calculator_tokenizer()
MODEL = tiny_llama(TOKENIZER, hidden=16, layers=1, heads=2, intermediate=16)


def save(directory: Path, step: int, *, keep_last: int | None = 2, keep_best: int = 0, score: float | None = None,
         **state: object) -> Path:  # fmt: skip
    kept = {"keep_last": keep_last, "keep_best": keep_best, "score": score}
    return save_checkpoint(directory, step, model=MODEL, tokenizer=TOKENIZER, trainer_state=state, **kept)


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for step in (10, 20):
        save(folder, step, mine=step, moments=torch.arange(8.0))
    return folder


@pytest.fixture
def pair(saved: Path, tmp_path: Path) -> Path:
    """Two whole checkpoints, 10 and 20."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


FILES = ["COMPLETE", "config.json", "model.safetensors", "trainer/state.json", "trainer/state.pt", "tokenizer.json"]


def test_every_file_of_a_checkpoint_is_under_seal(saved: Path) -> None:
    folder = saved / "step_000020"
    written = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    mark = json.loads((folder / "COMPLETE").read_text())
    assert set(mark["files"]) | {"COMPLETE"} == written >= set(FILES)
    assert (mark["format"], mark["step"], mark["score"]) == (1, 20, None)


# Damage ----------------------------------------------------------------------------------------------------


def flip(file: Path, at: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def shorten(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def displaced(file: Path) -> None:
    """A directory of the same name stands in its place."""
    file.unlink()
    (file / "in").mkdir(parents=True)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("hurt", [flip, shorten, empty, displaced, Path.unlink], ids=lambda h: h.__name__)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(
    pair: Path, name: str, hurt: Callable[[Path], None]
) -> None:
    hurt(pair / "step_000020" / name)
    gone = name == "COMPLETE" and hurt in (displaced, Path.unlink)
    said = "incomplete, not used: step_000020" if gone else (
        rf"damaged, not used: step_000020 \({name} is missing or damaged\); going back to step_000010"
    )  # fmt: skip
    with pytest.warns(UserWarning, match=said):
        found = latest_checkpoint(pair)
    assert found == pair / "step_000010"
    assert load_checkpoint(found).trainer["mine"] == 10
    with pytest.raises(RunError, match="step_000020 is no complete" if gone else f"{name} is missing or damaged"):
        load_checkpoint(pair / "step_000020")


def test_a_file_that_the_disk_refuses_to_read_is_damaged(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(file: Path) -> str:
        if file.parts[-2:] == ("step_000020", "model.safetensors"):
            raise OSError(5, "Input/output error", str(file))
        return digest(file)

    digest = sealed.digest
    monkeypatch.setattr(sealed, "digest", failing)
    with pytest.warns(UserWarning, match=r"step_000020 \(model.safetensors is missing or damaged\); going back to"):
        assert latest_checkpoint(pair) == pair / "step_000010"


def test_a_folder_that_became_a_file_is_damaged_and_saved_over(pair: Path) -> None:
    shutil.rmtree(pair / "step_000020" / "trainer")
    (pair / "step_000020" / "trainer").write_text("")
    with pytest.warns(UserWarning, match=r"step_000020 \(trainer/state.json is missing or damaged\)"):
        assert latest_checkpoint(pair) == pair / "step_000010"
    save(pair, 20, mine="again")
    assert latest_checkpoint(pair) == pair / "step_000020"


def test_no_single_flipped_byte_of_the_mark_goes_unnoticed(pair: Path) -> None:
    mark = pair / "step_000020" / "COMPLETE"
    whole = mark.read_bytes()
    unnoticed = []
    for at in range(0, len(whole), 7):
        flip(mark, at)
        if sealed.damage(mark.parent, deep=False) is None:
            unnoticed.append((at, whole[at - 10 : at + 10]))
        mark.write_bytes(whole)
    assert unnoticed == []


def test_a_mark_of_another_checkpoint_does_not_fit(pair: Path) -> None:
    shutil.copy(pair / "step_000010" / "COMPLETE", pair / "step_000020" / "COMPLETE")
    with pytest.warns(UserWarning, match="damaged, not used: step_000020"):
        assert latest_checkpoint(pair) == pair / "step_000010"


def test_when_all_are_damaged_nothing_starts_anew_by_itself(pair: Path) -> None:
    flip(pair / "step_000010" / "trainer" / "state.pt")
    shorten(pair / "step_000020" / "model.safetensors")
    with pytest.raises(RunError) as refused:
        latest_checkpoint(pair)
    said = str(refused.value)
    assert "step_000020 (model.safetensors is missing or damaged), step_000010 (trainer/state.pt is" in said
    assert "\n" not in said and "remove the directory to start again" in said


def test_checkpoints_without_a_seal_in_their_mark_are_still_read(pair: Path) -> None:
    file = pair / "step_000020" / "COMPLETE"
    mark = json.loads(file.read_text())
    file.write_text(json.dumps({key: mark[key] for key in ("format", "step", "files")}))
    assert latest_checkpoint(pair) == pair / "step_000020"
    assert load_checkpoint(pair / "step_000020").step == 20


def test_training_goes_on_over_a_damaged_checkpoint(pair: Path) -> None:
    flip(pair / "step_000020" / "model.safetensors")
    with pytest.warns(UserWarning, match="going back to step_000010"):
        latest_checkpoint(pair)
    save(pair, 15, mine=15)
    assert names(pair) == ["step_000010", "step_000015", "step_000020"], "a later one takes no place of the newest"
    save(pair, 20, mine="again")
    found = latest_checkpoint(pair)
    assert found is not None and load_checkpoint(found).trainer["mine"] == "again"


# What is kept ----------------------------------------------------------------------------------------------


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    for step, score in ((1, 0.2), (2, 0.9), (3, 0.4), (4, None), (5, 0.9), (6, 0.1), (7, float("nan"))):
        save(tmp_path, step, keep_last=2, keep_best=1, score=score)
    assert names(tmp_path) == ["step_000005", "step_000006", "step_000007"], "of equals the later"
    assert best_checkpoint(tmp_path) == tmp_path / "step_000005"
    assert latest_checkpoint(tmp_path) == tmp_path / "step_000007"
    save(tmp_path, 8, keep_last=1, keep_best=2, score=0.95)
    assert names(tmp_path) == ["step_000005", "step_000008"]


def test_the_best_is_whole_and_there_is_none_without_a_score(tmp_path: Path) -> None:
    assert best_checkpoint(tmp_path / "absent") is None
    save(tmp_path, 1)
    assert best_checkpoint(tmp_path) is None
    save(tmp_path, 2, keep_last=None, score=0.5)
    save(tmp_path, 3, keep_last=None, score=0.7)
    flip(tmp_path / "step_000003" / "model.safetensors")
    assert best_checkpoint(tmp_path) == tmp_path / "step_000002"


def test_tied_weights_are_stored_once_and_stay_tied_through_training_after_a_resume(pair: Path) -> None:
    from safetensors import safe_open

    with safe_open(pair / "step_000020" / "model.safetensors", "pt") as file:
        stored = list(file.keys())
    assert [n for n in stored if "embed_tokens" in n or "lm_head" in n] == ["model.embed_tokens.weight"]
    model: Any = restore_model(
        pair / "step_000020", tiny_llama(TOKENIZER, hidden=16, layers=1, heads=2, intermediate=16)
    )
    before = model.lm_head.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids = torch.tensor([[13, 14, 15]])
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not torch.equal(model.lm_head.weight, before)


# Killed at any moment --------------------------------------------------------------------------------------


def killed_at(moment: int, work: Callable[[], object]) -> bool:
    """A process of its own does ``work`` and meets SIGKILL before its ``moment``-th change of the disk; False when
    it was done before."""
    with warnings.catch_warnings():
        # Python 3.12 warns that a fork of a process with threads may hang; this child starts no parallel work.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        changes = 0

        def counted(act: Callable[..., Any]) -> Callable[..., Any]:
            def change(*args: Any, **options: Any) -> Any:
                nonlocal changes
                changes += 1
                if changes == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                return act(*args, **options)

            return change

        with contextlib.suppress(BaseException):
            signal.alarm(60)
            sealed.sync, sealed.write = counted(sealed.sync), counted(sealed.write)
            torch.save, shutil.rmtree = counted(torch.save), counted(shutil.rmtree)
            for name in ("rename", "mkdir", "unlink"):
                setattr(Path, name, counted(getattr(Path, name)))
            work()
            os._exit(0)
        os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process in which torch is loaded")
@pytest.mark.parametrize("step", [20, 30], ids=["overwriting", "a new one"])
def test_cp_003_a_kill_between_any_two_changes_of_the_disk_costs_at_most_the_new_checkpoint(
    saved: Path, tmp_path: Path, step: int
) -> None:
    moment, seen = 0, set()
    while True:
        moment += 1
        folder = Path(shutil.copytree(saved, tmp_path / f"{moment}"))
        killed = killed_at(moment, lambda f=folder: save(f, step, keep_last=1, mine="new"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            found = latest_checkpoint(folder)
        assert found is not None, f"killed at change {moment}: {names(folder)}"
        mine = load_checkpoint(found).trainer["mine"]
        assert mine in (20, "new"), f"killed at change {moment}"
        seen.add(mine)
        save(folder, step, keep_last=1, mine="after")
        assert names(folder) == [f"step_{step:06d}"], f"killed at change {moment}: something was left behind"
        if not killed:
            break
    assert moment > 15 and seen == {20, "new"}


# A run -----------------------------------------------------------------------------------------------------


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one_and_ends_the_same(tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = config(out, "train.save_every=1", "eval.size=0")
    train(settings)
    weights = weights_in(out, 3)
    flip(out / "checkpoints" / "step_000003" / "model.safetensors")
    with pytest.warns(UserWarning, match=r"step_000003 \(model\.safetensors is missing or damaged\); going back to"):
        train(settings, resume=True)
    assert weights_in(out, 3) == weights
    assert [row["step"] for row in logged(out) if "train/loss" in row] == [1, 2, 3]


def test_a_damaged_reference_is_named_with_what_can_be_done(tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = config(out, "train.steps=1", "eval.size=0")
    train(settings)
    flip(out / "reference" / "step_000000" / "model.safetensors")
    said = (
        r"reference: no checkpoint is whole: .*model\.safetensors .*; so the KL term has no reference: put back a copy"
    )
    with pytest.raises(RunError, match=said) as caught:
        train(settings, resume=True)
    assert "remove the directory" not in str(caught.value)


def test_a_checkpoint_whose_removal_was_cut_short_is_nothing_to_warn_of(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / ".writing-removing-step_000005").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latest_checkpoint(tmp_path) == tmp_path / "step_000010"
