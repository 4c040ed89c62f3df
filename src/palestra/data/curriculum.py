# SPDX-License-Identifier: Apache-2.0
"""Easy tasks first: by a column of the data, or by how often a model passed them.

A curriculum is a function of the cursor alone, like every source: a killed run goes on with the task it would have had.
With gates the cursor also says how many were passed.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from palestra.data.source import NOTHING, SOURCES, Cursor, Needs, make_source
from palestra.errors import ConfigError, DataError
from palestra.run.files import read_json, write_text
from palestra.types import Group, Task

FORMAT = 1


@dataclass(frozen=True, slots=True)
class CurriculumSource:
    """Stages with growing pools of tasks, each lasting ``stage_tasks`` tasks; the last one has all, and no end.

    pools: the tasks of each stage. Inside a stage its pool is gone through in shuffled rounds, so that no task
    comes twice before all came once. gate: a stage then lasts until the step that draws its next ``stage_tasks``-th
    task solves at least this share of its tasks, and begins in the middle of a round.

    >>> easy, hard = Task("easy", "1+1?"), Task("hard", "17*23?")
    >>> source = CurriculumSource(((easy,), (easy, hard)), stage_tasks=2)
    >>> tasks, cursor = source.take(Cursor(), 4)
    >>> [t.id for t in tasks[:2]], sorted(t.id for t in tasks[2:]), cursor
    (['easy', 'easy'], ['easy', 'hard'], Cursor(epoch=0, position=4, stage=0))
    """

    pools: tuple[tuple[Task, ...], ...]
    stage_tasks: int
    seed: int = 0
    gate: float | None = None

    @property
    def size(self) -> int:
        return len(self.pools[-1])

    def take(self, cursor: Cursor, n: int) -> tuple[list[Task], Cursor]:
        """The next ``n`` tasks and the cursor behind them."""
        taken: list[Task] = []
        position, end = cursor.position, cursor.position + n
        while position < end:
            gated = self.gate is not None
            stage = min(cursor.stage if gated else position // self.stage_tasks, len(self.pools) - 1)
            pool = self.pools[stage]
            turn, at = divmod(position if gated else position - stage * self.stage_tasks, len(pool))
            order = list(range(len(pool)))
            random.Random(f"curriculum/{self.seed}/{stage}/{turn}").shuffle(order)
            left = end - position
            if stage < len(self.pools) - 1 and not gated:
                left = min(left, (stage + 1) * self.stage_tasks - position)
            part = order[at : at + left]
            taken += [pool[i] for i in part]
            position += len(part)
        return taken, Cursor(cursor.epoch, position, cursor.stage)

    def heard(self, before: Cursor, after: Cursor, passed: float | None) -> Cursor:
        """The cursor behind a step, one stage further where its gate was reached and passed.

        >>> source = CurriculumSource(((Task("easy", "?"),), (Task("hard", "?"),)), stage_tasks=10, gate=0.8)
        >>> [source.heard(Cursor(0, 8), Cursor(0, end), share).stage for end, share in ((9, 1.0), (12, 0.7), (12, 0.8))]
        [0, 0, 1]
        """
        reached = after.position // self.stage_tasks > before.position // self.stage_tasks
        if self.gate is None or passed is None or passed < self.gate or not reached:
            return after
        return replace(after, stage=min(after.stage + 1, len(self.pools) - 1))


def staged(
    tasks: Sequence[Task], difficulty: Sequence[float], *, stages: int = 4, limits: Sequence[float] | None = None
) -> tuple[tuple[Task, ...], ...]:
    """The pools of a curriculum, each holding the one before.

    limits: the highest difficulty of each stage but the last; without them ``stages`` pools hold equal shares more,
    and tasks that are equally hard come into the same pool.

    >>> tasks = [Task(str(i), "?") for i in range(4)]
    >>> [[t.id for t in pool] for pool in staged(tasks, [1, 5, 2, 3], limits=[2, 4])]
    [['0', '2'], ['0', '2', '3'], ['0', '1', '2', '3']]
    >>> [len(pool) for pool in staged(tasks, [1, 5, 2, 3], stages=2)]
    [2, 4]
    """
    ranked = sorted(difficulty)
    if limits is None:
        limits = [ranked[math.ceil(len(ranked) * (s + 1) / stages) - 1] for s in range(stages - 1)]
    bounds = [*limits, math.inf]
    pools = [tuple(t for t, d in zip(tasks, difficulty, strict=True) if d <= bound) for bound in bounds]
    if not pools[0]:
        raise DataError(f"no task is as easy as {bounds[0]:g}, the first limit: the easiest has {ranked[0]:g}")
    return tuple(pools)


def pass_rates(groups: Iterable[Group], part: str = "accuracy", passed: float = 1.0) -> dict[str, float]:
    """How often each task was passed, by its id: the share of its episodes in which ``part`` reached ``passed``.

    Episodes without a value of that part do not count; a task that has only such ones is left out.
    """
    counts: dict[str, list[bool]] = {}
    for group in groups:
        for episode in group.episodes:
            terms = episode.trajectories[-1].rewards if episode.error is None and episode.trajectories else {}
            value = terms[part].value if part in terms else None
            if value is not None:
                counts.setdefault(group.task.id, []).append(value >= passed)
    return {task: sum(passes) / len(passes) for task, passes in counts.items()}


def write_pass_rates(path: str | os.PathLike[str], rates: Mapping[str, float], part: str) -> None:
    """Pass rates as the JSON that ``data.pass_rates`` reads."""
    write_text(Path(path), json.dumps({"format": FORMAT, "part": part, "pass_rates": dict(rates)}))


def read_pass_rates(path: str | os.PathLike[str]) -> dict[str, float]:
    """The inverse of :func:`write_pass_rates`."""
    found = read_json(path, "write pass rates with `palestra data difficulty`", error=DataError)
    if found.get("format") != FORMAT or "pass_rates" not in found:
        raise DataError(f"{path}: no pass rates of format {FORMAT}; write it with `palestra data difficulty`")
    return {str(task): float(rate) for task, rate in found["pass_rates"].items()}


@SOURCES.register("curriculum")
def curriculum(
    source: str | Mapping[str, Any],
    split: str = "train",
    seed: int = 0,
    by: str = "steps",
    stages: int = 4,
    limits: Sequence[float] | None = None,
    stage_tasks: int = 1000,
    pass_rates: str | None = None,
    min_pass_rate: float = 0.0,
    max_pass_rate: float = 1.0,
    gate: float | None = None,
    count: int | None = None,
    needs: Needs = NOTHING,
) -> CurriculumSource:
    """The tasks of another source, easy ones first.

    source: its name, or a mapping with its options. by: the column that says how hard a task is (``steps``,
    ``level`` …), or ``pass_rate``. pass_rates: a file of ``palestra data difficulty``; tasks outside
    ``min_pass_rate`` … ``max_pass_rate`` are left out (those never measured stay; as hard as the middle one).
    limits, stages: see :func:`staged`. stage_tasks: tasks before the next stage begins. gate: the share of a step's
    episodes, 0 to 1, that must have solved their task for that; asked again after ``stage_tasks`` more. count: how many
    tasks to take of a source without end. Other splits than train have no stages.
    """
    options = {"name": source} if isinstance(source, str) else {str(key): value for key, value in source.items()}
    if fixed := {"split", "seed"} & {*options}:
        raise ConfigError(f"data.source: {min(fixed)} is that of data itself: leave it out there")
    inner = make_source(str(options.pop("name", "")), needs, split=split, seed=seed, **options)
    if (size := count or inner.size) is None:
        raise ConfigError(
            f"data.source {source!r} has no end: say how many of its tasks the curriculum has, data.count"
        )
    for name, value, least in (("stages", stages, 1), ("stage_tasks", stage_tasks, 1)):
        if value < least:
            raise ConfigError(f"data.{name} is {value}: at least {least}")
    if gate is not None and not 0 < gate <= 1:
        raise ConfigError(f"data.gate is {gate:g}: a share of the episodes, above 0 and at most 1")
    tasks = inner.take(Cursor(), size)[0]
    rates = {} if pass_rates is None else read_pass_rates(pass_rates)
    tasks = [t for t in tasks if min_pass_rate <= rates.get(t.id, min_pass_rate) <= max_pass_rate]
    if not tasks:
        raise DataError(f"no task has a pass rate from {min_pass_rate:g} to {max_pass_rate:g} in {pass_rates}")
    if split != "train":
        return CurriculumSource((tuple(tasks),), 1, seed)
    return CurriculumSource(
        staged(tasks, _difficulty(tasks, by, rates), stages=stages, limits=limits), stage_tasks, seed, gate
    )


def _difficulty(tasks: Sequence[Task], by: str, rates: Mapping[str, float]) -> list[float]:
    if by == "pass_rate":
        known = sorted(rates[t.id] for t in tasks if t.id in rates)
        if not known:
            raise DataError(
                "data.by is pass_rate, and no task of the source has one: check data.pass_rates and the ids"
            )
        middle = known[len(known) // 2]
        return [1.0 - rates.get(t.id, middle) for t in tasks]
    found: list[float] = []
    for task in tasks:
        value = task.meta.get(by)
        if isinstance(value, bool) or not isinstance(value, int | float):
            there = ", ".join(k for k, v in task.meta.items() if isinstance(v, int | float)) or "no number"
            raise DataError(f"task {task.id!r}: column {by!r} holds {value!r}, no difficulty; data.by may be: {there}")
        found.append(float(value))
    return found
