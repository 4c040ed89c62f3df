# SPDX-License-Identifier: Apache-2.0
"""``palestra sample``: episodes as in training and evaluation, kept instead of learned from.

A run directory fills with rollout files of ``save_every`` tasks each; an interrupted run goes on behind the last of
them. Dialogues and pairs are made from those files at the end, so other choices of them cost no new episodes:
``--resume`` with another ``sample.dialogues`` or ``sample.pairs`` writes them anew.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from palestra import config as configuration
from palestra.data.source import Cursor
from palestra.engine.base import Engine
from palestra.errors import RunError
from palestra.learn.batch import rows
from palestra.rollout.collect import collect
from palestra.rollout.dump import read_rollouts, write_rollouts
from palestra.rollout.failures import Failures
from palestra.run.directory import Run, check_free
from palestra.run.files import HALVES, writing
from palestra.run.progress import Progress
from palestra.train import setup
from palestra.train.groups import RewardErrors
from palestra.train.metrics import rollout_metrics
from palestra.train.report import report_run
from palestra.train.sample_config import SampleConfig
from palestra.train.selection import Count, best_episodes, dialogue_row, pair_row, pairs
from palestra.types import Group

DECISIVE = {"engine": ("dtype", "max_context"), "sample": ("group_size",)}
"""Of these sections, the keys that decide what an episode is: they must stay when a run goes on, as all other keys."""


def run_sample(config: SampleConfig, *, progress: Progress, resume: bool = False) -> dict[str, Any]:
    """Play, keep, and write what was asked for; returns the summary that ``summary.json`` holds.

    Ctrl-C leaves whole rollout files, behind which ``resume`` goes on.
    """
    began = time.perf_counter()
    out = Path(config.out)
    if resume:
        _check_same(config, out / "config.yaml")
    else:
        check_free(out)
    loaded = setup.load(config.model)
    world = setup.make_world(config, loaded)
    world.env_factory()
    total = config.sample.tasks if world.tasks.size is None else min(config.sample.tasks, world.tasks.size)
    with Run.open(out, config, resume=resume) as run:
        done = sum(1 for _ in _groups(run.path)) if resume else 0
        run.rewind(done)
        progress.phase("sampling", total=total, done=done)
        engine = setup.make_engine(config, loaded.model, world.renderer)
        try:
            asyncio.run(_play(config, world, engine, run, progress, done, total))
        finally:
            engine.close()
        taken = asyncio.run(_derive(config, world, run.path))
        summary = {"model": config.model.path, "seed": config.seed, **taken.summary()}
        for line in taken.lines():
            progress.note(line)
        summary["seconds"] = time.perf_counter() - began
        run.write_summary(summary)
        report_run(run.path, summary, decode=world.renderer.decode)
    return summary


async def _play(
    config: SampleConfig, world: setup.World, engine: Engine, run: Run, progress: Progress, done: int, total: int
) -> None:
    """Tasks ``done`` to ``total``, ``save_every`` at a time; each lot is a rollout file named by its last task."""
    settings, failures = config.sample, Failures()
    rollout = world.rollout(engine, config.sampling, purpose="sample")
    cursor = world.tasks.take(Cursor(), done)[1] if done else Cursor()
    heard = RewardErrors(partial(progress.note, warning=True))
    while done < total:
        tasks, cursor = world.tasks.take(cursor, min(settings.save_every, total - done))
        began = time.perf_counter()
        playing = collect(
            list(enumerate(tasks, start=done)),
            rollout,
            group_size=settings.group_size,
            concurrency=settings.concurrency,
            retries=settings.retries,
            min_group=1,
            failures=failures,
        )
        async with aclosing(playing):
            played = [group async for group in playing]
        timings = {"time/rollout_s": time.perf_counter() - began}
        groups = [await world.rubric.score(group) for group in sorted(played, key=lambda g: g.draw)]
        done += len(groups)
        heard.tell(groups, f"tasks up to {done}")
        write_rollouts(run.path / "rollouts" / f"sample_{done:06d}.jsonl.zst", groups)
        metrics = rollout_metrics(groups, rows(groups, min_group=1), "accuracy", timings)
        run.log(done, metrics, phase="sample")
        progress.update(done, metrics)


@dataclass(slots=True)
class _Taken:
    """What the episodes amount to."""

    tasks: int = 0
    episodes: int = 0
    failed: int = 0
    rewards: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    dialogues: Count | None = None
    pairs: Count | None = None

    def add(self, group: Group) -> None:
        rewards = [e.reward for e in group.scored if e.reward is not None]
        self.tasks += 1
        self.episodes += len(group.episodes)
        self.failed += sum(e.error is not None for e in group.episodes)
        self.rewards += rewards
        self.best += [max(rewards)] if rewards else []

    def summary(self) -> dict[str, Any]:
        out: dict[str, Any] = {"tasks": self.tasks, "episodes": self.episodes, "failed": self.failed}
        if self.rewards:
            out["reward_mean"] = sum(self.rewards) / len(self.rewards)
            out["reward_best_mean"] = sum(self.best) / len(self.best)
        for name, count in (("dialogues", self.dialogues), ("pairs", self.pairs)):
            if count is not None:
                out |= {name: count.kept, f"{name}_left_out": dict(sorted(count.left_out.items()))}
        return out

    def lines(self) -> list[str]:
        named = (("dialogues", self.dialogues), ("pairs", self.pairs))
        return [count.line(name) for name, count in named if count is not None]


async def _derive(config: SampleConfig, world: setup.World, path: Path) -> _Taken:
    """Write ``dialogues.jsonl`` and ``pairs.jsonl`` as asked for, from all the rollout files."""
    chosen, taken = config.sample, _Taken()
    with ExitStack() as files:
        dialogues = files.enter_context(_whole(path / "dialogues.jsonl")) if chosen.dialogues else None
        compared = files.enter_context(_whole(path / "pairs.jsonl")) if chosen.pairs else None
        taken.dialogues = Count() if dialogues else None
        taken.pairs = Count() if compared else None
        for group in _groups(path):
            taken.add(group)
            kept, made = [], []
            if chosen.dialogues is not None and taken.dialogues is not None:
                kept = best_episodes(group, chosen.dialogues, taken.dialogues)
            if chosen.pairs is not None and taken.pairs is not None:
                made = pairs(group, chosen.pairs, taken.pairs)
            if not kept and not made:
                continue
            # Which tools were on offer is the environment's to say: messages do not repeat it.
            (first,) = await setup.first_observations(world.env_factory, [group.task])
            for episode in kept:
                _write(dialogues, dialogue_row(episode, first.tools))
            for better, worse in made:
                _write(compared, pair_row(better, worse, first.tools))
    return taken


def _groups(path: Path) -> Iterator[Group]:
    """The groups of all rollout files, in the order of their tasks."""
    for file in sorted((path / "rollouts").glob("sample_*.jsonl.zst")):
        yield from read_rollouts(file)


def _write(file: IO[str] | None, row: dict[str, Any]) -> None:
    assert file is not None
    file.write(json.dumps(row, ensure_ascii=False) + "\n")


@contextmanager
def _whole(path: Path) -> Iterator[IO[str]]:
    """A text file that appears under its name when the block is over, and not at all when it fails."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with writing(path):
            with aside.open("w", encoding="utf-8", errors=HALVES) as file:
                yield file
            aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _check_same(config: SampleConfig, before: Path) -> None:
    """Refuse to mix episodes that were played in different ways; raises RunError that names the key."""
    if not before.is_file():
        return
    old, new = (_played(c) for c in (configuration.load(before, [], SampleConfig), config))
    for key in new:
        if old[key] != new[key]:
            raise RunError(
                f"{before.parent} holds episodes of another {key} ({old[key]!r}, now {new[key]!r}); choose another "
                "--out, or go on with the same"
            )


def _played(config: SampleConfig) -> dict[str, Any]:
    """key → value of everything that decides what an episode is; sections one level deep."""
    found: dict[str, Any] = {}
    for key, value in config.model_dump(mode="json").items():
        if key in DECISIVE:
            found |= {f"{key}.{k}": value[k] for k in DECISIVE[key]}
        elif key != "out":
            found[key] = value
    return found
