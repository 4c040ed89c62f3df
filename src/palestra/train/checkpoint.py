# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a Hugging Face (or peft adapter) directory plus ``trainer/``, written aside and swapped in.

    step_000010/
      config.json  model.safetensors  …     or adapter_config.json  adapter_model.safetensors
      trainer/state.json                    counters, cursors: whatever is plain JSON
      trainer/state.pt                      optimizer, scheduler, RNG: whatever holds tensors
      COMPLETE                              step, score, size and SHA-256 of every file; written last

A process may be killed at any instruction: what exists then is the previous checkpoint, whole, and at worst a
hidden directory without its mark, which is never loaded and is removed by the next save. How: ``sealed.py``.
"""

from __future__ import annotations

import errno
import json
import math
import random
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn

from palestra.config import FORMAT
from palestra.errors import RunError
from palestra.model.loading import one_line, quiet
from palestra.model.lora import is_adapter, quiet_peft
from palestra.train import sealed
from palestra.train.sealed import ASIDE, MARK, REMOVING, clean_leftovers


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointState:
    """What a checkpoint holds besides weights. adapter: the weights are an adapter's, the base is elsewhere. score: as
    it was saved."""

    path: Path
    step: int
    adapter: bool
    trainer: Mapping[str, Any]
    score: float | None = None


def save_checkpoint(
    directory: Path | str,
    step: int,
    *,
    model: nn.Module,
    tokenizer: Any,
    trainer_state: Mapping[str, object],
    keep_last: int | None = 2,
    keep_best: int = 0,
    score: float | None = None,
) -> Path:
    """Write ``directory/step_<step>`` and return it; afterwards only the ``keep_last`` newest (None = all) and the
    ``keep_best`` of highest ``score`` are kept. score: how good this one is, None where nobody measured.

    ``trainer_state`` may hold what JSON and tensors can say: None, bool, int, float, str, lists, tuples, dicts,
    tensors; anything else is a TypeError that names the key, for loading it would mean running code.
    Raises RunError when the directory cannot be written or the disk is full; earlier checkpoints stay as they were.
    """
    directory = Path(directory)
    if keep_last is not None and keep_last < 1:
        raise RunError(f"keep_last is {keep_last}; keep at least 1 checkpoint, or None for all")
    if score is not None and not math.isfinite(score):
        score = None
    plain, rich = _split(trainer_state)
    target = directory / f"step_{step:06d}"
    aside = directory / f"{ASIDE}{target.name}"
    with _told(target):
        directory.mkdir(parents=True, exist_ok=True)
        clean_leftovers(directory)
        try:
            (aside / "trainer").mkdir(parents=True)
            _save_weights(model, tokenizer, aside)
            text = json.dumps({"format": FORMAT, "step": step, "state": plain})
            sealed.write(aside / "trainer" / "state.json", text)
            with (aside / "trainer" / "state.pt").open("wb") as file:
                torch.save(rich, file)
            sealed.seal(aside, step, score)
            sealed.swap(aside, target)
        except BaseException:
            # Ctrl-C included: what is half-written must not stay.
            shutil.rmtree(aside, ignore_errors=True)
            raise
        sealed.prune(directory, target, keep_last, keep_best)
    return target


def latest_checkpoint(directory: Path | str) -> Path | None:
    """The newest checkpoint that is whole, checksums compared, or None where none was ever finished.

    Those passed over are named in a warning: unfinished ones, and damaged ones with the damaged file. Raises RunError
    when there are finished ones and all are damaged: to begin anew is for a person to decide. Reads only, so that
    looking at a run never disturbs one that is being written.
    """
    directory = Path(directory)
    if not directory.is_dir():
        return None
    every = sealed.in_order(directory)
    aside = (p.name.removeprefix(ASIDE) for p in directory.glob(f"{ASIDE}*"))
    unfinished = sorted(name for name in aside if not name.startswith(REMOVING))
    unfinished += [p.name for p in every if not (p / MARK).is_file()]
    damaged, found = [], None
    for path in (p for p in reversed(every) if (p / MARK).is_file()):
        file = sealed.damage(path)
        if file is None:
            found = path
            break
        damaged.append(f"{path.name} ({file} is missing or damaged)")
    if damaged and found is None:
        raise RunError(
            f"{directory}: no checkpoint is whole: {', '.join(damaged)}; "
            "put back a copy, or remove the directory to start again"
        )
    passed = [f"incomplete, not used: {', '.join(unfinished)}"] if unfinished else []
    if damaged:
        passed.append(f"damaged, not used: {', '.join(damaged)}; going back to {found.name if found else None}")
    if passed:
        warnings.warn(f"{directory}: {'; '.join(passed)}", stacklevel=2)
    return found


def best_checkpoint(directory: Path | str) -> Path | None:
    """The whole checkpoint of the highest score, checksums compared, or None where none has a score."""
    directory = Path(directory)
    scored = sealed.best(directory) if directory.is_dir() else []
    return next((path for path in scored if sealed.damage(path) is None), None)


def load_checkpoint(path: Path | str, *, verify: bool = True) -> CheckpointState:
    """Read a checkpoint's trainer state. ``verify`` compares every file with its checksum. Raises RunError."""
    path = Path(path)
    if not (path / MARK).is_file():
        raise RunError(f"{path} is no complete checkpoint: it has no {MARK} mark; resume from an earlier one")
    if (version := _format(path)) != FORMAT:
        raise RunError(f"{path} has checkpoint format {version}; this version reads format {FORMAT}")
    if (file := sealed.damage(path, deep=verify)) is not None:
        raise RunError(f"{path / file} is missing or damaged; resume from an earlier checkpoint")
    mark = sealed.read_mark(path)
    plain = json.loads((path / "trainer" / "state.json").read_text(encoding="utf-8"))["state"]
    # weights_only: tensors and plain containers, never code.
    rich = torch.load(path / "trainer" / "state.pt", map_location="cpu", weights_only=True)
    adapter = (path / "adapter_config.json").is_file()
    return CheckpointState(path, int(mark["step"]), adapter, {**plain, **rich}, mark.get("score"))


def restore_model(path: Path | str, model: nn.Module) -> nn.Module:
    """Put a checkpoint's weights into ``model``, in place, so that whoever shares its parameters sees them.

    For an adapter checkpoint ``model`` is either the base, which gets wrapped (trainable) and returned, or a model
    that already carries an adapter of the same shape. Raises RunError when checkpoint and model do not fit.
    """
    path = Path(path)
    saved_adapter = (path / "adapter_config.json").is_file()
    if not saved_adapter and is_adapter(model):
        raise RunError(f"{path} holds full weights but the model carries an adapter; choose another checkpoint")
    try:
        return _restore_adapter(path, model) if saved_adapter else _restore_full(path, model)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise RunError(f"{path} does not fit {type(model).__name__}: {one_line(error)}") from error


def seed_rng(seed: int) -> None:
    """Begin with Python's, NumPy's and torch's global generators: dropout draws from torch's, and what a user's reward
    or environment draws from one of them belongs to the run as well."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, object]:
    """The states of Python's, NumPy's and torch's global generators, in a form that ``trainer_state`` may hold.

    >>> before = rng_state()
    >>> first = random.random(), float(np.random.rand()), float(torch.rand(()))
    >>> set_rng_state(before)
    >>> (random.random(), float(np.random.rand()), float(torch.rand(()))) == first
    True
    """
    version, words, gauss = random.getstate()
    kind, key, position, has_gauss, cached = cast(tuple[Any, ...], np.random.get_state())
    state: dict[str, object] = {
        "python": [version, list(words), gauss],
        "numpy": [kind, key.tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Take up the global generators where :func:`rng_state` left them."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, key, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(key, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


def _save_weights(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    # Left to itself, peft asks the Hub whether the base's vocabulary has grown; ours never does under an adapter.
    options = {"save_embedding_layers": False} if is_adapter(model) else {}
    with quiet(), quiet_peft():
        cast(Any, model).save_pretrained(folder, **options)
    # peft adds a model card of placeholders.
    (folder / "README.md").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)


def _restore_adapter(path: Path, model: nn.Module) -> nn.Module:
    from peft import PeftModel, load_peft_weights, set_peft_model_state_dict

    if not isinstance(model, PeftModel):
        with quiet_peft():
            return PeftModel.from_pretrained(cast(Any, model), str(path), is_trainable=True)
    weights = load_peft_weights(str(path), device="cpu")
    result = cast(Any, set_peft_model_state_dict(model, weights))
    absent = [name for name in result.missing_keys if "lora_" in name]
    if absent or result.unexpected_keys:
        raise ValueError(f"the adapters differ, for example in {[*absent, *result.unexpected_keys][0]}")
    return model


def _restore_full(path: Path, model: nn.Module) -> nn.Module:
    # transformers may rename weights between file and module, so it reads the file, and we copy by module name.
    own = next(model.parameters()).dtype
    with quiet():
        fresh = cast(Any, type(model)).from_pretrained(path, dtype=own, local_files_only=True)
    model.load_state_dict(fresh.state_dict())
    return model


def _split(state: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """What goes to JSON and what to torch, by top-level key; anything that is neither is refused."""
    for key, value in state.items():
        _check(key, value)
    plain = {key: value for key, value in state.items() if _is_json(value)}
    return plain, {key: value for key, value in state.items() if key not in plain}


def _check(where: str, value: object) -> None:
    # Exact types: a subclass (a NumPy float, an IntEnum) is pickled by its class, which loading would refuse.
    if type(value) in (dict, OrderedDict):
        for key, item in cast(dict[Any, object], value).items():
            _check(f"{where}.{key}", item)
    elif type(value) in (list, tuple):
        for i, item in enumerate(cast(list[object], value)):
            _check(f"{where}.{i}", item)
    elif type(value) not in (type(None), bool, int, float, str) and not isinstance(value, torch.Tensor):
        raise TypeError(f"trainer_state {where} is a {type(value).__name__}; use plain values and tensors")


def _is_json(value: object) -> bool:
    """True when JSON gives back exactly this: no tuples, no number keys, no infinities."""
    if type(value) is dict:
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    if type(value) is list:
        return all(map(_is_json, value))
    return type(value) in (type(None), bool, int, str) or (type(value) is float and math.isfinite(value))


def _format(path: Path) -> Any:
    """The format a mark claims; ours where it cannot be read, which the seal will tell."""
    try:
        return json.loads((path / MARK).read_text(encoding="utf-8"))["format"]
    except (ValueError, KeyError, TypeError):
        return FORMAT


@contextmanager
def _told(target: Path) -> Iterator[None]:
    """Failures of the disk as one line; safetensors and torch wrap them in errors of their own."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        why = "the disk is full" if full else one_line(error)
        raise RunError(
            f"cannot write checkpoint {target}: {why}; free some space or choose another --out "
            "(earlier checkpoints are untouched)"
        ) from error


__all__ = [
    "CheckpointState",
    "best_checkpoint",
    "clean_leftovers",
    "latest_checkpoint",
    "load_checkpoint",
    "restore_model",
    "rng_state",
    "save_checkpoint",
    "seed_rng",
    "set_rng_state",
]
