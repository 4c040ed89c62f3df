# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.ahead``: what playing ahead (``train.max_staleness``) gains where tools are slow.

16 episodes a step, whose tool takes half a second per turn; whole runs of a few steps with each bound in turn, with the
first batch, which nothing can hide. All do the same work: every reply has the same length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Annotated

import typer

from bench.ours.loop import settings, trainer_of
from bench.peers.serve import timed
from palestra.config import load
from palestra.errors import UserError
from palestra.train.config import RLConfig

HEAD = "| max_staleness | seconds a step | of those waiting for episodes | ratio |\n|---|---|---|---|"
TEXTS = ("1+2\n", "3*4\n", "5+6\n", "7*8\n")
GROUP = 4

Found = tuple[float, float]
"""Seconds a step, and what of them learning waited for its episodes."""


def config_of(model: str, lag: int, *, steps: int, delay_s: float, turns: int, new: int, updates: int) -> RLConfig:
    """A run of ``steps`` steps, and no more to be collected."""
    algorithm = {"updates_per_batch": updates}
    given = settings(model, TEXTS, samples=GROUP, new=new, turns=turns, delay_s=delay_s, algorithm=algorithm)
    given["train"] |= {"steps": steps, "max_staleness": lag}
    if model.startswith("builtin:"):
        given["renderer"] = "plain"  # it has no chat template
    return load(given, [], RLConfig)


def measure(config: RLConfig) -> Found:
    """One run from its first step to its last; what is made before it is outside the clock."""
    trainer = trainer_of(config, endless=True)
    waited = 0.0

    async def steps() -> None:
        nonlocal waited
        for _ in range(config.train.steps):
            row = await trainer.step()
            waited += row.get("time/wait_s", row["time/rollout_s"] + row["time/reward_s"])

    try:
        seconds, _ = timed(lambda: asyncio.run(steps()))
    finally:
        trainer.engine.close()
    return seconds / config.train.steps, waited / config.train.steps


def table(found: Mapping[int, Sequence[Found]]) -> str:
    """Markdown, one line per bound: medians over the runs, beside those of the first line."""
    base = median(seconds for seconds, _ in next(iter(found.values())))
    lines = [HEAD]
    for lag, runs in found.items():
        seconds, waited = (median(values) for values in zip(*runs, strict=True))
        lines.append(f"| {lag} | {seconds:.2f} | {waited:.2f} | {base / seconds:.2f} × |")
    return "\n".join(lines)


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def main(
    model: Annotated[str, typer.Argument(help="The model that plays and learns.")] = "builtin:calculator",
    lags: Annotated[list[int] | None, typer.Option("--lag", help="Values of train.max_staleness.")] = None,
    delay_s: Annotated[float, typer.Option(min=0, help="Seconds that a tool takes.")] = 0.5,
    turns: Annotated[int, typer.Option(min=1, help="Turns an episode; each but the last calls the tool.")] = 3,
    new: Annotated[int, typer.Option(min=1, help="Tokens a turn.")] = 32,
    updates: Annotated[int, typer.Option(min=1, help="Updates per batch: how long learning takes.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Steps a run.")] = 6,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, in turns, whose median counts.")] = 3,
) -> None:
    """Run the same steps with each bound in turn and print the seconds that one takes."""
    sizes = {"steps": steps, "delay_s": delay_s, "turns": turns, "new": new, "updates": updates}
    try:
        configs = {lag: config_of(model, lag, **sizes) for lag in lags or [0, 1]}  # type: ignore[arg-type]
        found: dict[int, list[Found]] = {lag: [] for lag in configs}
        for number in range(repeats):
            for lag, config in configs.items():
                found[lag].append(measure(config))
                typer.echo(f"run {number + 1}, max_staleness {lag}: {found[lag][-1][0]:.2f} s a step")
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(table(found))


if __name__ == "__main__":
    app()
