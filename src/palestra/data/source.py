# SPDX-License-Identifier: Apache-2.0
"""Where tasks come from: a source hands out tasks after a cursor, and the cursor lives in the checkpoint.

A source holds no position of its own, so a killed run continues with the next task by loading three integers.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from palestra.errors import DataError, unknown
from palestra.registry import Registry, check_options
from palestra.types import Task


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in a source: ``position`` tasks of epoch ``epoch`` were already handed out. stage: how many gates of a
    curriculum were passed.

    >>> Cursor.from_dict(Cursor(2, 30).to_dict())
    Cursor(epoch=2, position=30, stage=0)
    """

    epoch: int = 0
    position: int = 0
    stage: int = 0

    def to_dict(self) -> dict[str, int]:
        """Three integers, as written into checkpoints."""
        return {"epoch": self.epoch, "position": self.position, "stage": self.stage}

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> Cursor:
        """The inverse of :meth:`to_dict`."""
        return cls(int(data["epoch"]), int(data["position"]), int(data.get("stage", 0)))


class TaskSource(Protocol):
    """Tasks in an order that depends on nothing but the cursor. ``size`` is None when there is no end."""

    @property
    def size(self) -> int | None: ...

    def take(self, cursor: Cursor, n: int) -> tuple[list[Task], Cursor]:
        """The next ``n`` tasks and the cursor behind them; always exactly ``n``."""
        ...


@runtime_checkable
class Gated(Protocol):
    """A source that is told how its tasks went, and decides by that what comes next; with a ``gate`` of None it does
    not care."""

    @property
    def gate(self) -> float | None: ...

    def heard(self, before: Cursor, after: Cursor, passed: float | None) -> Cursor:
        """Where the next step's tasks begin. before, after: the places before and behind this step's; passed: the
        share of its scored episodes that solved their task, None where none was scored."""
        ...


@dataclass(frozen=True, slots=True)
class ListSource:
    """A finite list, in its own order, or reshuffled in each epoch when ``shuffle_seed`` is given.

    The order of an epoch follows from (seed, epoch) alone; a take may run over the end of an epoch, and
    within one epoch no task is skipped or handed out twice.

    >>> source = ListSource(tuple(Task(str(i), "?") for i in range(3)))
    >>> tasks, cursor = source.take(Cursor(), 4)
    >>> [t.id for t in tasks], cursor
    (['0', '1', '2', '0'], Cursor(epoch=1, position=1, stage=0))
    """

    tasks: Sequence[Task]
    shuffle_seed: int | None = None

    def __post_init__(self) -> None:
        if not self.tasks:
            raise DataError("the data set is empty: no task can be drawn from it; give a file with at least one row")

    @property
    def size(self) -> int:
        return len(self.tasks)

    def take(self, cursor: Cursor, n: int) -> tuple[list[Task], Cursor]:
        """The next ``n`` tasks and the cursor behind them."""
        taken: list[Task] = []
        epoch, position = cursor.epoch, cursor.position
        while len(taken) < n:
            if position >= self.size:
                epoch, position = epoch + 1, 0
            order = self._order(epoch)
            part = order[position : position + n - len(taken)]
            taken.extend(self.tasks[i] for i in part)
            position += len(part)
        return taken, Cursor(epoch, position)

    def _order(self, epoch: int) -> Sequence[int]:
        if self.shuffle_seed is None:
            return range(self.size)
        order = list(range(self.size))
        # A string seed goes through SHA-512, so neighbouring seeds and epochs give unrelated orders.
        random.Random(f"order/{self.shuffle_seed}/{epoch}").shuffle(order)
        return order


@dataclass(frozen=True, slots=True)
class GeneratedSource:
    """Tasks without end, made from their index; the cursor's position is the index and the epoch stays 0.

    >>> source = GeneratedSource(lambda i: Task(f"t{i}", f"{i}+1=", i + 1))
    >>> tasks, cursor = source.take(Cursor(0, 5), 2)
    >>> [t.id for t in tasks], cursor
    (['t5', 't6'], Cursor(epoch=0, position=7, stage=0))
    """

    make: Callable[[int], Task]

    @property
    def size(self) -> None:
        return None

    def take(self, cursor: Cursor, n: int) -> tuple[list[Task], Cursor]:
        """The next ``n`` tasks and the cursor behind them."""
        check_count(n)
        end = cursor.position + n
        return [self.make(i) for i in range(cursor.position, end)], Cursor(cursor.epoch, end)


Needs = Mapping[str, str]
"""Fields that a task must have, each with who reads it: ``{"answer": "reward 'accuracy'"}``. ``answer`` is the gold
answer, under whatever name a row has it."""
NOTHING: Needs = {}

SourceFactory = Callable[..., TaskSource]
SOURCES: Registry[SourceFactory] = Registry("data source")
"""Sources by name. A factory takes ``split`` and ``seed`` and the further options of ``data:`` as keywords. One that
reads rows also takes ``needs`` (:data:`Needs`), and names the row that lacks a field; it is no option."""


def make_source(
    name: str, needs: Needs = NOTHING, /, *, split: str = "train", seed: int = 0, **options: Any
) -> TaskSource:
    """The registered source ``name``; an option that it does not read is refused with the nearest right one.

    needs: the fields that its tasks must have; DataError for one that lacks them, with file and line where it is a row.

    >>> make_source("arithmetic", split="test", seed=1).take(Cursor(), 1)[0][0].id
    'arithmetic/test/1/0'
    """
    factory = SOURCES[name]
    check_options(f"data source {name!r}", factory, {"split": split, **options}, ("seed", "needs"))
    told = {"needs": needs} if "needs" in inspect.signature(factory).parameters else {}
    source = factory(split=split, seed=seed, **options, **told)
    check_source(source, needs, str(options.get("path", f"data source {name!r}")))
    return source


def check_fields(task: Task, needs: Needs, where: str, *, answered: bool, there: str = "") -> None:
    """DataError, with the place, for a task without a field that is needed. answered: it has an answer, if only null.
    there: the fields of its row, in words.

    >>> check_fields(Task("1", "2+2?", None, {"level": 3}), {"hint": "reward 'my:f'"}, "a.jsonl:1", answered=False)
    Traceback (most recent call last):
    palestra.errors.DataError: a.jsonl:1: no field 'hint', which reward 'my:f' reads; there is: prompt, level; add ...
    """
    for field, reader in needs.items():
        if field in task.meta or (field == "answer" and answered):
            continue
        names = "'answer' or 'ground_truth'" if field == "answer" else repr(field)
        there = there or ", ".join(["prompt", *(["answer"] if answered else []), *map(str, task.meta)])
        raise DataError(
            f"{where}: no field {names}, which {reader} reads; there is: {there}; add it, or leave that reward out"
        )


LOOKED_AT, ENDLESS_LOOKED_AT = 10_000, 100
"""Most tasks among which an answer is looked for, and how many of a source without an end."""


def check_source(source: TaskSource, needs: Needs, where: str) -> None:
    """DataError for a source whose first task lacks a field that is needed, or none of whose tasks has an answer where
    one is needed. A single task may have none: rewards abstain."""
    if not needs:
        return
    first = source.take(Cursor(), 1)[0][0]
    check_fields(first, needs, f"{where}: task {first.id!r}", answered=True)
    if "answer" in needs and first.answer is None:
        looked_at = min(source.size or ENDLESS_LOOKED_AT, LOOKED_AT)
        if all(task.answer is None for task in source.take(Cursor(), looked_at)[0]):
            raise DataError(
                f"{where}: none of {looked_at:,} tasks has an answer (field 'answer' or 'ground_truth'), which "
                f"{needs['answer']} reads; give answers, or leave that reward out"
            )


MAX_COUNT = 10_000_000
"""Most tasks that are made at once: more would fill memory before anything is learned from them."""


def check_count(count: int) -> None:
    """Refuses to make more tasks than memory holds."""
    if count > MAX_COUNT:
        raise DataError(f"{count:,} tasks at once do not fit into memory: ask for at most {MAX_COUNT:,}")


def check_split(split: str, known: Sequence[str] = ("train", "test")) -> None:
    """Refuses a split that the source does not have."""
    if split not in known:
        raise DataError(unknown("split", split, known))
