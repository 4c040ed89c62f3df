# SPDX-License-Identifier: Apache-2.0
"""Two evaluations on the same tasks: what got better, what got worse, and whether that is more than chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from palestra.errors import DataError, RunError
from palestra.eval.evaluate import task_mean
from palestra.eval.metrics import mean, normal_interval, sign_test
from palestra.rollout.dump import read_rollouts
from palestra.run.files import read_json
from palestra.types import Group

FORMAT = 1
EPISODES = Path("rollouts") / "eval.jsonl.zst"


@dataclass(frozen=True, slots=True)
class Change:
    """A task that the two runs did not solve alike: its id, question, and the metric before and after."""

    task: str
    question: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs on the tasks that both played and scored, paired by task.

    metric: the part compared. before, after: its mean; difference: after - before, with the 95 % interval of the mean
    of the paired differences. fixed, broken: tasks that went up and down. unchanged_right, unchanged_wrong: counts.
    p_value: the exact sign test on fixed against broken, which is McNemar's where each task was played once.
    parts: every other part's mean before and after. left_out: tasks that only one of them has, or scored.
    """

    metric: str
    names: tuple[str, str]
    tasks: int
    before: float
    after: float
    difference: float
    interval: tuple[float, float]
    p_value: float
    fixed: tuple[Change, ...]
    broken: tuple[Change, ...]
    unchanged_right: int
    unchanged_wrong: int
    left_out: int
    parts: Mapping[str, tuple[float, float]]

    @property
    def verdict(self) -> str:
        """In words: what changed, and whether it is more than chance would do (p < 0.05)."""
        moved = f"{self.difference:+.1%}".replace("%", " points")
        low, high = (f"{100 * x:+.1f}" for x in self.interval)
        said = f"{moved} (95 % interval {low} to {high}), {len(self.fixed)} fixed, {len(self.broken)} broken"
        if self.p_value >= 0.05:
            return f"no change beyond chance: {said}, p = {self.p_value:.2g}"
        return f"{self.names[1]} is {'better' if self.difference > 0 else 'worse'}: {said}, p = {self.p_value:.2g}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"format": FORMAT, "verdict": self.verdict, **asdict(self)}


def compare(
    before: Sequence[Group], after: Sequence[Group], metric: str, names: tuple[str, str] = ("before", "after")
) -> Comparison:
    """Pair the groups of two evaluations by their task's id.

    Raises DataError when they share no scored task, or when one id means two different questions.
    """
    first, second = _by_id(before, names[0]), _by_id(after, names[1])
    for task in first.keys() & second.keys():
        if first[task].task.messages() != second[task].task.messages():
            raise DataError(f"task {task!r} asks two different things in {names[0]} and {names[1]}: use the same data")
    pairs = [(g, task_mean(g, metric), task_mean(second[t], metric)) for t, g in first.items() if t in second]
    scored = [(group, a, b) for group, a, b in pairs if a is not None and b is not None]
    if not scored:
        raise DataError(f"{names[0]} and {names[1]} have no task in common that both scored by {metric!r}")
    changes = [Change(g.task.id, _asked(g), a, b) for g, a, b in scored if a != b]
    differences = [b - a for _, a, b in scored]
    fixed = tuple(c for c in changes if c.after > c.before)
    interval = normal_interval(differences)
    assert interval is not None
    return Comparison(
        metric=metric,
        names=names,
        tasks=len(scored),
        before=_mean([a for _, a, _ in scored]),
        after=_mean([b for _, _, b in scored]),
        difference=_mean(differences),
        interval=interval,
        p_value=sign_test(len(fixed), len(changes) - len(fixed)),
        fixed=fixed,
        broken=tuple(c for c in changes if c.after < c.before),
        unchanged_right=sum(a == b >= 1 for _, a, b in scored),
        unchanged_wrong=sum(a == b < 1 for _, a, b in scored),
        left_out=len(first.keys() | second.keys()) - len(scored),
        parts=_parts([(first[g.task.id], second[g.task.id]) for g, _, _ in scored], metric),
    )


def compare_runs(before: str | Path, after: str | Path, metric: str | None = None) -> Comparison:
    """Compare two run directories of ``palestra eval`` (or rollouts files). metric: the one both reported, unless
    named."""
    paths = Path(before), Path(after)
    told = {name for path in paths if (name := _metric_of(path)) is not None}
    if metric is None and len(told) > 1:
        raise DataError(f"{before} and {after} report different metrics ({', '.join(sorted(told))}): name one")
    chosen = metric or next(iter(told), "accuracy")
    names = (paths[0].name, paths[1].name) if paths[0].name != paths[1].name else (str(before), str(after))
    return compare(read_episodes(paths[0]), read_episodes(paths[1]), chosen, names)


def read_episodes(path: str | Path) -> list[Group]:
    """The groups of an evaluation: a run directory of ``palestra eval``, or a rollouts file."""
    path = Path(path)
    file = path / EPISODES if path.is_dir() else path
    if not file.is_file():
        raise RunError(f"{path} holds no evaluation (no {EPISODES}): name a run directory of palestra eval")
    return list(read_rollouts(file))


def _metric_of(path: Path) -> str | None:
    summary = path / "summary.json"
    found = read_json(summary, "remove it to compare without its metric").get("metric") if summary.is_file() else None
    return None if found is None else str(found)


def _by_id(groups: Sequence[Group], name: str) -> dict[str, Group]:
    found = {group.task.id: group for group in groups}
    if len(found) < len(groups):
        raise DataError(f"{name} holds a task id twice, so its tasks cannot be paired: give each task an id of its own")
    return found


def _asked(group: Group) -> str:
    text = str(group.task.messages()[-1].get("content") or "")
    return " ".join(text.split())


def _mean(values: Sequence[float]) -> float:
    found = mean(values)
    assert found is not None
    return found


def _parts(pairs: Sequence[tuple[Group, Group]], metric: str) -> dict[str, tuple[float, float]]:
    names = dict.fromkeys(n for g, _ in pairs for e in g.episodes for t in e.trajectories for n in t.rewards)
    found: dict[str, tuple[float, float]] = {}
    for name in names:
        both = [
            (a, b) for g, h in pairs if (a := task_mean(g, name)) is not None and (b := task_mean(h, name)) is not None
        ]
        if both and name != metric:
            found[name] = (_mean([a for a, _ in both]), _mean([b for _, b in both]))
    return found
