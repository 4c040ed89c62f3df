# SPDX-License-Identifier: Apache-2.0
"""Directories that are whole or absent: written aside, sealed by a mark, swapped in, checked before use. No torch."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.config import FORMAT
from palestra.run.files import sync

MARK = "COMPLETE"
ASIDE = ".writing-"
REMOVING = "removing-"
"""Behind :data:`ASIDE`: one that was whole and is on its way out, which nobody misses."""
_NAME = re.compile(r"step_(\d{6,})(\.old)?")
_KEYS = {"format", "step", "score", "files", "seal"}


def seal(folder: Path, step: int, score: float | None = None) -> None:
    """Force every file to disk, then write the mark: if the mark is there, so is everything it lists.

    The mark holds the size and SHA-256 of every file and, as ``seal``, the SHA-256 of its own content.
    """
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    sums = {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": digest(p)} for p in files}
    for path in files:
        sync(path)
    mark: dict[str, Any] = {"format": FORMAT, "step": step, "score": score, "files": sums}
    write(folder / MARK, json.dumps({**mark, "seal": _seal_of(mark)}, indent=1))
    for path in {folder / MARK, folder, *(p.parent for p in files)}:
        sync(path)


def read_mark(folder: Path) -> dict[str, Any]:
    """The content of the mark. ValueError when it is not what :func:`seal` wrote, FileNotFoundError without one."""
    mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
    if not isinstance(mark, dict) or not _KEYS.issuperset(mark) or not isinstance(mark.get("files"), dict):
        raise ValueError("not a mark")
    # Checkpoints of the first versions have no seal.
    if "seal" in mark and mark["seal"] != _seal_of(mark):
        raise ValueError("the mark is damaged")
    return mark


def damage(folder: Path, *, deep: bool = True) -> str | None:
    """The first file that is missing or not as it was sealed, or None. ``deep`` compares checksums, not only sizes."""
    try:
        files: dict[str, Any] = read_mark(folder)["files"]
        sums = {name: (int(s["bytes"]), str(s["sha256"])) for name, s in files.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return MARK
    for name, (size, checksum) in sums.items():
        file = folder / name
        try:
            whole = file.is_file() and file.stat().st_size == size and (not deep or digest(file) == checksum)
        except OSError:  # a disk that fails, or a file that may not be read
            whole = False
        if not whole:
            return name
    return None


def complete(folder: Path) -> bool:
    """Marked, and every file has its size."""
    return damage(folder, deep=False) is None


def swap(aside: Path, target: Path) -> None:
    """Give the finished directory its name. An existing one steps back first, and keeps its mark until then."""
    old = target.with_name(target.name + ".old")
    if target.exists() and complete(target):
        target.rename(old)
    elif target.exists():
        shutil.rmtree(target)
    aside.rename(target)
    sync(target.parent)
    if old.exists():
        shutil.rmtree(old)


def clean_leftovers(directory: Path | str) -> None:
    """Remove what a killed save left behind. Only for the process that owns the run."""
    directory = Path(directory)
    for path in directory.glob(f"{ASIDE}*"):
        shutil.rmtree(path)
    for path in directory.glob("step_*.old"):
        current = path.with_suffix("")
        if complete(current):
            shutil.rmtree(path)
        elif not current.exists():
            # Killed between the two renames of a swap: the old one is the only one, and gets its name back.
            path.rename(current)


def prune(directory: Path, newest: Path, keep_last: int | None, keep_best: int = 0) -> None:
    """Remove whole checkpoints except the ``keep_last`` newest up to ``newest`` and the ``keep_best`` by score."""
    if keep_last is None:
        return
    whole = [p for p in in_order(directory) if p != newest and complete(p) and step_of(p) <= step_of(newest)]
    kept = {newest, *best(directory)[:keep_best], *(whole[1 - keep_last :] if keep_last > 1 else ())}
    for path in whole:
        if path not in kept:
            # The name goes first: a deletion that is cut short must not look like a checkpoint.
            doomed = path.rename(directory / f"{ASIDE}{REMOVING}{path.name}")
            shutil.rmtree(doomed)


def best(directory: Path) -> list[Path]:
    """The whole checkpoints that have a score, the best first; of equals the later."""
    scores = {p: mark["score"] for p in in_order(directory) if (mark := _whole(p)) and mark.get("score") is not None}
    return sorted(scores, key=lambda p: (scores[p], step_of(p)), reverse=True)


def in_order(directory: Path) -> list[Path]:
    """Every directory with a checkpoint's name, oldest first; a stepped-back one ranks below its successor."""
    named = [(m, p) for p in directory.iterdir() if p.is_dir() and (m := _NAME.fullmatch(p.name))]
    return [p for m, p in sorted(named, key=lambda pair: (int(pair[0][1]), pair[0][2] is None))]


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    named = _NAME.fullmatch(path.name)
    assert named is not None
    return int(named[1])


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _whole(path: Path) -> dict[str, Any] | None:
    return read_mark(path) if complete(path) else None


def _seal_of(mark: Mapping[str, Any]) -> str:
    content = {key: value for key, value in mark.items() if key != "seal"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
