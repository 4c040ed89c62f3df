# SPDX-License-Identifier: Apache-2.0
"""How good is this policy on these tasks: the same episodes as in training, counted instead of learned from."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from palestra.errors import ConfigError, DataError
from palestra.eval.metrics import mean, normal_interval, std_error, wilson_interval
from palestra.rollout.collect import Rollout, collect
from palestra.types import Episode, Group, Task


class Scorer(Protocol):
    """What evaluation needs of a rubric."""

    async def score(self, group: Group) -> Group: ...


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What was measured. Means are over examples; None = nothing to measure it on.

    metric: name of the reward part reported as ``accuracy``: the mean over tasks of each one's mean over its samples.
    examples: tasks played. samples: episodes of each. scored: tasks with a value of the metric. errors: episodes that
    an infrastructure failure ended, in no other number. std_error, ci95: of the accuracy, normal approximation over
    tasks (samples of one task are not independent of each other); wilson95: of a share, None unless every value lies
    in [0, 1]; with several samples it is on the safe side. rewards: mean of each part over episodes, unweighted.
    format_rate: the part whose name holds "format". *_mean: per episode. stops: share of each stop reason.
    truncated_share: episodes cut by a limit. groups: one per task in the order of the tasks, each with its episodes,
    scored; not part of :meth:`to_dict`.
    """

    metric: str
    examples: int
    samples: int
    scored: int
    errors: int
    accuracy: float | None
    std_error: float | None
    ci95: tuple[float, float] | None
    wilson95: tuple[float, float] | None
    rewards: Mapping[str, float]
    format_rate: float | None
    sampled_tokens_mean: float | None
    turns_mean: float | None
    tool_calls_mean: float | None
    truncated_share: float | None
    stops: Mapping[str, float]
    seconds: float
    groups: tuple[Group, ...] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "groups"}
        return {
            k: list(v) if isinstance(v, tuple) else dict(v) if isinstance(v, Mapping) else v for k, v in plain.items()
        }


def demand_scores(result: EvalResult, what: str) -> None:
    """Raises DataError, with the reason where there is one, when not a single task got a value of the metric."""
    if result.scored:
        return
    failed = next((e.error for g in result.groups for e in g.episodes if e.error is not None), None)
    why = failed or f"the reward {result.metric!r} had no value; has every task an answer?"
    raise DataError(f"{what}: none of {result.examples} held-out tasks could be scored: {why}")


async def evaluate(
    tasks: Sequence[Task],
    rollout: Rollout,
    rubric: Scorer,
    *,
    metric: str = "accuracy",
    samples: int = 1,
    concurrency: int = 64,
    retries: int = 1,
    on_group: Callable[[Group], None] | None = None,
) -> EvalResult:
    """Play every task ``samples`` times and score it.

    ``rollout`` is called as ``collect`` calls it in training, with the task's position as draw; let it pass
    ``purpose="eval"`` to ``run_episode``, and evaluation draws no randomness that training would have drawn.
    on_group: told of each scored group as it is done. Raises DataError for no tasks, ConfigError when no reward part
    is called ``metric``.
    """
    if not tasks:
        raise DataError("there is no task to evaluate on")
    begin = time.perf_counter()
    groups: dict[int, Group] = {}
    played = collect(
        enumerate(tasks), rollout, group_size=samples, concurrency=concurrency, retries=retries, min_group=1
    )
    async with contextlib.aclosing(played):
        async for group in played:
            groups[group.draw] = scored = await rubric.score(group)
            if on_group is not None:
                on_group(scored)
    ordered = tuple(groups[draw] for draw in sorted(groups))
    return result_of(ordered, metric, seconds=time.perf_counter() - begin, samples=samples)


def result_of(groups: Sequence[Group], metric: str, *, seconds: float, samples: int = 1) -> EvalResult:
    """The numbers of groups that are played and scored."""
    episodes = [e for g in groups for e in g.episodes]
    good = [e for e in episodes if e.error is None]
    parts = _parts(good)
    if good and metric not in parts:
        scored = ", ".join(sorted(parts)) or "none"
        raise ConfigError(f"evaluation reports the reward {metric!r}, which was not scored; parts: {scored}")
    values = [m for g in groups if (m := task_mean(g, metric)) is not None]
    means = {name: m for name, v in sorted(parts.items()) if (m := mean(v)) is not None}
    stops = Counter(e.stop.value for e in good)
    share = all(0 <= v <= 1 for v in values)
    return EvalResult(
        metric=metric,
        examples=len(groups),
        samples=samples,
        scored=len(values),
        errors=len(episodes) - len(good),
        accuracy=mean(values),
        std_error=std_error(values),
        ci95=normal_interval(values),
        wilson95=wilson_interval(sum(values), len(values)) if share else None,
        rewards=means,
        format_rate=next((m for name, m in means.items() if "format" in name), None),
        sampled_tokens_mean=mean([float(sum(t.sampled_tokens for t in e.trajectories)) for e in good]),
        turns_mean=mean([float(sum(len(t.turns) for t in e.trajectories)) for e in good]),
        tool_calls_mean=mean([float(sum(t.tool_calls for t in e.trajectories)) for e in good]),
        truncated_share=mean([float(e.stop.truncated) for e in good]),
        stops={name: count / len(good) for name, count in sorted(stops.items())},
        seconds=seconds,
        groups=tuple(groups),
    )


def value_of(episode: Episode, part: str) -> float | None:
    """The value of a reward part: the mean over the episode's trajectories that have one; None where none has, and
    for an episode that failed."""
    terms = [t.rewards[part].value for t in episode.trajectories if part in t.rewards]
    return mean([v for v in terms if v is not None]) if episode.error is None else None


def task_mean(group: Group, part: str) -> float | None:
    """The mean of a reward part over the samples of a task that have a value."""
    return mean([v for e in group.episodes if (v := value_of(e, part)) is not None])


def _parts(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """Values of each reward part, one per episode that has it, abstentions left out. A part on which every episode
    abstained is listed, empty."""
    parts: dict[str, list[float]] = {}
    for episode in episodes:
        for name in dict.fromkeys(name for t in episode.trajectories for name in t.rewards):
            value = value_of(episode, name)
            parts.setdefault(name, []).extend([] if value is None else [value])
    return parts
