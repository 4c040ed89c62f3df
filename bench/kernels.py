# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.kernels MODEL``: what the kernels in C gain over torch's own operations, here and now.

A process with them and one without take turns; each samples 4 × 8 sequences of 64 tokens and goes forward and
backward over as many.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from statistics import median
from typing import Annotated, Any

import typer

WORK = {"sampling 4×8": "tokens/s", "update 4×8": "s"}
PROMPTS, SAMPLES, PROMPT, NEW = 4, 8, 100, 64
app = typer.Typer(add_completion=False, rich_markup_mode=None)


def measured(model: str) -> dict[str, float]:
    """What this process reaches, after one round to warm up."""
    from bench.ours.sampling import sampling
    from bench.ours.update import update
    from palestra.model.loading import load_model

    loaded: Any = load_model(model, device="cpu").model
    vocabulary = int(loaded.config.vocab_size)
    rng = random.Random("kernels")
    prompts = [[rng.randrange(vocabulary) for _ in range(PROMPT)] for _ in range(PROMPTS)]
    sample, learn = sampling(model, "float32"), update(model, prompts, SAMPLES, NEW)
    plan: dict[str, Any] = {"prompts": prompts, "samples": SAMPLES, "lengths": [NEW]}
    sample({**plan, "lengths": [2]}), learn({"rows": 2})
    drawn = sample(plan)
    return dict(zip(WORK, (drawn["tokens"] / drawn["seconds"], learn({})["seconds"]), strict=True))


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: medians with kernels (``1``) and without (``0``), and how many times better the former are.

    >>> one, none = ({"sampling 4×8": a, "update 4×8": b} for a, b in ((200.0, 5.0), (100.0, 10.0)))
    >>> print(table({"1": [one], "0": [none]}).splitlines()[-1])
    | update 4×8 | 5.00 s | 10.00 s | 2.00 × |
    """
    lines = ["| work, float32 | with kernels | without | ratio |", "|---|---|---|---|"]
    for work, unit in WORK.items():
        with_them, without = (median(run[work] for run in found[k]) for k in ("1", "0"))
        ratio = without / with_them if unit == "s" else with_them / without
        shown = [f"{value:.2f} s" if unit == "s" else f"{value:.0f} {unit}" for value in (with_them, without)]
        lines.append(f"| {work} | {shown[0]} | {shown[1]} | {ratio:.2f} × |")
    return "\n".join(lines)


@app.command()
def main(
    model: Annotated[str, typer.Argument(help="A checkpoint.")],
    repeats: Annotated[int, typer.Option(min=1, help="Processes of each kind.")] = 2,
    once: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Measure both ways in turn and print a table."""
    if once:
        typer.echo(json.dumps(measured(model)))
        return
    found: dict[str, list[dict[str, float]]] = {"1": [], "0": []}
    for turn in range(repeats):
        for kernels, runs in found.items():
            environment = {**os.environ, "PALESTRA_KERNELS": kernels, "GOMP_SPINCOUNT": "20000"}
            command = [sys.executable, "-m", "bench.kernels", model, "--once"]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
            typer.echo(f"run {turn + 1}, PALESTRA_KERNELS={kernels}: {runs[-1]}", err=True)
    typer.echo(table(found))


if __name__ == "__main__":
    app()
