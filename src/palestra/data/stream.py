# SPDX-License-Identifier: Apache-2.0
"""Files larger than memory: rows are read where the cursor stands, shuffled in a buffer, resumed exactly.

One pass over the file at the start remembers where every block of rows begins (16 bytes a block). An epoch's order
is then a function of (seed, epoch) alone: the blocks are shuffled, each buffer is some of them, and the rows inside
a buffer are shuffled too. So any position is reached by reading one buffer, and nothing needs to be remembered but
the cursor.
"""

from __future__ import annotations

import os
import random
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

from palestra.data.rows import parse_line, row_to_task, split_file
from palestra.data.source import NOTHING, SOURCES, Cursor, Needs
from palestra.errors import ConfigError, DataError
from palestra.types import Task

BLOCKS_PER_BUFFER = 16


class StreamSource:
    """Tasks of a JSONL file that is never read whole.

    buffer: rows that are shuffled together and held in memory. shuffle_seed: None keeps the file's order. Rows are
    named by their line, where they have no id of their own; ids are not compared with one another. needs: fields that
    a row must have, looked at when it is read.

    >>> import tempfile
    >>> file = tempfile.NamedTemporaryFile("w", suffix=".jsonl", delete=False)
    >>> for i in range(6): print(f'{{"prompt": "p{i}"}}', file=file, flush=True)
    >>> source = StreamSource(file.name, shuffle_seed=None, buffer=2)
    >>> tasks, cursor = source.take(Cursor(0, 4), 3)
    >>> source.size, [t.prompt for t in tasks], cursor
    (6, ['p4', 'p5', 'p0'], Cursor(epoch=1, position=1, stage=0))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        shuffle_seed: int | None = 0,
        buffer: int = 10_000,
        needs: Needs = NOTHING,
    ) -> None:
        if buffer < 1:
            raise ConfigError(f"data.buffer is {buffer}: at least one row is held; 10000 is usual")
        self.path = Path(path)
        self.shuffle_seed = shuffle_seed
        self.needs = needs
        self.block = max(1, buffer // BLOCKS_PER_BUFFER)
        self.per_buffer = max(1, buffer // self.block)
        self._offsets, self._lines = array("Q"), array("Q")
        self._rows = self._index()
        self._order: tuple[int, Sequence[int], Sequence[int]] | None = None
        self._held: tuple[tuple[int, int], list[Task]] | None = None

    @property
    def size(self) -> int:
        return self._rows

    def take(self, cursor: Cursor, n: int) -> tuple[list[Task], Cursor]:
        """The next ``n`` tasks and the cursor behind them."""
        taken: list[Task] = []
        epoch, position = cursor.epoch, cursor.position
        while len(taken) < n:
            if position >= self.size:
                epoch, position = epoch + 1, 0
            blocks, ends = self._epoch(epoch)
            number = bisect_right(ends, position)
            tasks = self._buffer(epoch, number, blocks)
            start = position - (ends[number] - len(tasks))
            part = tasks[start : start + n - len(taken)]
            taken += part
            position += len(part)
        return taken, Cursor(epoch, position)

    def _index(self) -> int:
        """Where each block begins: byte and line. Blank lines are no rows."""
        rows = 0
        try:
            with self.path.open("rb") as file:
                at = 0
                for number, line in enumerate(file, 1):
                    if line.strip():
                        if rows % self.block == 0:
                            self._offsets.append(at)
                            self._lines.append(number)
                        rows += 1
                    at += len(line)
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror or error}") from error
        if not rows:
            raise DataError(f"{self.path}: the data set is empty; give a file with at least one row")
        return rows

    def _epoch(self, epoch: int) -> tuple[Sequence[int], Sequence[int]]:
        """The blocks in the order of an epoch, and the position at which each buffer ends."""
        if self._order is None or self._order[0] != epoch:
            blocks = list(range(len(self._offsets)))
            if self.shuffle_seed is not None:
                random.Random(f"blocks/{self.shuffle_seed}/{epoch}").shuffle(blocks)
            last = len(blocks) - 1
            sizes = [self._rows - last * self.block if b == last else self.block for b in blocks]
            held = [sum(sizes[i : i + self.per_buffer]) for i in range(0, len(sizes), self.per_buffer)]
            self._order = (epoch, blocks, list(accumulate(held)))
        return self._order[1], self._order[2]

    def _buffer(self, epoch: int, number: int, blocks: Sequence[int]) -> list[Task]:
        if self._held is None or self._held[0] != (epoch, number):
            chosen = blocks[number * self.per_buffer : (number + 1) * self.per_buffer]
            with self.path.open("rb") as file:
                tasks = [task for block in chosen for task in self._read(file, block)]
            if self.shuffle_seed is not None:
                random.Random(f"buffer/{self.shuffle_seed}/{epoch}/{number}").shuffle(tasks)
            self._held = ((epoch, number), tasks)
        return self._held[1]

    def _read(self, file: BinaryIO, block: int) -> list[Task]:
        tasks: list[Task] = []
        wanted = min(self.block, self._rows - block * self.block)
        file.seek(self._offsets[block])
        for number, line in enumerate(file, self._lines[block]):
            if len(tasks) == wanted:
                return tasks
            if line.strip():
                where = f"{self.path}:{number}"
                row = parse_line(_utf8(line, where), where)
                tasks.append(row_to_task(row, where=where, default_id=str(number), needs=self.needs))
        if len(tasks) < wanted:
            raise DataError(f"{self.path} has become shorter while it was read; leave a data file alone during a run")
        return tasks


def _utf8(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text ({error.reason})") from error


@SOURCES.register("stream")
def stream(
    path: str,
    split: str = "train",
    seed: int = 0,
    buffer: int = 10_000,
    shuffle: bool | None = None,
    needs: Needs = NOTHING,
) -> StreamSource:
    """A JSONL file larger than memory, with a shuffle buffer of ``buffer`` rows; fields as for ``jsonl``."""
    shuffled = split == "train" if shuffle is None else shuffle
    return StreamSource(split_file(path, split), shuffle_seed=seed if shuffled else None, buffer=buffer, needs=needs)
