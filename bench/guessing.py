# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.guessing CONFIG MODEL``: what guessing ahead gains in the episodes that a policy really plays.

Random prompts do not repeat themselves, so the other benches cannot show it. Here a trained policy plays the steps of
its own config, with ``engine.max_draft`` of each value in turn, and the same tokens must come out.
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


def written(groups: list[Group]) -> list[bytes]:
    """What the policy wrote in each episode, token for token, with the bits of its log-probs."""
    played = [t for g in groups for e in g.episodes for t in e.trajectories]
    return [t.tokens.tobytes() + np.asarray(t.logprobs).tobytes() for t in played]


def step(trainer: RLTrainer, draw: int) -> tuple[float, EngineStats, list[bytes]]:
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
        texts = []
        for k, trainer in trainers.items():
            speed, stats, text = step(trainer, draw)
            texts.append(text)
            if draw:
                found[k].append((speed, stats))
        if any(text != texts[0] for text in texts):
            typer.echo("error: what was written depends on the guesses", err=True)
            raise typer.Exit(1)
    for trainer in trainers.values():
        trainer.engine.close()
    typer.echo(table(found))


if __name__ == "__main__":
    app()
