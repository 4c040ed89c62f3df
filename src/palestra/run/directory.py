# SPDX-License-Identifier: Apache-2.0
"""A run directory: claimed by one run, described by ``run.json``, filled by the trackers. See docs/formats.md."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from palestra import config as configuration
from palestra.errors import RunError, UserError
from palestra.run.files import read_json, write_json, write_text, writing
from palestra.run.metrics import check
from palestra.run.resume import CONDITIONS, check_same, differences, told
from palestra.run.trackers import Tracker, make_trackers

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
_KEPT = ("checkpoints", "warmup", "rollouts", "summary.json", "journal.jsonl", "faults")
"""What makes a directory worth keeping, besides logged rows."""
_PACKAGES = ("palestra", "torch", "transformers", "peft", "accelerate", "numpy")


class Run:
    """An open run directory. Use :meth:`open`; a ``with`` block closes it.

    path: the directory. strict: an unregistered metric name raises instead of being logged.

    >>> import tempfile
    >>> class Settings(configuration.Config):
    ...     seed: int = 3
    >>> with tempfile.TemporaryDirectory() as parent, Run.open(Path(parent) / "a", Settings()) as run:
    ...     run.log(1, {"train/reward": 0.5}, phase="rl")
    ...     sorted(p.name for p in run.path.iterdir())
    ['config.yaml', 'metrics.jsonl', 'run.json', 'tensorboard']
    """

    def __init__(
        self,
        path: Path,
        trackers: Iterable[Tracker],
        *,
        strict: bool = False,
        made: Sequence[Path] | None = None,
        release: Callable[[], object] = lambda: None,
    ) -> None:
        self.path = path
        self.strict = strict
        self._trackers = tuple(trackers)
        self._release = weakref.finalize(self, release)  # of the lock on the directory
        self._made = made  # the directories made for a new run, until something of it is worth keeping

    @classmethod
    def open(
        cls,
        path: str | Path,
        config: configuration.Config,
        *,
        resume: bool = False,
        trackers: Sequence[str] = (),
        strict: bool = False,
    ) -> Run:
        """Claim ``path`` for a new run, or go on with the run it holds; where there is none yet, ``resume`` starts it.

        trackers: extra ones by name (``wandb``, ``trackio``); JSONL and TensorBoard are always there. Raises
        RunError when the directory holds another run, other files, or cannot be written; a directory that could
        not be set up completely is left as it was, and so is one whose ``with`` block a UserError or Ctrl-C
        leaves before anything was logged or saved: the next command can have it.
        """
        path, values = Path(path), config.model_dump(mode="json")
        if resume and _begun(path):
            release = lock(path)
            try:
                _describe_resumed(path, config)
                return cls(path, make_trackers(path, values, trackers, resume=True), strict=strict, release=release)
            except BaseException:
                release()
                raise
        made = _claim(path)
        try:
            release = lock(path)
            write_json(path / "run.json", describe(config))
            write_text(path / "config.yaml", configuration.dump(config))
            return cls(path, make_trackers(path, values, trackers), strict=strict, made=made, release=release)
        except BaseException:
            _unclaim(path, made)
            raise

    def log(self, step: int, metrics: Mapping[str, float | int | None], *, phase: str) -> None:
        """Hand one row to every tracker. The step is explicit in every call and may go backwards (a late
        evaluation); None, NaN and infinite values are left out of the row, never written as 0."""
        check(metrics, strict=self.strict)
        self._made = None
        with writing(self.path):
            for tracker in self._trackers:
                tracker.log(step, metrics, phase=phase, at=time.time())

    def rewind(self, step: int, *, phase: str | None = None) -> int:
        """Forget rows after ``step`` (of one phase, or of all), so that a resumed run writes none twice. Of the step
        itself a phase's first row stays, which is the step's own: what was measured behind it is measured again.
        Returns how many rows went."""
        with writing(self.path):
            return sum(tracker.rewind(step, phase=phase) for tracker in self._trackers)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``, the numbers at the end of the run."""
        write_json(self.path / "summary.json", {"format": FORMAT, **summary})

    def close(self) -> None:
        """Flush and close the trackers. Calling it again does nothing."""
        trackers, self._trackers = self._trackers, ()
        with writing(self.path):
            for tracker in trackers:
                tracker.close()
        self._release()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.close()
        ended = kind is not None and issubclass(kind, UserError | KeyboardInterrupt)
        if ended and self._made is not None and not any((self.path / name).exists() for name in _KEPT):
            _unclaim(self.path, self._made)


def lock(path: Path) -> Callable[[], None]:
    """Hold a run directory against other processes until the function this returns is called, or the process ends.
    Raises RunError where another one holds it. Where the system or the file system knows no locks, nothing is held."""
    if fcntl is None:
        return lambda: None
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise RunError(f"{path} is being written by another process; let it end, or choose another --out") from None
    except OSError:
        pass
    return partial(os.close, handle)


def read_run(path: str | Path) -> dict[str, Any]:
    """The content of ``run.json``; RunError where there is none or its format is unknown."""
    file = Path(path) / "run.json"
    if not os.path.exists(file):
        raise RunError(f"{path} holds no run (no run.json); check the path")
    info = read_json(file, "the run was not set up completely, choose another --out")
    if info.get("format") != FORMAT:
        raise RunError(f"{file}: format {info.get('format')!r} is not known here; this version reads format {FORMAT}")
    return info


def describe(config: configuration.Config) -> dict[str, Any]:
    """What ``run.json`` says about this process: versions, threads, kernels, device, dtypes, seed, git state, command,
    start (UTC)."""
    return {
        "format": FORMAT,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv,
        "kind": type(config).__name__,
        "seed": config.model_dump().get("seed"),
        "versions": {"python": sys.version.split()[0], **{name: _version(name) for name in _PACKAGES}},
        "threads": _threads(),
        "kernels": _kernels(),
        "device": _device(config),
        "dtypes": _dtypes(config.model_dump(mode="json")),
        "git": git_state(Path.cwd()),
    }


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it; None outside a work tree or where git is not installed."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(directory), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _threads() -> int | None:
    """Threads of one operation of torch, by which long sums are cut; None where torch is not loaded."""
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())


def _kernels() -> str | None:
    """Whose arithmetic the numbers come from; None where no model is loaded."""
    build: Any = sys.modules.get("palestra.model.kernels.build")
    return None if build is None else str(build.which())


def _device(config: configuration.Config) -> str | None:
    """What the model's ``auto`` comes to on this machine, or the device it names; None where there is no model."""
    asked, torch = getattr(getattr(config, "model", None), "device", None), sys.modules.get("torch")
    if asked != "auto" or torch is None:
        return asked
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def _dtypes(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Every option of the config that names a dtype.

    >>> _dtypes({"model": {"dtype": "float32", "path": "a"}, "train": {"compute_dtype": "bfloat16"}})
    {'model.dtype': 'float32', 'train.compute_dtype': 'bfloat16'}
    """
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _dtypes(value, f"{prefix}{name}.")
        elif name.endswith("dtype") and isinstance(value, str):
            found[prefix + name] = value
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_free(path: str | Path) -> None:
    """Refuse a directory that cannot be written or holds another run or other files, before time is spent on loading a
    model. Raises RunError."""
    path = Path(path)
    check_writable(path)
    if not path.is_dir():
        return
    if (path / "run.json").exists():
        go_on = "" if _kind(path / "run.json") == "EvalConfig" else "go on with it by --resume or "
        raise RunError(f"{path} already holds a run; {go_on}choose another --out")
    if any(path.iterdir()):
        raise RunError(f"{path} is not empty and holds no run; choose another --out")


def check_writable(path: str | Path) -> None:
    """Refuse a directory that cannot be made, or that takes no file; leaves nothing behind. Raises RunError.

    >>> check_writable("/dev/null/a")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    palestra.errors.RunError: cannot write /dev/null/a: a part of the path is a file, not a directory; choose ...
    """
    path = Path(path)
    with writing(path):
        if path.exists() and not path.is_dir():
            raise FileExistsError(errno.EEXIST, "not a directory")
        there = next(p for p in (path, *path.parents) if os.path.lexists(p))
        with tempfile.TemporaryFile(dir=there) as file:  # has no name: a killed process leaves none either
            file.write(bytes(4096))


def _kind(file: Path) -> Any:
    """The kind of run that a ``run.json`` tells of; None where it cannot be read."""
    try:
        return read_json(file, "")["kind"]
    except (RunError, KeyError):
        return None


def _claim(path: Path) -> list[Path]:
    """Make the directory and claim it by an empty ``run.json``; returns the directories that were made."""
    made = [p for p in (path, *path.parents) if not p.exists()]
    check_free(path)
    try:
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            (path / "run.json").touch(exist_ok=False)  # of two runs that start at once, one fails here
    except RunError:
        _remove(made)
        raise
    return made


def _unclaim(path: Path, made: Sequence[Path]) -> None:
    """Empty the directory again (it was empty when claimed) and remove what was made for it."""
    for entry in path.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    _remove(made)


def _remove(directories: Iterable[Path]) -> None:
    for directory in directories:
        with suppress(OSError):  # never made, or another run put something into it meanwhile
            directory.rmdir()


def _begun(path: Path) -> bool:
    """Whether there is something to resume. A run that was killed while its directory was being set up has an empty
    ``run.json``: nothing of it is worth keeping."""
    file = path / "run.json"
    if file.exists() and not file.stat().st_size:
        with writing(path):
            _unclaim(path, [])
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


def _describe_resumed(path: Path, config: configuration.Config) -> None:
    """Add this process to ``run.json`` under ``resumed``; ``config.yaml`` becomes the config now in force. What is
    otherwise than last time is told in a warning: keys of the config, and what the bits of a number depend on."""
    info = read_run(path)
    now = describe(config)
    changed = check_same(path, info, now, config)
    resumed = [*info.get("resumed", []), {key: now[key] for key in ("started", "command", *CONDITIONS, "git")}]
    if changed:
        warnings.warn(f"{path} goes on with another config than it had: {told(changed)}", stacklevel=4)
    if found := differences([info, *resumed][-2], now):
        warnings.warn(
            f"{path} goes on under other conditions ({'; '.join(found)}): from here on it is no longer, bit for bit, "
            "the run that was never stopped",
            stacklevel=4,
        )
    write_json(path / "run.json", {**info, "resumed": resumed})
    write_text(path / "config.yaml", configuration.dump(config))
