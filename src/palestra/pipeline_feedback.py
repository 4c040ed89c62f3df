# SPDX-License-Identifier: Apache-2.0
"""Feedback by a model instead of people (RLAIF): recorded episodes are judged, and the better and the worse of a
task become a pair."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from palestra.config import Config
from palestra.env import make_env
from palestra.errors import DataError
from palestra.reward.build import make_rubric
from palestra.rollout.dump import group_from_dict, group_to_dict, read_rollouts, write_rollouts
from palestra.run.files import HALVES, write_text, writing
from palestra.run.progress import Progress
from palestra.train.config import Choice
from palestra.train.sample_config import PairSelection
from palestra.train.selection import Count, pair_row, pairs
from palestra.train.setup import first_observations
from palestra.types import Group


class JudgeStage(Config):
    """Scores recorded episodes again. rollouts: a file, or a run directory with several. rewards: who judges, such as a
    ``judge`` at an endpoint. renderer: the one that the episodes were played with."""

    rollouts: str
    rewards: dict[str, float | dict[str, Any]]
    renderer: Choice = Choice(name="chat")


def judge_rollouts(config: JudgeStage, file: Path, progress: Progress) -> dict[str, Any]:
    """Write the groups with the judge's rewards to ``file``. Each judged group is kept at once, so that a killed
    stage asks the judge about none twice."""
    groups = list(read_all(config.rollouts))
    rubric = make_rubric(config.rewards, chat=config.renderer.name != "plain")
    kept = file.with_name("judged.jsonl")
    with writing(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        done = _judged(kept)
    progress.phase("judging", total=len(groups), done=len(done))

    async def judge() -> None:
        with kept.open("a", encoding="utf-8", errors=HALVES) as lines:
            for group in groups[len(done) :]:
                done.append(await rubric.score(group))
                lines.write(json.dumps(group_to_dict(done[-1]), ensure_ascii=False, default=repr) + "\n")
                lines.flush()
                progress.update(len(done), {})

    asyncio.run(judge())
    write_rollouts(file, done)
    kept.unlink()
    scored = [e for g in done for e in g.episodes if e.error is None]
    values = [r for e in scored if (r := e.reward) is not None]
    return {
        "groups": len(done),
        "episodes": len(scored),
        "unscored": len(scored) - len(values),
        "reward_mean": sum(values) / len(values) if values else None,
        "failures": dict(rubric.errors),
    }


def read_all(path: str) -> Iterator[Group]:
    """The groups of a rollouts file, or of all those of a run directory in the order of their names."""
    given = Path(path)
    files = sorted((given / "rollouts").glob("*.jsonl.zst")) if given.is_dir() else [given]
    if not files:
        raise DataError(f"{path} holds no rollouts; name a rollouts file or a run directory with some")
    for file in files:
        yield from read_rollouts(file)


def _judged(kept: Path) -> list[Group]:
    """The groups that an earlier try has judged; a line that a kill tore is dropped."""
    if not kept.is_file():
        return []
    lines = kept.read_text(encoding="utf-8").split("\n")[:-1]
    write_text(kept, "".join(line + "\n" for line in lines))
    return [group_from_dict(json.loads(line), f"{kept}:{n}") for n, line in enumerate(lines, 1)]


class PairsStage(PairSelection):
    """Makes preference pairs of scored episodes, best against worst. rollouts: a file, or a run directory with several.
    env: the one that was played, whose tools belong into the rows."""

    rollouts: str
    env: Choice | None = None


def write_pairs(config: PairsStage, file: Path) -> dict[str, Any]:
    """Write what ``palestra prefer`` and ``reward-model`` read; counts what made no pair, and why."""
    count = Count()
    rows: list[dict[str, Any]] = []
    groups = 0
    env = None if config.env is None else make_env(config.env.name, **config.env.options)
    for group in read_all(config.rollouts):
        groups += 1
        made = pairs(group, config, count)
        shown = asyncio.run(first_observations(env, [group.task])) if env is not None and made else []
        rows += [pair_row(better, worse, shown[0].tools if shown else ()) for better, worse in made]
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return {"groups": groups, "pairs": count.kept, "left_out": dict(count.left_out), "said": count.line("pairs")}
