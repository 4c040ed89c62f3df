# SPDX-License-Identifier: Apache-2.0
"""A step's groups: played, scored, refilled where the config says so, and the rows that are learned from."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np

from palestra.data.source import Cursor, Gated
from palestra.engine.base import Engine
from palestra.engine.local import LocalEngine
from palestra.learn.batch import Rows
from palestra.learn.robust import TrainingError
from palestra.reward.rubric import REWARD_ERRORS
from palestra.reward.trl import TrainerState
from palestra.rollout.collect import collect
from palestra.rollout.dump import from_line, to_line
from palestra.rollout.failures import Failures
from palestra.rollout.refill import Filled, fill, select
from palestra.train.config import AlgorithmConfig, RLConfig
from palestra.train.metrics import rollout_timings, success_rate, timed
from palestra.train.setup import World
from palestra.types import Episode, Group, Task


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """What a step learns from. groups: scored, in the order of their draws. cursor: where the tasks of the next step
    begin. metrics, timings: of the drawing, under the names of :mod:`palestra.run.metrics`. remembered: what the
    rewards remember once they have scored it."""

    groups: tuple[Group, ...]
    cursor: Cursor
    metrics: Mapping[str, float]
    timings: Mapping[str, float]
    remembered: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint: plain values, and what the rewards keep."""
        return {
            "groups": [to_line(group) for group in self.groups],
            "cursor": self.cursor.to_dict(),
            "metrics": dict(self.metrics),
            "timings": dict(self.timings),
            "remembered": dict(self.remembered),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Collected:
        """The inverse of :meth:`to_dict`."""
        groups = tuple(from_line(line, "groups collected ahead") for line in data["groups"])
        rest = (data[name] for name in ("metrics", "timings", "remembered"))
        return cls(groups, Cursor.from_dict(data["cursor"]), *rest)


async def collect_step(
    config: RLConfig,
    world: World,
    sampler: Engine,
    engine: LocalEngine,
    step: int,
    cursor: Cursor,
    failures: Failures,
) -> Collected:
    """The batch of step ``step``, whose tasks begin at ``cursor``. sampler: what episodes sample from; engine: what is
    behind it. failures: those in a row, kept from step to step."""
    world.journal.at("rl", step)
    timings: dict[str, float] = {}
    engine.take_stats()  # what came before is not this step's
    loop_began = time.thread_time()
    filled = await draw_groups(config, world, sampler, step, cursor, failures=failures, timings=timings)
    loop_s = time.thread_time() - loop_began - timings["time/reward_s"]
    timings |= rollout_timings(engine.take_stats(), timings["time/rollout_s"], loop_s=loop_s)
    following, metrics = filled.cursor, filled.metrics()
    if isinstance(world.tasks, Gated) and world.tasks.gate is not None:
        following = world.tasks.heard(cursor, following, success_rate(filled.groups, config.eval.metric))
        metrics |= {"rollout/stage": float(cursor.stage)}
    return Collected(filled.groups, following, metrics, timings, world.remembered())


async def draw_groups(
    config: RLConfig,
    world: World,
    engine: Engine,
    step: int,
    cursor: Cursor,
    *,
    failures: Failures,
    timings: dict[str, float],
) -> Filled:
    """The groups that step ``step`` draws from ``cursor`` on, scored, in the order of their draws. The weights that
    learn from them are of version ``step``: that is what staleness is counted from."""
    rollout = world.rollout(engine, config.sampling, purpose="train")
    state = TrainerState(step, config.train.steps, float(cursor.epoch))

    async def play(draws: Sequence[tuple[int, Task]]) -> list[Group]:
        groups = collect(
            draws,
            rollout,
            group_size=config.algorithm.group_size,
            concurrency=config.train.concurrency,
            retries=config.train.retries,
            min_group=config.algorithm.min_group,
            max_staleness=config.train.max_staleness,
            version=lambda: step,
            failures=failures,
        )
        with timed(timings, "time/rollout_s"):
            async with aclosing(groups):
                done = [group async for group in groups]
        # Groups come back as they finish; they are scored in the order of their draws, so that runs repeat.
        with timed(timings, "time/reward_s"):
            return [await world.rubric.score(group, state) for group in sorted(done, key=lambda g: g.draw)]

    return await fill(
        world.tasks,
        cursor,
        config.train.tasks_per_step,
        play,
        useful=lambda group: any(s.trained_tokens for s in learnable([group], config.algorithm).samples),
        max_batches=config.algorithm.max_gen_batches,
    )


def learnable(groups: Sequence[Group], algorithm: AlgorithmConfig) -> Rows:
    """What of these groups is learned from."""
    return select(
        groups,
        min_group=algorithm.min_group,
        unscored=algorithm.unscored,
        dynamic_sampling=algorithm.dynamic_sampling,
        mask_truncated=algorithm.mask_truncated,
    )


class RewardErrors:
    """What reward functions raise: told once for each message (numbers in it aside), and the end of a run in which
    nothing is scored for it.

    tell: hears of it. limit: so many steps in a row of which no group was left to learn from, because rewards failed.

    >>> failed = Episode(Task("t", "?"), info={REWARD_ERRORS: {"judge": "TimeoutError: no reply within 3 s"}})
    >>> heard = RewardErrors(print)
    >>> heard.tell([Group(failed.task, 0, (failed, failed))], "step 1")
    reward 'judge' failed in 2 episodes of step 1, which it does not score: TimeoutError: no reply within 3 s
    >>> heard.tell([Group(failed.task, 1, (failed, failed))], "step 2")
    """

    MESSAGES = 5
    """So many different messages of one reward are told. Those behind them are only counted."""

    def __init__(self, tell: Callable[[str], None], limit: int = 3) -> None:
        self._say, self._limit = tell, limit
        self._told: dict[str, set[str]] = {}
        self._in_a_row, self._last, self._none_told, self._equal_told = 0, "", False, False

    def tell(self, groups: Iterable[Group], where: str) -> None:
        """Say what is new. where: which episodes these are."""
        times: Counter[tuple[str, str]] = Counter()
        first: dict[tuple[str, str], str] = {}
        for name, line in (raised for g in groups for e in g.episodes for raised in _raised(e)):
            message = (name, re.sub(r"\d+", "0", line))
            times[message] += 1
            first.setdefault(message, line)
        for (name, kind), n in times.items():
            told = self._told.setdefault(name, set())
            if kind in told or len(told) == self.MESSAGES:
                continue
            told.add(kind)
            episodes = f"{n} episode{'s' if n > 1 else ''} of {where}"
            more = "; further messages are not shown" if len(told) == self.MESSAGES else ""
            self._say(f"reward {name!r} failed in {episodes}, which it does not score: {first[name, kind]}{more}")

    def hear(self, step: int, groups: Sequence[Group], rows: Rows) -> None:
        """A step's scored groups, and what was learned from them."""
        self.tell(groups, f"step {step}")
        every = [e for g in groups for e in g.episodes]
        unscored = [e for e in every if e.error is None and e.reward is None]
        failed = [e for e in unscored if _raised(e)]
        nothing = bool(groups) and rows.counts.get("groups_dropped", 0) == len(groups)
        if not nothing or 2 * len(failed) < len(every):  # whatever else is missing, it is not for the rewards
            self._in_a_row = 0
        else:
            self._in_a_row += 1
            (name, line), _ = Counter(raised for e in failed for raised in _raised(e)).most_common(1)[0]
            self._last = f"reward {name!r} failed in {len(failed)} of the {len(every)} episodes of step {step}: {line}"
        if nothing and not failed and 2 * len(unscored) >= len(every) and not self._none_told:
            self._none_told = True
            self._say(f"nothing is learned from step {step}: every reward is None in {len(unscored)} of its episodes")
        if (
            rows.samples
            and rows.advantages is not None
            and not self._equal_told
            and not any(map(np.any, rows.advantages))
        ):
            self._equal_told = True
            rewards = {s.reward for s in rows.samples}
            same = f"always {min(rewards):g}" if len(rewards) == 1 else "the same for all members of each group"
            self._say(
                f"every advantage of step {step} is 0, for the reward is {same}: there is nothing in it to learn from; "
                "said once, and an alarm follows where it goes on"
            )

    def check(self) -> None:
        """Raises TrainingError where there was nothing to learn from for ``limit`` steps in a row."""
        if self._in_a_row >= self._limit:
            steps = f"{self._in_a_row} steps in a row"
            raise TrainingError(f"{self._last}; nothing was scored and learned in {steps}: mend it, then --resume")


def _raised(episode: Episode) -> list[tuple[str, str]]:
    """(reward function, what it raised) of an episode."""
    return list(episode.info.get(REWARD_ERRORS, {}).items())
