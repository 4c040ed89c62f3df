# SPDX-License-Identifier: Apache-2.0
"""Blocks of rows of data that are never read whole: JSONL, Parquet (one file or its shards), a data set of the Hub.

Each kind knows how many rows its blocks have, and reads one of them; the order is the business of
:mod:`palestra.data.stream`.
"""

from __future__ import annotations

import importlib
import os
from array import array
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from palestra.data.rows import Row, parse_line
from palestra.errors import DataError


class Blocks(Protocol):
    """name: what errors call the whole. sizes: rows of each block."""

    @property
    def name(self) -> str: ...

    @property
    def sizes(self) -> Sequence[int]: ...

    def read(self, block: int) -> list[tuple[int, Row]]:
        """The rows of a block with their numbers in the whole (lines of a JSONL file), from 1."""
        ...


class JsonlBlocks:
    """A JSONL file. One pass at the start remembers where each block of rows begins (a few bytes a block)."""

    def __init__(self, path: Path, rows: int) -> None:
        self.path, self.name = path, str(path)
        self._most = rows
        self._offsets, self._lines = array("Q"), array("Q")
        total = self._index()
        whole, rest = divmod(total, rows)
        self.sizes: Sequence[int] = [rows] * whole + [rest] * bool(rest)

    def _index(self) -> int:
        """How many rows there are. Blank lines are none."""
        rows = at = 0
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        if rows % self._most == 0:
                            self._offsets.append(at)
                            self._lines.append(number)
                        rows += 1
                    at += len(line)
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror or error}") from error
        return rows

    def read(self, block: int) -> list[tuple[int, Row]]:
        found: list[tuple[int, Row]] = []
        with self.path.open("rb") as file:
            file.seek(self._offsets[block])
            for number, line in enumerate(file, self._lines[block]):
                if len(found) == self.sizes[block]:
                    return found
                if line.strip():
                    where = f"{self.path}:{number}"
                    found.append((number, parse_line(_utf8(line, where, first=number == 1), where)))
        return found


class ParquetBlocks:
    """Parquet files, one behind the other. Blocks are parts of row groups, so that reading one decodes no more than
    its row group, a batch at a time."""

    def __init__(self, paths: Sequence[Path], rows: int) -> None:
        self._parquet = _pyarrow_parquet(paths[0])
        self.name = str(paths[0]) if len(paths) == 1 else f"{paths[0].parent} ({len(paths)} files)"
        self._most = rows
        self._places: list[tuple[Path, int, int]] = []  # file, row group, rows of the group before the block
        self.sizes: list[int] = []
        for path in paths:
            for group, count in enumerate(self._counts(path)):
                for start in range(0, count, rows):
                    self._places.append((path, group, start))
                    self.sizes.append(min(rows, count - start))
        self._starts = [0, *accumulate(self.sizes)]

    def _counts(self, path: Path) -> list[int]:
        try:
            with self._parquet.ParquetFile(path) as file:
                return [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
        except (OSError, ValueError) as error:  # pyarrow's own errors are of these two
            raise DataError(f"{path}: not a Parquet file ({' '.join(str(error).split())[:200]})") from None

    def read(self, block: int) -> list[tuple[int, Row]]:
        path, group, start = self._places[block]
        stop = start + self.sizes[block]
        rows: list[Row] = []
        at = 0
        with self._parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=self._most, row_groups=[group]):
                low, high = max(start - at, 0), min(stop - at, batch.num_rows)
                if low < high:
                    rows += batch.slice(low, high - low).to_pylist()
                at += batch.num_rows
                if at >= stop:
                    break
        return list(enumerate(rows, self._starts[block] + 1))


class MappedBlocks:
    """A data set of the Hub, as its own library keeps it: on disk, mapped into memory where it is read."""

    def __init__(self, data: Any, name: str, rows: int) -> None:
        self._data, self.name, self._most = data, name, rows
        whole, rest = divmod(len(data), rows)
        self.sizes: Sequence[int] = [rows] * whole + [rest] * bool(rest)

    def read(self, block: int) -> list[tuple[int, Row]]:
        start = block * self._most
        return [(n + 1, dict(self._data[n])) for n in range(start, start + self.sizes[block])]


def blocks_of(path: str | os.PathLike[str], split: str, rows: int) -> Blocks:
    """The blocks of a file, or of a directory with a split in one file or in shards, ``train-0000-of-0004.parquet``."""
    given = Path(path)
    if given.is_dir():
        whole = [given / f"{split}{suffix}" for suffix in (".jsonl", ".ndjson", ".parquet")]
        shards = sorted(given.glob(f"{split}-*.parquet"))
        files = next(([file] for file in whole if file.is_file()), shards)
        if not files:
            there = ", ".join(sorted(p.name for p in given.iterdir())[:8]) or "nothing"
            raise DataError(f"data.path {str(given)!r} has no {split}.jsonl or {split}.parquet; there is: {there}")
    else:
        files = [given]
    if not os.path.isfile(files[0]):  # False for a name that is too long, where Path.is_file raises
        raise DataError(f"data.path {str(given)!r} does not exist; give a JSONL or Parquet file or a directory of them")
    return ParquetBlocks(files, rows) if files[0].suffix.lower() == ".parquet" else JsonlBlocks(files[0], rows)


def _pyarrow_parquet(path: Path) -> Any:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"{path}: Parquet needs the package 'pyarrow' (pip install 'palestra[parquet]')") from error


def _utf8(line: bytes, where: str, *, first: bool) -> str:
    try:
        return line.decode("utf-8-sig" if first else "utf-8")  # some editors begin a file with a mark
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text ({error.reason})") from error
