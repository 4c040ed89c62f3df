# SPDX-License-Identifier: Apache-2.0
"""Many episodes at once, and back as groups: bounded, retried, matched by identity."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from palestra.errors import ConfigError, EngineError, UserError
from palestra.rollout.failures import Budget, Failures, Kind, kind_of, reason_of
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
    failures: Failures | None = None,
) -> AsyncGenerator[Group, None]:
    """Run ``group_size`` episodes of every draw and yield each group when it is complete, in order of completion.

    At most ``concurrency`` episodes run at once; draws are taken from the iterable only as room appears. A failed
    episode is tried at most ``retries`` times more, as its kind of failure and the budget of the call allow (see
    ``failures.py``), then kept with its ``error``: its siblings go on. What learning should leave out is marked in
    ``Episode.info``: ``excluded`` (why; on every good episode of a group that has fewer than ``min_group`` of them)
    and ``stale`` (sampled more than ``max_staleness`` versions before ``version()``: it still serves the baseline).
    ``info`` also holds ``staleness``, ``attempts`` and, for a failed one, ``failure`` (its reason, to be counted).

    failures: what failed in a row, to be kept over several calls. Raises RolloutError, with the commonest reason, when
    nothing succeeds any more; EngineError, naming the task, when an episode is out for longer than
    ``stall_timeout_s``. Use it inside
    ``contextlib.aclosing``: when the consumer stops or is cancelled, every running episode is cancelled and
    awaited.
    """
    for name, value, least in (("group_size", group_size, 1), ("concurrency", concurrency, 1), ("retries", retries, 0)):
        if value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}")
    clock = asyncio.get_running_loop().time
    todo = _members(draws, group_size)
    running: dict[asyncio.Task[Episode], _Slot] = {}
    budget, failures = Budget(), failures or Failures()
    ended = _InOrder(failures, clock)
    try:
        while True:
            while len(running) < failures.room(concurrency) and (slot := next(todo, None)) is not None:
                slot.since, slot.number = clock(), ended.begin()
                budget.earn()
                work = _attempts(rollout, slot, retries, budget, failures.pause_s())
                running[asyncio.create_task(work)] = slot
            if not running:
                return
            for task in await _some(running, stall_timeout_s):
                slot = running.pop(task)
                episode = slot.draw.episodes[slot.member] = task.result()
                ended.end(slot.number, episode)
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
    number: int = 0


class _InOrder:
    """Tells how episodes ended in the order they began: quick failures must not pass for a row of failures while
    slow successes are still under way."""

    def __init__(self, failures: Failures, clock: Callable[[], float]) -> None:
        self._failures, self._clock = failures, clock
        self._begun, self._told = 0, 0
        self._ended: dict[int, Episode] = {}

    def begin(self) -> int:
        self._begun += 1
        return self._begun - 1

    def end(self, number: int, episode: Episode) -> None:
        self._ended[number] = episode
        while (earlier := self._ended.pop(self._told, None)) is not None:
            self._told += 1
            self._failures.add(earlier, self._clock())


def _members(draws: Iterable[tuple[int, Task]], group_size: int) -> Iterator[_Slot]:
    for number, task in draws:
        draw = _Draw(number, task)
        for member in range(group_size):
            yield _Slot(draw, member)


async def _attempts(rollout: Rollout, slot: _Slot, retries: int, budget: Budget, pause_s: float) -> Episode:
    """One episode, tried again after a failure that a second try may not meet."""
    if pause_s:
        await asyncio.sleep(pause_s)
    attempt = 1
    while True:
        episode = await _once(rollout, slot)
        kind = kind_of(episode)
        info = {**episode.info, "attempts": attempt} | ({"failure": reason_of(episode)} if kind else {})
        episode = replace(episode, member=slot.member, info=info)
        # A hung step ends its episode with what was played, as TOOL_FAILURE: that is an outcome, not to be repeated.
        again = kind is not None and episode.error is not None and kind is not Kind.PERMANENT
        if kind is None or not again or attempt > retries or not budget.spend():
            return episode
        await asyncio.sleep(kind.wait_s(attempt))
        attempt += 1


async def _once(rollout: Rollout, slot: _Slot) -> Episode:
    task, draw, member = slot.draw.task, slot.draw.number, slot.member
    try:
        episode = await rollout(task, draw, member)
        if not isinstance(episode, Episode):
            raise TypeError(f"returned {type(episode).__name__}, not an Episode")
        return episode
    except UserError:
        raise
    except asyncio.CancelledError:
        waiting = asyncio.current_task()
        if waiting is not None and waiting.cancelling():
            raise
        return Episode(task, error="rollout: CancelledError: something inside the episode cancelled it")
    except Exception as problem:
        return Episode(task, error=f"rollout: {type(problem).__name__}: {' '.join(str(problem).split())}")


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
