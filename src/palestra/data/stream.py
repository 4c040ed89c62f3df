# SPDX-License-Identifier: Apache-2.0
"""Data larger than memory: rows are read where the cursor stands, shuffled in a buffer, resumed exactly.

An epoch's order is a function of (seed, epoch) alone: the blocks are shuffled, each buffer is some of them, and the
rows inside a buffer are shuffled too. So any position is reached by reading one buffer, and nothing needs to be
remembered but the cursor.
"""

from __future__ import annotations

import os
import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from palestra.data.blocks import Blocks, MappedBlocks, blocks_of
from palestra.data.rows import row_to_task
from palestra.data.source import NOTHING, SOURCES, Cursor, Needs
from palestra.data.tables import hub_rows
from palestra.errors import ConfigError, DataError
from palestra.types import Task

BLOCKS_PER_BUFFER = 16


class StreamSource:
    """Tasks of data that are never read whole: a path, or blocks.

    buffer: rows that are shuffled together and held in memory. shuffle_seed: None keeps the order of the data. Rows are
    named by their number (JSONL: the line), where they have no id of their own; ids are not compared with one another.
    needs: fields that a row must have, looked at when it is read.

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
        data: str | os.PathLike[str] | Blocks,
        *,
        split: str = "train",
        shuffle_seed: int | None = 0,
        buffer: int = 10_000,
        needs: Needs = NOTHING,
    ) -> None:
        rows = block_rows(buffer)
        self.blocks = blocks_of(data, split, rows) if isinstance(data, str | os.PathLike) else data
        self.shuffle_seed = shuffle_seed
        self.needs = needs
        self.per_buffer = max(1, buffer // rows)
        self._rows = sum(self.blocks.sizes)
        if not self._rows:
            raise DataError(f"{self.blocks.name}: the data set is empty; give a file with at least one row")
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

    def _epoch(self, epoch: int) -> tuple[Sequence[int], Sequence[int]]:
        """The blocks in the order of an epoch, and the position at which each buffer ends."""
        if self._order is None or self._order[0] != epoch:
            blocks = list(range(len(self.blocks.sizes)))
            if self.shuffle_seed is not None:
                random.Random(f"blocks/{self.shuffle_seed}/{epoch}").shuffle(blocks)
            sizes = [self.blocks.sizes[block] for block in blocks]
            held = [sum(sizes[i : i + self.per_buffer]) for i in range(0, len(sizes), self.per_buffer)]
            self._order = (epoch, blocks, list(accumulate(held)))
        return self._order[1], self._order[2]

    def _buffer(self, epoch: int, number: int, blocks: Sequence[int]) -> list[Task]:
        if self._held is None or self._held[0] != (epoch, number):
            chosen = blocks[number * self.per_buffer : (number + 1) * self.per_buffer]
            tasks = [task for block in chosen for task in self._read(block)]
            if self.shuffle_seed is not None:
                random.Random(f"buffer/{self.shuffle_seed}/{epoch}/{number}").shuffle(tasks)
            self._held = ((epoch, number), tasks)
        return self._held[1]

    def _read(self, block: int) -> list[Task]:
        name, rows = self.blocks.name, self.blocks.read(block)
        if len(rows) < self.blocks.sizes[block]:
            raise DataError(f"{name} has become shorter while it was read; leave a data file alone during a run")
        return [row_to_task(row, where=f"{name}:{n}", default_id=str(n), needs=self.needs) for n, row in rows]


def block_rows(buffer: int) -> int:
    """Rows of a block, for a buffer of several."""
    if buffer < 1:
        raise ConfigError(f"data.buffer is {buffer}: at least one row is held; 10000 is usual")
    return max(1, buffer // BLOCKS_PER_BUFFER)


@SOURCES.register("stream")
def stream(
    path: str | None = None,
    split: str = "train",
    seed: int = 0,
    buffer: int = 10_000,
    shuffle: bool | None = None,
    hub: str | None = None,
    subset: str | None = None,
    needs: Needs = NOTHING,
) -> StreamSource:
    """Data larger than memory, with a shuffle buffer of ``buffer`` rows; fields as for ``jsonl``.

    path: a JSONL or Parquet file, or a directory with one per split, or with Parquet shards of it. hub: a data set on
    the Hub instead, with its ``subset``, kept on disk by its own library.
    """
    if (path is None) == (hub is None):
        raise ConfigError("data source 'stream' reads files or the Hub: give either data.path or data.hub")
    seed_of_order = seed if (split == "train" if shuffle is None else shuffle) else None
    data: str | Blocks = str(path)
    if hub is not None:
        data = MappedBlocks(hub_rows(hub, subset, split, "or give data.path"), hub, block_rows(buffer))
    return StreamSource(data, split=split, shuffle_seed=seed_of_order, buffer=buffer, needs=needs)
