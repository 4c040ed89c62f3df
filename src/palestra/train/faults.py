# SPDX-License-Identifier: Apache-2.0
"""What a training does about optimiser steps that were not taken: the batch is kept, and after too many it ends."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from palestra.config import FORMAT
from palestra.errors import RunError
from palestra.learn.batch import Rows, Sample
from palestra.learn.robust import Fault, Guard, TrainingError
from palestra.run.files import sync, writing
from palestra.train.config import OptimConfig

FOLDER = "faults"
_PER_TOKEN = ("tokens", "loss_mask", "logprobs", "versions")
_PER_SAMPLE = ("after",)
_COMPUTED = ("advantages", "old", "ref", "values", "after", "returns", "value_counts")


class Faults:
    """A guard at work in a run directory: ``RUN/faults/rl_step_000012.npz`` is a batch that was not learned from.

    phase: as in ``metrics.jsonl``. remedies: where memory does not suffice, see :func:`remedies`. tell: hears of each
    fault, with the file.
    """

    def __init__(
        self,
        run: Path,
        tokens: int,
        max_nonfinite: int,
        *,
        phase: str,
        remedies: str,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._folder, self._phase, self._tell = run / FOLDER, phase, tell
        self._last: Path | None = None
        self.guard = Guard(tokens, max_nonfinite, tell, remedies)

    @property
    def whole(self) -> bool:
        """Whether what a checkpoint would hold now is the end of a step, counted and logged."""
        return self.guard.whole

    def settle(self, step: int) -> None:
        """Call it when a step is complete and logged: it is whole then. Raises TrainingError after ``max_nonfinite`` in
        a row."""
        self.guard.whole = True
        self.keep(step)
        try:
            self.guard.check()
        except TrainingError as error:
            raise TrainingError(f"{error}: {self._last}" if self._last else str(error)) from None

    def keep(self, step: int) -> None:
        """Write what was not learned from in a step, before anything else can go wrong."""
        faults, self.guard.faults = self.guard.faults, []
        for fault in faults:
            self._last = self._folder / f"{self._phase}_step_{step:06d}.npz"
            write_fault(self._last, fault, step=step, phase=self._phase)
            self._tell(f"step {step} was skipped: {fault.reason}; its batch is in {self._last}")


def remedies(section: str, settings: OptimConfig, *, adapter: bool, shorter: str) -> str:
    """What to change where memory does not suffice although passes are as small as can be, from cheap to dear.

    section: of the config, with these settings. shorter: the key that makes samples shorter.

    >>> remedies("sft", OptimConfig(gradient_checkpointing=True), adapter=False, shorter="sft.max_length")
    'set sft.compute_dtype=bfloat16, then lower sft.max_length, then train an adapter (lora.r=16)'
    """
    ladder = [] if settings.gradient_checkpointing else [f"set {section}.gradient_checkpointing=true"]
    ladder += [] if settings.compute_dtype == "bfloat16" else [f"set {section}.compute_dtype=bfloat16"]
    ladder += [f"lower {shorter}"]
    ladder += [] if adapter else ["train an adapter (lora.r=16)"]
    return ", then ".join(ladder)


def write_fault(path: Path | str, fault: Fault, *, step: int, phase: str) -> None:
    """The rows of a fault as one file, whole or not at all: NumPy arrays by name, and ``about`` as JSON."""
    path, rows = Path(path), fault.rows
    samples = rows.samples
    keep = [f.name for f in fields(Sample) if f.name not in _PER_TOKEN]
    about = {
        "format": FORMAT,
        "step": step,
        "phase": phase,
        "reason": fault.reason,
        "samples": [{name: getattr(s, name) for name in keep} for s in samples],
    }
    arrays: dict[str, Any] = {
        "about": np.array(json.dumps(about)),
        "lengths": np.array([len(s.tokens) for s in samples]),
    }
    arrays |= {name: _joined([getattr(s, name) for s in samples]) for name in _PER_TOKEN}
    arrays |= {name: _joined(values) for name in _COMPUTED if (values := getattr(rows, name)) is not None}
    aside = path.with_name(f".{path.name}.tmp")
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        aside.write_bytes(buffer.getvalue())
        sync(aside)
        os.replace(aside, path)


def read_fault(path: Path | str) -> tuple[Mapping[str, Any], Rows]:
    """(``format``, ``step``, ``phase`` and ``reason``; the rows to the bit). RunError where the file is no such one."""
    try:
        with np.load(io.BytesIO(Path(path).read_bytes()), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(str(arrays.pop("about")))
        if about["format"] != FORMAT:
            raise RunError(f"{path} has format {about['format']}; this version reads format {FORMAT}")
        ends = np.cumsum(arrays.pop("lengths"))[:-1]
        parts: dict[str, Any] = {
            name: tuple(values.tolist() if name in _PER_SAMPLE else np.split(values, ends))
            for name, values in arrays.items()
        }
        samples = tuple(_sample({n: parts[n][i] for n in _PER_TOKEN}, s) for i, s in enumerate(about.pop("samples")))
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{path} is no batch of a skipped step: {error}") from error
    return about, Rows(samples, **{name: parts[name] for name in _COMPUTED if name in parts})


def _sample(per_token: Mapping[str, Any], rest: Mapping[str, Any]) -> Sample:
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in rest.items()}
    return Sample(**per_token, **plain)


def _joined(values: Any) -> Any:
    """What belongs to tokens, end to end; what belongs to samples as it is."""
    return np.concatenate([np.atleast_1d(v) for v in values])


__all__ = ["Faults", "read_fault", "remedies", "write_fault"]
