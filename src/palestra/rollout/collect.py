# SPDX-License-Identifier: Apache-2.0
"""Many episodes at once, and back as groups: bounded, retried, matched by identity."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from palestra.errors import ConfigError, EngineError, UserError
from palestra.types import Episode, Group, Task

Rollout = Callable[[Task, int, int], Awaitable[Episode]]
"""(task, draw, member) → Episode."""


async def collect(
    draws: Iterable[tuple[int, Task]],
    rollout: Rollout,
    *,
    group_size: int,
    concurrency: int = 64,
    retries: int = 1,
    min_group: int = 2,
    max_staleness: int = 0,
    version: Callable[[], int] = lambda: 0,
    stall_timeout_s: float | None = None,
) -> AsyncGenerator[Group, None]:
    """Run ``group_size`` episodes of every draw and yield each group when it is complete, in order of completion.

    At most ``concurrency`` episodes run at once; draws are taken from the iterable only as room appears. A failed
    episode is tried ``retries`` times more, then kept with its ``error``: its siblings go on. What learning should
    leave out is marked in ``Episode.info``: ``excluded`` (why; on every good episode of a group that has fewer than
    ``min_group`` of them) and ``stale`` (sampled more than ``max_staleness`` versions before ``version()``: it
    still serves the baseline). ``info`` also holds ``staleness`` and ``attempts``.

    Raises EngineError, naming the task, when an episode is out for longer than ``stall_timeout_s``. Use it inside
    ``contextlib.aclosing``: when the consumer stops or is cancelled, every running episode is cancelled and
    awaited.
    """
    for name, value, least in (("group_size", group_size, 1), ("concurrency", concurrency, 1), ("retries", retries, 0)):
        if value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}")
    clock = asyncio.get_running_loop().time
    todo = _members(draws, group_size)
    running: dict[asyncio.Task[Episode], _Slot] = {}
    try:
        while True:
            while len(running) < concurrency and (slot := next(todo, None)) is not None:
                slot.since = clock()
                running[asyncio.create_task(_attempts(rollout, slot, retries))] = slot
            if not running:
                return
            for task in await _some(running, stall_timeout_s):
                slot = running.pop(task)
                slot.draw.episodes[slot.member] = task.result()
                if len(slot.draw.episodes) == group_size:
                    group = _finish(slot.draw, min_group, max_staleness, version())
                    left = clock()
                    yield group
                    pause = clock() - left
                    for other in running.values():  # the consumer's time is no stall of theirs
                        other.since += pause
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@dataclass
class _Draw:
    number: int
    task: Task
    episodes: dict[int, Episode] = field(default_factory=dict)


@dataclass
class _Slot:
    """One episode to be run: whose it is, and since when it is out."""

    draw: _Draw
    member: int
    since: float = 0.0


def _members(draws: Iterable[tuple[int, Task]], group_size: int) -> Iterator[_Slot]:
    for number, task in draws:
        draw = _Draw(number, task)
        for member in range(group_size):
            yield _Slot(draw, member)


async def _attempts(rollout: Rollout, slot: _Slot, retries: int) -> Episode:
    """One episode, tried again after a failure that a second try may not meet."""
    task, draw, member = slot.draw.task, slot.draw.number, slot.member
    for attempt in range(1, retries + 2):
        try:
            episode = await rollout(task, draw, member)
        except UserError:
            raise
        except Exception as problem:
            episode = Episode(task, error=f"rollout: {type(problem).__name__}: {' '.join(str(problem).split())}")
        episode = replace(episode, member=member, info={**episode.info, "attempts": attempt})
        if episode.error is None or episode.info.get("permanent"):
            break
    return episode


async def _some(
    running: dict[asyncio.Task[Episode], _Slot], stall_timeout_s: float | None
) -> list[asyncio.Task[Episode]]:
    """Wait until at least one is done. Tasks started first are listed first, so that equal runs go alike."""
    while True:
        timeout = None
        if stall_timeout_s is not None:
            now = asyncio.get_running_loop().time()
            timeout = max(min(s.since for s in running.values()) + stall_timeout_s - now, 0.0)
        done, waiting = await asyncio.wait(running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if stall_timeout_s is not None:
            now = asyncio.get_running_loop().time()
            lost = [running[t].draw.task.id for t in waiting if now - running[t].since >= stall_timeout_s]
            if lost:
                names = ", ".join(repr(name) for name in sorted(set(lost)))
                raise EngineError(f"no end of the episode of task {names} after {stall_timeout_s:g} s; it is lost")
        if done:
            return [task for task in running if task in done]


def _finish(draw: _Draw, min_group: int, max_staleness: int, now: int) -> Group:
    """The complete group, with what learning should leave out marked."""
    good = sum(e.error is None for e in draw.episodes.values())
    episodes = []
    for _, episode in sorted(draw.episodes.items()):
        info = dict(episode.info)
        sampled = _oldest_version(episode)
        if sampled is not None:
            info["staleness"] = now - sampled
            info["stale"] = now - sampled > max_staleness
        if episode.error is None and good < min_group:
            info["excluded"] = f"{good} of {len(draw.episodes)} episodes are good; min_group is {min_group}"
        episodes.append(replace(episode, info=info))
    return Group(draw.task, draw.number, tuple(episodes))


def _oldest_version(episode: Episode) -> int | None:
    versions = [s.version for t in episode.trajectories for s in t.spans if s.version is not None]
    return min(versions, default=None)
