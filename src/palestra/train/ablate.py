# SPDX-License-Identifier: Apache-2.0
"""``palestra rewards ablate``: short runs with one part of the reward off each, and what that changed.

A part that is off keeps its place with weight 0: it is still scored and logged, and a gate on it still opens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.config import load
from palestra.errors import ConfigError, RunError, unknown
from palestra.reward.ablation import ALL, Ablation, Measures, compare
from palestra.run.directory import FORMAT
from palestra.run.files import read_json, write_json
from palestra.run.progress import Progress
from palestra.train.config import RLConfig
from palestra.train.rl import train_rl

BEHAVIOUR = ("sampled_tokens_mean", "turns_mean", "tool_calls_mean", "truncated_share")
"""What is compared beside the mean of each part."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: which part is off (:data:`ALL`: none), and its whole config."""

    off: str
    config: RLConfig

    @property
    def folder(self) -> Path:
        return Path(self.config.out)

    def summary(self) -> dict[str, Any] | None:
        """What the run ended with; None when it has not ended. RunError where the directory holds another run."""
        stored = self.folder / "config.yaml"
        if not stored.is_file():
            return None
        if load(stored, [f"out={json.dumps(self.config.out)}"], RLConfig) != self.config:
            raise RunError(
                f"{self.folder} holds a run of another config; take the config and options it was begun with, or "
                "choose another --out"
            )
        file = self.folder / "summary.json"
        summary: dict[str, Any] | None = read_json(file, "remove it to go on with the run") if file.is_file() else None
        return summary


def trials(
    config: RLConfig, out: str | Path, *, parts: Sequence[str] = (), seeds: int = 3, steps: int | None = None
) -> list[Trial]:
    """The runs of an ablation: with all parts and without each, for the seeds ``config.seed``, ``config.seed`` + 1, …

    parts: which to switch off (default: every part of the config's ``rewards`` with a weight). steps: instead of
    ``train.steps``. Seed by seed, so that an ablation that is cut short has whole comparisons.

    >>> config = load({"model": "builtin:calculator", "data": "arithmetic", "env": "calculator",
    ...                "rewards": {"accuracy": 1.0, "format": {"weight": 0.1}}}, [], RLConfig)
    >>> made = trials(config, "runs/x", parts=["format"], seeds=2)
    >>> [(t.off, t.config.seed, t.config.out) for t in made][:2]
    [('all parts', 0, 'runs/x/all/seed_0'), ('format', 0, 'runs/x/without_format/seed_0')]
    >>> made[1].config.rewards
    {'accuracy': 1.0, 'format': {'weight': 0.0}}
    """
    rewards = config.rewards or {}
    weighted = [name for name, entry in rewards.items() if _weight(entry)]
    for name in parts:
        if name not in weighted:
            raise ConfigError(unknown("part", name, weighted) + " (of `rewards`, with a weight)")
    if len(weighted) < 2:
        raise ConfigError(
            f"an ablation needs a reward of two or more parts, and `rewards` has {len(weighted)} with a weight; what "
            "the environment pays is a part when it has an entry of its own, for example env: 1.0"
        )
    if not config.eval.size:
        raise ConfigError("eval.size is 0: an ablation compares evaluations after training; set it to 100 or more")
    made = []
    for seed in range(config.seed, config.seed + seeds):
        for off in (ALL, *(parts or weighted)):
            folder = "all" if off == ALL else f"without_{off.replace('/', '_')}"
            changes: dict[str, Any] = {"seed": seed, "out": str(Path(out) / folder / f"seed_{seed}")}
            if off != ALL:
                changes["rewards"] = rewards | {off: _off(rewards[off])}
            if steps is not None:
                changes["train"] = config.train.model_copy(update={"steps": steps})
            made.append(Trial(off, config.model_copy(update=changes)))
    return made


def _weight(entry: float | Mapping[str, Any]) -> float:
    weight: float = entry.get("weight", 1.0) if isinstance(entry, Mapping) else entry
    return weight


def _off(entry: float | Mapping[str, Any]) -> float | dict[str, Any]:
    return {**entry, "weight": 0.0} if isinstance(entry, Mapping) else 0.0


def ablate(runs: Sequence[Trial], out: str | Path, *, progress: Progress) -> Ablation:
    """Make the runs that are not finished yet, go on with those that were interrupted, and compare; the result is
    also in ``out/ablation.json``."""
    ended: dict[str, list[dict[str, Any]]] = {}
    waiting = [t for t in runs if t.summary() is None]  # a directory of another config is refused before any run
    for trial in runs:
        summary = trial.summary()
        if summary is None:
            name = "all parts" if trial.off == ALL else f"without {trial.off}"
            at = waiting.index(trial) + 1
            progress.note(f"run {at} of {len(waiting)}: {name}, seed {trial.config.seed}")
            summary = train_rl(trial.config, progress=progress, resume=True)
        ended.setdefault(trial.off, []).append(summary)
    metric = runs[0].config.eval.metric
    tasks = min(s["eval_after"]["examples"] for found in ended.values() for s in found)
    found = compare(
        {off: [measures(s["eval_after"], metric) for s in summaries] for off, summaries in ended.items()},
        [measures(s["eval_before"], metric) for s in ended[ALL]],
        tasks=tasks,
    )
    steps = runs[0].config.train.steps
    write_json(Path(out) / "ablation.json", {"format": FORMAT, "steps": steps, "tasks": tasks, **found.to_dict()})
    return found


def measures(result: Mapping[str, Any], metric: str = "accuracy") -> Measures:
    """What an evaluation is compared by: the mean of each part, the one that counts as accuracy first, then length,
    turns, tool calls and the share of episodes that a limit cut.

    >>> measures({"rewards": {"format": 1.0, "accuracy": 0.5}, "turns_mean": 2.0})
    {'accuracy': 0.5, 'format': 1.0, 'turns_mean': 2.0}
    """
    parts = sorted(result["rewards"].items(), key=lambda item: item[0] != metric)
    return dict(parts) | {name: result[name] for name in BEHAVIOUR if name in result}
