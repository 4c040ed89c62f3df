# SPDX-License-Identifier: Apache-2.0
"""How good is this policy on these tasks: the same episodes as in training, counted instead of learned from."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
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

    metric: name of the reward part reported as ``accuracy``. examples: tasks played. scored: those with a value of
    the metric. errors: infrastructure failures, in no other number. std_error, ci95: of the accuracy, normal
    approximation; wilson95: of a share, None unless every value lies in [0, 1]. rewards: mean of each part,
    unweighted. format_rate: the part whose name holds "format". *_mean: per episode. stops: share of each stop
    reason. truncated_share: episodes cut by a limit. groups: one per task in the order of the tasks, each with its
    one episode, scored; not part of :meth:`to_dict`.
    """

    metric: str
    examples: int
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


async def evaluate(
    tasks: Sequence[Task],
    rollout: Rollout,
    rubric: Scorer,
    *,
    metric: str = "accuracy",
    concurrency: int = 64,
    retries: int = 1,
) -> EvalResult:
    """Play every task once and score it.

    ``rollout`` is called as ``collect`` calls it in training, with the task's position as draw and member 0; let
    it pass ``purpose="eval"`` to ``run_episode``, and evaluation draws no randomness that training would have
    drawn. Raises DataError for no tasks, ConfigError when no reward part is called ``metric``.
    """
    if not tasks:
        raise DataError("there is no task to evaluate on")
    begin = time.perf_counter()
    groups: dict[int, Group] = {}
    played = collect(enumerate(tasks), rollout, group_size=1, concurrency=concurrency, retries=retries, min_group=1)
    async with contextlib.aclosing(played):
        async for group in played:
            groups[group.draw] = await rubric.score(group)
    ordered = tuple(groups[draw] for draw in sorted(groups))
    return _result(metric, ordered, time.perf_counter() - begin)


def _result(metric: str, groups: tuple[Group, ...], seconds: float) -> EvalResult:
    episodes = [e for g in groups for e in g.episodes]
    good = [e for e in episodes if e.error is None]
    parts = _parts(good)
    if good and metric not in parts:
        scored = ", ".join(sorted(parts)) or "none"
        raise ConfigError(f"evaluation reports the reward {metric!r}, which was not scored; parts: {scored}")
    values = parts.get(metric, [])
    means = {name: m for name, v in sorted(parts.items()) if (m := mean(v)) is not None}
    stops = Counter(e.stop.value for e in good)
    share = all(0 <= v <= 1 for v in values)
    return EvalResult(
        metric=metric,
        examples=len(episodes),
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
        groups=groups,
    )


def _parts(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """Values of each reward part, one per episode that has it: the mean over its trajectories, abstentions left out.
    A part on which every episode abstained is listed, empty."""
    parts: dict[str, list[float]] = {}
    for episode in episodes:
        names = dict.fromkeys(name for t in episode.trajectories for name in t.rewards)
        for name in names:
            terms = [t.rewards[name].value for t in episode.trajectories if name in t.rewards]
            value = mean([v for v in terms if v is not None])
            parts.setdefault(name, []).extend([] if value is None else [value])
    return parts
