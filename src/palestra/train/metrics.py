# SPDX-License-Identifier: Apache-2.0
"""A step's episodes as numbers under the names of :mod:`palestra.run.metrics`. Learning never reads them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import numpy as np

from palestra.engine.stats import EngineStats
from palestra.eval.evaluate import EvalResult, result_of
from palestra.learn.advantage import zero_variance
from palestra.learn.batch import Rows
from palestra.reward.rubric import REWARD_ERRORS
from palestra.reward.trl import NOTES
from palestra.types import Episode, Group


@contextmanager
def timed(timings: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds that the block takes, where it comes to its end.

    >>> timings = {"time/reward_s": 1.0}
    >>> with timed(timings, "time/reward_s"):
    ...     pass
    >>> timings["time/reward_s"] > 1.0
    True
    """
    began = time.perf_counter()
    yield
    timings[name] = timings.get(name, 0.0) + time.perf_counter() - began


def rollout_metrics(groups: Sequence[Group], rows: Rows, metric: str, timings: Mapping[str, float]) -> dict[str, float]:
    """Means over the episodes that ended without an infrastructure failure; what is missing is left out."""
    every = [e for g in groups for e in g.episodes]
    good = [e for e in every if e.error is None]
    rewards = [r for e in good if (r := e.reward) is not None]
    parts = _parts(good)
    tokens = [float(sum(t.sampled_tokens for t in e.trajectories)) for e in good]
    equal = rows.counts.get("groups_equal", 0)
    out = {
        "rollout/episodes": float(len(every)),
        "rollout/groups": float(len(groups)),
        "rollout/sampled_tokens": sum(tokens),
        "train/row_tokens": float(sum(len(s.tokens) for s in rows.samples)),
        "rollout/errors": float(len(every) - len(good)),
        "rollout/rewards_missing": float(len(good) - len(rewards)),
        "rollout/reward_errors": float(sum(REWARD_ERRORS in e.info for e in every)),
        "rollout/groups_dropped": float(rows.counts.get("groups_dropped", 0)),
        "rollout/groups_zero_variance": float(zero_variance(rows) + equal),
        "rollout/groups_discarded": float(equal),
        "rollout/staleness_max": float(max((int(e.info.get("staleness", 0)) for e in good), default=0)),
        **{f"reward/{name}": float(np.mean(values)) for name, values in parts.items()},
        **dict(timings),
    }
    if good:
        out |= {
            "rollout/sampled_tokens_mean": float(np.mean(tokens)),
            "rollout/turns_mean": float(np.mean([sum(len(t.turns) for t in e.trajectories) for e in good])),
            "rollout/tool_calls_mean": float(np.mean([sum(t.tool_calls for t in e.trajectories) for e in good])),
            "rollout/truncated_share": float(np.mean([e.stop.truncated for e in good])),
        }
        stops = Counter(e.stop.value for e in good)
        out |= {f"rollout/stop/{name}": count / len(good) for name, count in sorted(stops.items())}
        out |= _tool_metrics(good)
    if rewritten := sum(_counted(e.info, "rewritten") for e in good):
        out["rollout/rewritten"] = rewritten
    out |= _logged(good)
    failures = Counter(str(e.info["failure"]) for e in every if "failure" in e.info)
    out |= {f"rollout/error/{reason}": float(count) for reason, count in sorted(failures.items())}
    if rewards:
        out |= {"train/reward": float(np.mean(rewards)), "train/reward_std": float(np.std(rewards))}
    if (solved := success_rate(groups, metric)) is not None:
        out["rollout/success_rate"] = solved
    if timings.get("time/rollout_s"):
        out["speed/sampled_tokens_per_s"] = sum(tokens) / timings["time/rollout_s"]
    if timings.get("time/update_s"):
        out["speed/trained_tokens_per_s"] = out["train/row_tokens"] / timings["time/update_s"]
    return out


def _tool_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """What went wrong with tools, per episode; nothing where there were none."""
    turns = [[turn for trajectory in e.trajectories for turn in trajectory.turns] for e in episodes]
    refused = [_counted(e.info, "tool_calls_refused") for e in episodes]
    if not any(refused) and not any(t.tool_calls or "tool_errors" in t.info for held in turns for t in held):
        return {}
    failed = [sum(_counted(turn.info, "tool_errors") for turn in held) for held in turns]
    return {
        "rollout/tool_errors_mean": float(np.mean(failed)),
        "rollout/tool_calls_refused_mean": float(np.mean(refused)),
    }


def _logged(episodes: Sequence[Episode]) -> dict[str, float]:
    """The numbers that reward functions logged about episodes, each averaged over the episodes that have it."""
    found: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.info.get(NOTES, {}).items():
            if isinstance(value, Real):
                found.setdefault(name, []).append(float(value))
    return {f"rollout/logged/{name}": float(np.mean(values)) for name, values in sorted(found.items())}


def _counted(info: Mapping[str, Any], name: str) -> float:
    """A count in an info, where an environment may have put anything."""
    value = info.get(name, 0)
    return float(value) if isinstance(value, Real) else 0.0


def success_rate(groups: Sequence[Group], metric: str) -> float | None:
    """The share of the scored episodes that solved their task: whose part ``metric`` is at least 1."""
    values = _parts([e for g in groups for e in g.episodes if e.error is None]).get(metric)
    return float(np.mean([v >= 1 for v in values])) if values else None


def rollout_timings(stats: EngineStats, rollout_s: float, *, loop_s: float) -> dict[str, float]:
    """The parts of ``rollout_s`` seconds. loop_s: processor seconds of the event loop's thread in that time, which may
    overlap with the engine's; what neither of the two did was waiting for tools."""
    tools = max(0.0, rollout_s - stats.busy_s - loop_s)
    forward = stats.prefill_s + stats.decode_s + stats.sample_s
    return {
        "time/prefill_s": stats.prefill_s,
        "time/decode_s": stats.decode_s,
        "time/sampling_s": stats.sample_s,
        "time/tools_s": tools,
        "time/python_s": max(0.0, rollout_s - forward - tools),
        "speed/prefill_tokens": float(stats.prefill_tokens),
        "speed/guessed_share": stats.guessed_tokens / max(1, stats.decode_tokens),
    }


def eval_metrics(result: EvalResult) -> dict[str, float]:
    """An evaluation under ``eval/``."""
    named = {
        "eval/accuracy": result.accuracy,
        "eval/format": result.format_rate,
        "eval/sampled_tokens_mean": result.sampled_tokens_mean,
        "eval/turns_mean": result.turns_mean,
        "eval/truncated_share": result.truncated_share,
        "eval/errors": float(result.errors),
        "time/eval_s": result.seconds,
        **{f"eval/reward/{name}": value for name, value in result.rewards.items()},
        **{f"eval/stop/{name}": value for name, value in result.stops.items()},
    }
    return {name: value for name, value in named.items() if value is not None}


def curve_accuracy(result: EvalResult, size: int) -> float | None:
    """The accuracy on the first ``size`` tasks, which are those of the learning curve: comparable with its points."""
    return result_of(result.groups[:size], result.metric, seconds=0.0).accuracy


def eval_notes(result: EvalResult, phase: str) -> Iterator[tuple[str, bool]]:
    """What an evaluation is told as; True for what is a warning."""
    if result.accuracy is not None:
        counted = result.examples - result.errors
        yield f"{phase}: accuracy {result.accuracy:.3f} on {counted} held-out tasks", False
    if result.errors:
        error = next(e.error for g in result.groups for e in g.episodes if e.error is not None)
        yield f"{phase}: {result.errors} of {result.examples} episodes failed and do not count, one by {error}", True


def advantages_by_trajectory(groups: Sequence[Group], rows: Rows) -> list[list[list[float | None]]]:
    """For the viewer: one number (or None) per trajectory of each episode of each group."""
    of: dict[str, float] = {}
    for sample, advantage in zip(rows.samples, rows.advantages or (), strict=True):
        trained = advantage[sample.loss_mask]
        of[sample.episode] = float(trained[-1]) if len(trained) else 0.0
    return [[[of.get(f"{g.id}/{e.member}")] * len(e.trajectories) for e in g.episodes] for g in groups]


def _parts(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    parts: dict[str, list[float]] = {}
    for episode in episodes:
        for name, term in (episode.trajectories[-1].rewards if episode.trajectories else {}).items():
            parts.setdefault(name, [])
            if term.value is not None:
                parts[name].append(term.value)
    return {name: values for name, values in parts.items() if values}
