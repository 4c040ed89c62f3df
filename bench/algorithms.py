# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.algorithms``: whether every algorithm learns, on the same problems with as many episodes each.

The demo's model and problems, one warm start per seed, and from there every preset of ``palestra.train.config`` in a
process of its own. A run that is done is kept in the JSON file; the command goes on where it was stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer

from bench.benches.learning import ENOUGH, warm_start
from bench.lab import Crew, Lab, Member, Settings
from bench.rows import Record, Results
from bench.workers import ROOT, WorkerError
from palestra.errors import UserError, unknown
from palestra.train.config import PRESETS, AlgorithmConfig
from palestra.train.demo import demo_config

HEAD = f"| preset | learning rate | held-out accuracy | episodes to {ENOUGH:g} | seconds |\n|---|---|---|---|---|"
SPECIAL: dict[str, dict[str, Any]] = {}
"""Keys of ``train`` that a preset needs otherwise than the demo has them."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """episodes: of a run. block: episodes between two evaluations, on ``curve`` problems; ``held_out`` at the end.
    tasks: of a step. warmup: steps of the warm start (None: the demo's own)."""

    episodes: int = 5120
    block: int = 512
    curve: int = 100
    held_out: int = 500
    tasks: int = 32
    group: int = 8
    warmup: int | None = None


QUICK = Sizes(episodes=8, block=4, curve=4, held_out=4, tasks=2, group=2, warmup=2)


def presets() -> list[str]:
    """Every preset that learns from rewards alone; the others need a teacher.

    >>> {"grpo", "dapo"} <= set(presets())
    True
    """
    return [name for name in PRESETS if not AlgorithmConfig.model_validate(name).unscored]


def plan(preset: str, seed: int, sizes: Sizes, *, threads: int) -> dict[str, Any]:
    """What makes up a run: with another plan it is another run.

    >>> plan("reinforce", 0, Sizes(), threads=1)["algorithm"]
    {'preset': 'reinforce', 'group_size': 8, 'updates_per_batch': 1}
    """
    demo = demo_config("unused")
    ratio = AlgorithmConfig.model_validate(preset).loss != "reinforce"  # without one, a second update would be wrong
    updates = PRESETS[preset].get("updates_per_batch", demo.algorithm.updates_per_batch if ratio else 1)
    train = {"learning_rate": demo.train.learning_rate, "tasks_per_step": sizes.tasks, **SPECIAL.get(preset, {})}
    return {
        "algorithm": {"preset": preset, "group_size": sizes.group, "updates_per_batch": updates},
        "parts": PRESETS[preset],
        "train": train,
        "seed": seed,
        "sizes": asdict(sizes),
        "threads": threads,
    }


def measure(lab: Lab, preset: str, seed: int, sizes: Sizes) -> Record:
    """One run, or the one that is filed."""
    work, wanted = f"{preset}, seed {seed}", plan(preset, seed, sizes, threads=lab.settings.threads)
    old = lab.results.find(work, "float32")
    if old is not None and old["plan"] == wanted:
        return old
    start = warm_start(lab, seed, sizes.warmup)
    steps = max(1, sizes.episodes // (sizes.tasks * sizes.group))
    config: dict[str, Any] = {"work": "algorithm", "model": start, "seed": seed, "steps": steps}
    config |= {key: wanted[key] for key in ("algorithm", "train")}
    with lab.crew({work: Member("ours", config)}) as crew:
        seconds, curve = _learned(crew, work, sizes)
    record: Record = {
        "work": work,
        "dtype": "float32",
        "preset": preset,
        "accuracy": curve[-1][1],
        "to_enough": next((episodes for episodes, accuracy in curve if accuracy >= ENOUGH), None),
        "seconds": seconds,
        "curve": curve,
        "plan": wanted,
        "versions": crew.versions.get(work, {}),
        "measured_at": time.strftime("%Y-%m-%d %H:%M"),
    }
    lab.results.add(record)
    return record


def _learned(crew: Crew, work: str, sizes: Sizes) -> tuple[float, list[tuple[int, float]]]:
    """Seconds of training, and (episodes, accuracy) before, after every block, and at the end."""
    seconds = 0.0
    curve: list[tuple[int, float]] = []
    for due in [*range(0, sizes.episodes, sizes.block), sizes.episodes]:
        last = due == sizes.episodes
        if curve and curve[-1][0] >= due and not last:
            continue  # a step whose groups were refilled ran over it
        found = crew.once(work, {"episodes": due, "held_out": sizes.held_out if last else sizes.curve})
        seconds += found["seconds"]
        curve.append((found["episodes"], found["accuracy"]))
    return seconds, curve


def table(records: Sequence[Record]) -> str:
    """Markdown, one line a preset: mean accuracy (worst to best seed), median episodes, mean seconds.

    >>> run = {"preset": "grpo", "accuracy": 0.98, "to_enough": 1024, "seconds": 60.0,
    ...        "plan": {"train": {"learning_rate": 6e-4}}}
    >>> print(table([run, run | {"accuracy": 0.96, "to_enough": 2048, "seconds": 70.0}]).splitlines()[-1])
    | grpo | 0.0006 | 0.970 (0.960 to 0.980) | 1536 (1024 to 2048) | 65 |
    >>> print(table([run | {"accuracy": 0.5, "to_enough": None}, run]).splitlines()[-1])
    | grpo | 0.0006 | 0.740 (0.500 to 0.980) | 1 of 2 seeds: 1024 | 60 |
    """
    by: dict[str, list[Record]] = {}
    for record in records:
        by.setdefault(record["preset"], []).append(record)
    return "\n".join([HEAD, *(_line(preset, runs) for preset, runs in by.items())])


def _line(preset: str, runs: Sequence[Record]) -> str:
    accuracies = [run["accuracy"] for run in runs]
    reached = [run["to_enough"] for run in runs if run["to_enough"] is not None]
    some = "" if len(reached) == len(runs) else f"{len(reached)} of {len(runs)} seeds: "
    cells = [
        preset,
        f"{runs[0]['plan']['train']['learning_rate']:g}",
        _spread(accuracies, fmean(accuracies), lambda value: f"{value:.3f}"),
        (some + _spread(reached, median(reached), lambda value: f"{value:.0f}")) if reached else "never",
        f"{fmean(run['seconds'] for run in runs):.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _spread(values: Sequence[float], middle: float, text: Callable[[float], str]) -> str:
    same = len(values) == 1
    return text(middle) if same else f"{text(middle)} ({text(min(values))} to {text(max(values))})"


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def main(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[PRESET]…", help="Which presets (default: all).")
    ] = None,
    json_file: Annotated[Path, typer.Option("--json", metavar="FILE", help="Where runs are kept.")] = ROOT
    / "bench"
    / "results"
    / "algorithms.json",
    models: Annotated[Path, typer.Option(help="Where the warm starts are kept.")] = ROOT / "bench" / ".models",
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0 on.")] = 3,
    episodes: Annotated[int | None, typer.Option(min=1, help="Episodes of a run (default: 5120).")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a run.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: does it run?")] = False,
) -> None:
    """Train with every preset from the same warm starts and print the table; runs that are done are not repeated."""
    sizes = QUICK if quick else Sizes()
    sizes = sizes if episodes is None else replace(sizes, episodes=episodes)
    settings = Settings(
        models.absolute(), json_file.parent.absolute() / "logs", against=(), quick=quick, threads=threads
    )
    failed = False
    records: list[Record] = []
    try:
        lab = Lab(settings, Results(json_file, resume=True))
        for preset in names or presets():
            if preset not in presets():
                raise UserError(unknown("preset", preset, presets()))
            for seed in range(seeds):
                try:
                    records.append(measure(lab, preset, seed, sizes))
                except WorkerError as problem:
                    failed = True
                    typer.echo(f"{preset}, seed {seed}: failed: {problem}")
                    continue
                done = records[-1]
                typer.echo(f"{done['work']}: {done['accuracy']:.3f} in {done['seconds']:.0f} s")
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo("\n" + table(records))
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
