# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a Hugging Face (or peft adapter) directory plus ``trainer/``, written aside and swapped in.

    step_000010/
      config.json  model.safetensors  …     or adapter_config.json  adapter_model.safetensors
      trainer/state.json                    counters, cursors: whatever is plain JSON
      trainer/state.pt                      optimizer, scheduler, RNG: whatever holds tensors
      COMPLETE                              step, and size and SHA-256 of every file; written last

A process may be killed at any instruction: what exists then is the previous checkpoint, whole, and at worst a
hidden directory without its mark, which is never loaded and is removed by the next save.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import random
import re
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

MARK = "COMPLETE"
_NAME = re.compile(r"step_(\d{6,})(\.old)?")
_ASIDE = ".writing-"


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointState:
    """What a checkpoint holds besides weights. adapter: the weights are an adapter's, the base is elsewhere."""

    path: Path
    step: int
    adapter: bool
    trainer: Mapping[str, Any]


def save_checkpoint(
    directory: Path | str,
    step: int,
    *,
    model: nn.Module,
    tokenizer: Any,
    trainer_state: Mapping[str, object],
    keep_last: int | None = 2,
) -> Path:
    """Write ``directory/step_<step>`` and return it; afterwards only the ``keep_last`` newest are kept (None = all).

    ``trainer_state`` may hold what JSON and tensors can say: None, bool, int, float, str, lists, tuples, dicts,
    tensors; anything else is a TypeError that names the key, for loading it would mean running code.
    Raises RunError when the directory cannot be written or the disk is full; earlier checkpoints stay as they were.
    """
    directory = Path(directory)
    if keep_last is not None and keep_last < 1:
        raise RunError(f"keep_last is {keep_last}; keep at least 1 checkpoint, or None for all")
    plain, rich = _split(trainer_state)
    target = directory / f"step_{step:06d}"
    aside = directory / f"{_ASIDE}{target.name}"
    with _told(target):
        directory.mkdir(parents=True, exist_ok=True)
        clean_leftovers(directory)
        try:
            (aside / "trainer").mkdir(parents=True)
            _save_weights(model, tokenizer, aside)
            _write(aside / "trainer" / "state.json", json.dumps({"format": FORMAT, "step": step, "state": plain}))
            with (aside / "trainer" / "state.pt").open("wb") as file:
                torch.save(rich, file)
            _seal(aside, step)
            _swap(aside, target)
        except BaseException:
            # Ctrl-C included: what is half-written must not stay.
            shutil.rmtree(aside, ignore_errors=True)
            raise
        _prune(directory, target, keep_last)
    return target


def latest_checkpoint(directory: Path | str) -> Path | None:
    """The complete checkpoint with the highest step, or None. Incomplete ones are named in a warning and passed over.

    Reads only, so that looking at a run never disturbs one that is being written.
    """
    directory = Path(directory)
    if not directory.is_dir():
        return None
    found = _checkpoints(directory)
    broken = sorted(p.name.removeprefix(_ASIDE) for p in directory.glob(f"{_ASIDE}*"))
    broken += sorted(p.name for p in found if not _complete(p))
    if broken:
        warnings.warn(f"{directory}: incomplete, not used: {', '.join(broken)}", stacklevel=2)
    whole = [p for p in found if _complete(p)]
    return whole[-1] if whole else None


def clean_leftovers(directory: Path | str) -> None:
    """Remove what a killed save left behind. Only for the process that owns the run."""
    directory = Path(directory)
    for path in directory.glob(f"{_ASIDE}*"):
        shutil.rmtree(path)
    for path in directory.glob("step_*.old"):
        current = path.with_suffix("")
        if _complete(current):
            shutil.rmtree(path)
        elif not current.exists():
            # Killed between the two renames of a swap: the old one is the only one, and gets its name back.
            path.rename(current)


def load_checkpoint(path: Path | str, *, verify: bool = True) -> CheckpointState:
    """Read a checkpoint's trainer state. ``verify`` compares every file with its checksum. Raises RunError."""
    path = Path(path)
    if not (path / MARK).is_file():
        raise RunError(f"{path} is no complete checkpoint: it has no {MARK} mark; resume from an earlier one")
    mark = json.loads((path / MARK).read_text(encoding="utf-8"))
    if mark.get("format") != FORMAT:
        raise RunError(f"{path} has checkpoint format {mark.get('format')}; this version reads format {FORMAT}")
    if verify:
        for name, seal in mark["files"].items():
            file = path / name
            if not file.is_file() or _digest(file) != seal["sha256"]:
                raise RunError(f"{file} is missing or damaged; resume from an earlier checkpoint")
    plain = json.loads((path / "trainer" / "state.json").read_text(encoding="utf-8"))["state"]
    # weights_only: tensors and plain containers, never code.
    rich = torch.load(path / "trainer" / "state.pt", map_location="cpu", weights_only=True)
    return CheckpointState(path, int(mark["step"]), (path / "adapter_config.json").is_file(), {**plain, **rich})


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


def _seal(folder: Path, step: int) -> None:
    """Force every file to disk, then write the mark: if the mark is there, so is everything it lists."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    seals = {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": _digest(p)} for p in files}
    for path in files:
        _sync(path)
    _write(folder / MARK, json.dumps({"format": FORMAT, "step": step, "files": seals}, indent=1))
    _sync(folder / MARK)
    for path in {folder, *(p.parent for p in files)}:
        _sync(path)


def _swap(aside: Path, target: Path) -> None:
    """Give the finished directory its name. An existing one steps back first, and keeps its mark until then."""
    old = target.with_name(target.name + ".old")
    if target.exists() and _complete(target):
        target.rename(old)
    elif target.exists():
        shutil.rmtree(target)
    aside.rename(target)
    _sync(target.parent)
    if old.exists():
        shutil.rmtree(old)


def _prune(directory: Path, newest: Path, keep_last: int | None) -> None:
    if keep_last is None:
        return
    others = [p for p in _checkpoints(directory) if p != newest and _complete(p)]
    for path in others[: max(0, len(others) - (keep_last - 1))]:
        # The name goes first: a deletion that is cut short must not look like a checkpoint.
        doomed = path.rename(directory / f"{_ASIDE}removing-{path.name}")
        shutil.rmtree(doomed)


def _checkpoints(directory: Path) -> list[Path]:
    """Every directory with a checkpoint's name, oldest first; a stepped-back one ranks below its successor."""
    named = [(m, p) for p in directory.iterdir() if p.is_dir() and (m := _NAME.fullmatch(p.name))]
    return [p for m, p in sorted(named, key=lambda pair: (int(pair[0][1]), pair[0][2] is None))]


def _complete(path: Path) -> bool:
    """Marked, and every file has its size. Checksums are compared on loading: they cost a read of everything."""
    if not (path / MARK).is_file():
        return False
    try:
        files = json.loads((path / MARK).read_text(encoding="utf-8"))["files"]
    except (ValueError, KeyError):
        return False
    sizes = {name: seal["bytes"] for name, seal in files.items()}
    return all((path / n).is_file() and (path / n).stat().st_size == size for n, size in sizes.items())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
    "clean_leftovers",
    "latest_checkpoint",
    "load_checkpoint",
    "restore_model",
    "rng_state",
    "save_checkpoint",
    "set_rng_state",
]
