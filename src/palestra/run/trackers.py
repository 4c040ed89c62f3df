# SPDX-License-Identifier: Apache-2.0
"""Where metric rows go. JSONL and TensorBoard always; wandb and trackio when asked for and installed."""

from __future__ import annotations

import importlib
import json
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from palestra.errors import ConfigError, DataError
from palestra.registry import Registry
from palestra.run.files import write_text, writing

Metrics = Mapping[str, float | int | None]


class Tracker(Protocol):
    """Takes rows. ``step`` is the row's own, in any order; ``at`` is the time in seconds since 1970."""

    def log(self, step: int, metrics: Metrics, *, phase: str, at: float) -> None: ...

    def rewind(self, step: int, *, phase: str | None) -> int:
        """Forget rows after ``step`` and all but a phase's first row of it; returns how many rows went (0 where the
        tracker cannot forget)."""
        ...

    def close(self) -> None: ...


def finite(metrics: Metrics) -> dict[str, float | int]:
    """The values that are numbers: None, NaN and infinities are left out, never turned into 0.

    >>> finite({"train/kl": float("nan"), "train/loss": 0.5, "eval/accuracy": None})
    {'train/loss': 0.5}
    """
    return {name: _plain(v) for name, v in metrics.items() if v is not None and math.isfinite(v)}


def _plain(value: Any) -> float | int:
    """A Python number, also for numpy and torch scalars."""
    return int(value) if isinstance(value, int) else float(value)


class JsonlTracker:
    """One JSON object a line in ``metrics.jsonl``, written through at once: a killed run keeps every row."""

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        if resume and path.exists():
            self._keep(lambda row: True)  # drops the torn line that a kill may have left
        self._file = path.open("a" if resume else "w", encoding="utf-8")

    def log(self, step: int, metrics: Metrics, *, phase: str, at: float) -> None:
        row = {"step": step, "phase": phase, "time": round(at, 3), **finite(metrics)}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def rewind(self, step: int, *, phase: str | None) -> int:
        self._file.close()
        first: dict[str, dict[str, Any]] = {}

        def wanted(row: dict[str, Any]) -> bool:
            if row["step"] < step or phase not in (None, row["phase"]):
                return True
            return row["step"] == step and first.setdefault(row["phase"], row) is row

        gone = self._keep(wanted)
        self._file = self.path.open("a", encoding="utf-8")
        return gone

    def close(self) -> None:
        self._file.close()

    def _keep(self, wanted: Callable[[dict[str, Any]], bool]) -> int:
        rows = read_metrics(self.path)
        kept = [row for row in rows if wanted(row)]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        return len(rows) - len(kept)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl``. A torn last line (a killed run) is left out; any other bad line raises
    DataError with file and line."""
    rows = []
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
            rows.append({**row, "step": int(row["step"]), "phase": str(row["phase"])})
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise DataError(f"{path}:{number}: not a metrics row (a JSON object with step and phase)") from None
    return rows


class TensorBoardTracker:
    """Event files for ``tensorboard --logdir RUN``, written by TensorBoard's own writer (no torch)."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2, summary_pb2
        self._directory, self._make = directory, partial(EventFileWriter, str(directory), flush_secs=10)
        self._writer = self._make()

    def log(self, step: int, metrics: Metrics, *, phase: str, at: float) -> None:
        values = [self._summary.Summary.Value(tag=k, simple_value=float(v)) for k, v in finite(metrics).items()]
        if values:
            self._writer.add_event(
                self._event.Event(wall_time=at, step=step, summary=self._summary.Summary(value=values))
            )

    def rewind(self, step: int, *, phase: str | None) -> int:
        if phase is None:  # readers purge every tag from this step on; they know no phases
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._writer.add_event(self._event.Event(step=step + 1, session_log=start))
        else:  # of one phase: anew, from the rows that the tracker before this one has kept
            self._writer.close()
            for file in self._directory.glob("events.*"):
                file.unlink()
            self._writer = self._make()
            for row in read_metrics(self._directory.parent / "metrics.jsonl"):
                metrics = {name: value for name, value in row.items() if "/" in name}
                self.log(row["step"], metrics, phase=row["phase"], at=row.get("time", 0.0))
        return 0

    def close(self) -> None:
        self._writer.close()


EXTRAS: Registry[Callable[[Path, Mapping[str, Any], bool], Tracker]] = Registry("tracker")
"""Optional trackers by name: a function of (run directory, resolved config, resume)."""


def make_trackers(
    path: Path, config: Mapping[str, Any], extras: Sequence[str] = (), *, resume: bool = False
) -> list[Tracker]:
    """The trackers of a run directory: JSONL, TensorBoard, and the extras by name.

    Raises ConfigError for an unknown name or one whose package is not installed.
    """
    makers = [EXTRAS[name] for name in extras]
    optional = [make(path, config, resume) for make in makers]  # first: they may refuse, and hold no file of ours
    with writing(path):
        always: list[Tracker] = [
            JsonlTracker(path / "metrics.jsonl", resume=resume),
            TensorBoardTracker(path / "tensorboard"),
        ]
    return [*always, *optional]


@EXTRAS.register("wandb")
class WandbTracker:
    """Weights & Biases. Project from ``WANDB_PROJECT`` (default palestra), offline with ``WANDB_MODE=offline``.

    ``WANDB_LOG_MODEL=end`` uploads the last checkpoint at the end, ``checkpoint`` every one that is still there.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], resume: bool) -> None:
        self._path, self._wandb = path, _require("wandb")
        try:
            self._run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", "palestra"),
                name=path.name,
                dir=str(path),
                config=dict(config),
                id=_run_id(path, "wandb", resume),
                resume="allow",
            )
        except self._wandb.errors.Error as error:
            said = " ".join(str(error).split())
            raise ConfigError(f"tracker 'wandb' cannot start: {said}; log in, or set WANDB_MODE=offline") from error
        # wandb's own step may only grow and drops rows that go back; ours is a metric the axes follow.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Metrics, *, phase: str, at: float) -> None:
        self._run.log({**finite(metrics), "step": step, "phase": phase})

    def rewind(self, step: int, *, phase: str | None) -> int:
        return 0

    def close(self) -> None:
        checkpoints = sorted((self._path / "checkpoints").glob("step_*"))
        wanted = {"end": checkpoints[-1:], "checkpoint": checkpoints}
        for directory in wanted.get(os.environ.get("WANDB_LOG_MODEL", "").lower(), []):
            artifact = self._wandb.Artifact(f"model-{self._run.id}", type="model")
            artifact.add_dir(str(directory))
            self._run.log_artifact(artifact, aliases=[directory.name])
        self._run.finish()


@EXTRAS.register("trackio")
class TrackioTracker:
    """trackio (local dashboards). Project from ``TRACKIO_PROJECT``, else ``WANDB_PROJECT``, else palestra."""

    def __init__(self, path: Path, config: Mapping[str, Any], resume: bool) -> None:
        trackio = _require("trackio")
        project = os.environ.get("TRACKIO_PROJECT") or os.environ.get("WANDB_PROJECT", "palestra")
        # trackio knows runs by name alone: two directories of one name must not become one run.
        name = f"{path.name}-{_run_id(path, 'trackio', resume)}"
        self._run = trackio.init(project=project, name=name, config=dict(config), resume="allow")

    def log(self, step: int, metrics: Metrics, *, phase: str, at: float) -> None:
        self._run.log({**finite(metrics), "phase": phase}, step=step)

    def rewind(self, step: int, *, phase: str | None) -> int:
        return 0

    def close(self) -> None:
        self._run.finish()


def _require(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        raise ConfigError(
            f"tracker {package!r} needs the package {package}: pip install {package}, or leave it out of trackers"
        ) from None


def _run_id(path: Path, tracker: str, resume: bool) -> str:
    """The tracker's id of this run, kept in the run directory so that a resumed run goes on in the same place."""
    file = path / f".{tracker}_id"
    if not (resume and file.exists()):
        write_text(file, secrets.token_hex(4))
    return file.read_text(encoding="utf-8")
