# SPDX-License-Identifier: Apache-2.0
"""Files that are whole or absent, and one line for a disk that does not play along."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from palestra.errors import RunError, UserError

_REASONS = {
    errno.ENOSPC: "the disk is full; free some space or choose another --out",
    errno.EDQUOT: "the disk quota is used up; free some space or choose another --out",
    errno.ENOENT: "there is no such directory, and none was made; make it or choose another --out",
    errno.EACCES: "no permission to write there; choose another --out",
    errno.EPERM: "no permission to write there; choose another --out",
    errno.EROFS: "the file system is read-only; choose another --out",
    errno.ENOTDIR: "a part of the path is a file, not a directory; choose another --out",
    errno.EEXIST: "something of that name is in the way; choose another --out",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter --out",
}


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turns an OSError of the block into one :class:`~palestra.errors.RunError` line about ``path``.

    >>> with writing("runs/a"):
    ...     raise OSError(errno.ENOSPC, "No space left on device")
    Traceback (most recent call last):
    palestra.errors.RunError: cannot write runs/a: the disk is full; free some space or choose another --out
    """
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        raise RunError(f"cannot write {path}: {reason}") from error


HALVES = "backslashreplace"
"""How half a surrogate pair is written, which a model or JSON may hold and no encoding has: as the escape of JSON."""


def write_text(path: str | Path, text: str) -> None:
    """Write ``path`` so that a reader sees the old file or the new one, never a part: aside, synced, renamed. A link
    stays a link; a pipe or a device is written to as it is."""
    path = Path(path)
    if path.exists() and not path.is_file():
        with writing(path):
            path.write_text(text, encoding="utf-8", errors=HALVES)
        return
    path = Path(os.path.realpath(path))
    with writing(path):
        handle, aside = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", errors=HALVES) as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(aside, 0o666 & ~_umask())  # mkstemp's 0600 would hide the run from a colleague
            os.replace(aside, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(aside)
            raise


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as indented JSON, whole or not at all. NaN and infinities, which JSON lacks, raise ValueError."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike[str], advice: str, *, error: type[UserError] = RunError) -> dict[str, Any]:
    """The object in a JSON file; ``error``, one line that ends with ``advice``, where there is none to be read.

    >>> read_json(".", "remove it")
    Traceback (most recent call last):
    palestra.errors.RunError: . cannot be read: Is a directory; remove it
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror or problem}; {advice}") from problem
    except (ValueError, RecursionError) as problem:
        raise error(f"{path} is not JSON ({problem}); {advice}") from None
    if not isinstance(found, dict):
        raise error(f"{path} holds a {type(found).__name__} instead of a JSON object; {advice}")
    return found


def sync(path: Path) -> None:
    """Force a file, or the names in a directory, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
