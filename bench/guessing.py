# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.guessing CONFIG MODEL``: what guessing ahead gains in the episodes that a policy really plays.

Random prompts do not repeat themselves, so the other benches cannot show it. Here a trained policy plays the steps of
its own config, with ``engine.max_draft`` of each value in turn; how far what was written agrees is told beside it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer
import yaml

from bench.ours.loop import collected, trainer_of
from bench.peers.serve import timed
from palestra import config
from palestra.engine.stats import EngineStats
from palestra.errors import UserError
from palestra.train.config import RLConfig
from palestra.train.rl import RLTrainer
from palestra.types import Group

HEAD = "| max_draft | tokens/s | passes a step | guessed right | ratio |\n|---|---|---|---|---|"


Written = list[tuple[list[int], list[float]]]
"""Tokens and log-probs of each episode."""


def written(groups: list[Group]) -> Written:
    """What the policy wrote, in the order of tasks and members."""
    episodes = [e for g in sorted(groups, key=lambda g: g.id) for e in sorted(g.episodes, key=lambda e: e.member)]
    return [(t.tokens.tolist(), t.logprobs.tolist()) for e in episodes for t in e.trajectories]


def agreement(one: Written, other: Written) -> tuple[int, float]:
    """How many episodes have the same tokens, and the largest difference of a log-prob in those.

    >>> agreement([([5], [-1.0]), ([6], [-2.0])], [([5], [-1.5]), ([7], [-9.0])])
    (1, 0.5)
    """
    same = [(a, b) for (x, a), (y, b) in zip(one, other, strict=True) if x == y]
    return len(same), max((float(np.abs(np.subtract(a, b)).max()) for a, b in same if a), default=0.0)


def step(trainer: RLTrainer, draw: int) -> tuple[float, EngineStats, Written]:
    """Tokens per second of one step's rollout, what the engine counted, and what was written."""
    trainer.engine.load_weights(trainer.model, trainer.engine.version + 1)
    trainer.engine.take_stats()
    seconds, groups = timed(lambda: asyncio.run(collected(trainer, draw)))
    stats = trainer.engine.take_stats()
    return stats.decode_tokens / seconds, stats, written(groups)


def table(found: dict[int, list[tuple[float, EngineStats]]]) -> str:
    """Markdown, one line per ``max_draft``: medians over the steps, beside those of the first line."""
    base = median(speed for speed, _ in next(iter(found.values())))
    lines = [HEAD]
    for draft, steps in found.items():
        speed = median(speed for speed, _ in steps)
        passes = median(stats.passes for _, stats in steps)
        share = sum(s.guessed_tokens for _, s in steps) / sum(s.decode_tokens for _, s in steps)
        lines.append(f"| {draft} | {speed:.0f} | {passes:.0f} | {share:.0%} | {speed / base:.2f} × |")
    return "\n".join(lines)


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def main(
    path: Annotated[Path, typer.Argument(metavar="CONFIG", help="Config of an `rl` run.")],
    model: Annotated[str, typer.Argument(help="The policy: a checkpoint of that run.")],
    drafts: Annotated[list[int] | None, typer.Option("--draft", help="Values of engine.max_draft.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps per value, after one to learn from.")] = 3,
) -> None:
    """Play the same steps with each value in turn and print tokens per second."""
    values = drafts or [0, 8]
    given = yaml.safe_load(path.read_text(encoding="utf-8")) | {"warmup": None, "out": "unused", "model": model}
    try:
        trainers = {k: trainer_of(config.load(given, [f"engine.max_draft={k}"], RLConfig)) for k in values}
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    found: dict[int, list[tuple[float, EngineStats]]] = {k: [] for k in values}
    for draw in range(steps + 1):
        first: Written | None = None
        for k, trainer in trainers.items():
            speed, stats, text = step(trainer, draw)
            first = text if first is None else first
            same, gap = agreement(first, text)
            typer.echo(f"draw {draw}, max_draft {k}: {same} of {len(text)} episodes alike, log-probs within {gap:.1e}")
            if draw:
                found[k].append((speed, stats))
    for trainer in trainers.values():
        trainer.engine.close()
    typer.echo(table(found))


if __name__ == "__main__":
    app()
