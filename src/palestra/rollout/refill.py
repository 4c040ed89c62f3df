# SPDX-License-Identifier: Apache-2.0
"""Which of a step's groups are learned from, and fresh tasks in the place of the others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from palestra.data.source import Cursor, TaskSource
from palestra.learn.advantage import rewards_by_group, same
from palestra.learn.batch import Rows, rows
from palestra.types import Group, Task

Play = Callable[[Sequence[tuple[int, Task]]], Awaitable[Sequence[Group]]]
"""(draw, task) pairs → one scored group each, in any order."""


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """The groups that a step has drawn, in the order of draws. cursor: the place behind the last of them. batches: how
    often tasks were drawn. missing: how many groups worth learning from are still wanted."""

    groups: tuple[Group, ...]
    cursor: Cursor
    batches: int
    missing: int

    def metrics(self) -> dict[str, float]:
        """Under the names of :mod:`palestra.run.metrics`."""
        return {"rollout/gen_batches": float(self.batches), "rollout/groups_missing": float(self.missing)}


async def fill(
    source: TaskSource,
    cursor: Cursor,
    wanted: int,
    play: Play,
    *,
    useful: Callable[[Group], bool],
    max_batches: int = 1,
) -> Filled:
    """Draw ``wanted`` tasks, then fresh ones in the place of those whose groups are not ``useful``, until there are
    enough or tasks were drawn ``max_batches`` times (the refill of dynamic sampling, DAPO, arXiv:2503.14476, section
    3.2). What is missing then stays missing.

    A batch is played to its end before the next is drawn, so what is drawn follows from the rewards alone and not from
    who was done first: a run repeats. A draw is numbered by its place in the source, so no number comes twice.

    >>> import asyncio
    >>> from palestra.data.source import GeneratedSource
    >>> async def play(draws): return [Group(task, draw, ()) for draw, task in draws]
    >>> source = GeneratedSource(lambda i: Task(f"t{i}", "?"))
    >>> odd = lambda group: group.draw % 2 == 1
    >>> filled = asyncio.run(fill(source, Cursor(), 4, play, useful=odd, max_batches=2))
    >>> len(filled.groups), filled.batches, filled.missing, filled.cursor
    (6, 2, 1, Cursor(epoch=0, position=6, stage=0))
    """
    groups: list[Group] = []
    batches, missing = 0, wanted
    while missing and batches < max_batches:
        first = handed_out(source, cursor)
        tasks, cursor = source.take(cursor, missing)
        played = sorted(await play(list(enumerate(tasks, start=first))), key=lambda g: g.draw)
        groups += played
        missing -= sum(map(useful, played))
        batches += 1
    return Filled(tuple(groups), cursor, batches, missing)


def handed_out(source: TaskSource, cursor: Cursor) -> int:
    """How many tasks the source had handed out at a cursor: the number of the next draw.

    >>> from palestra.data.source import ListSource
    >>> handed_out(ListSource((Task("a", "?"), Task("b", "?"), Task("c", "?"))), Cursor(epoch=2, position=1))
    7
    """
    return cursor.position + cursor.epoch * (source.size or 0)


def select(
    groups: Iterable[Group],
    *,
    min_group: int = 2,
    unscored: bool = False,
    dynamic_sampling: bool = False,
    mask_truncated: bool = False,
) -> Rows:
    """The rows to learn from. min_group, unscored: as in :func:`~palestra.learn.batch.rows`.

    dynamic_sampling: groups whose rewards are all the same are left out, and counted as ``groups_equal``: their tokens
    carry no advantage and must not count in the loss's divisor (DAPO, arXiv:2503.14476, eq. 11). mask_truncated:
    episodes that a limit ended serve the baseline and have no gradient (overlong filtering, section 3.4 there).
    """
    made = rows(groups, min_group=min_group, unscored=unscored)
    if dynamic_sampling:
        equal = {group for group, rewards in rewards_by_group(made).items() if same(rewards.values())}
        left = tuple(s for s in made.samples if s.group not in equal)
        made = made.with_(samples=left, counts=made.counts | {"groups_equal": len(equal)})
    if mask_truncated:
        samples = tuple(replace(s, trained=s.trained and not s.truncated) for s in made.samples)
        made = made.with_(samples=samples)
    return made
