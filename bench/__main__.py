# SPDX-License-Identifier: Apache-2.0
"""``python -m bench``: run benches by name or by suite, print the table, write the rows."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

import bench.benches  # noqa: F401  registers every bench
from bench.lab import BENCHES, Lab, Settings, run
from bench.rows import Results
from bench.table import advice, page_text, table, write_page
from bench.workers import ROOT
from palestra.errors import ConfigError, UserError, unknown

SUITES = {"core": ("core",), "full": ("core", "full"), "learn": ("learn",)}
"""core: what `make bench` runs. full: that and the curves. learn: rows that train to an accuracy."""
PEERS = ("hf", "trl", "vllm")


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME|SUITE]…", help="Benches or suites.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Where the rows are kept.")] = None,
    models: Annotated[Path, typer.Option(help="Where the models are kept.")] = ROOT / "bench" / ".models",
    peers: Annotated[
        Path, typer.Option(envvar="PALESTRA_PEERS", help="Folder with the environments `trl` and `vllm`.")
    ] = ROOT / "bench" / ".peers",
    against: Annotated[str, typer.Option(help="Peers to measure, of hf, trl and vllm.")] = ",".join(PEERS),
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, whose median counts.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of every process (default: the cores).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models and sizes: does it run? Judges nothing.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the rows that FILE has, measure the others.")] = False,
    page: Annotated[Path | None, typer.Option(help="Page whose table is replaced.")] = None,
    show: Annotated[bool, typer.Option("--list", help="List the benches and stop.")] = False,
) -> None:
    """Measure ours and its peers on the same work, in turns, and compare the medians."""
    if show:
        for name in BENCHES:
            typer.echo(f"{name:>12}  {BENCHES[name].suite:<6} {BENCHES[name].about}")
        return
    try:
        settings = Settings(
            models=models.absolute(),
            logs=(json_file.parent if json_file else models).absolute() / "logs",
            peers=peers.absolute(),
            against=_peers(against),
            repeats=repeats,
            quick=quick,
            threads=threads or _cores(),
        )
        lab = Lab(settings, Results(json_file, resume=resume), resume=resume, tell=typer.echo)
        made = run(lab, _chosen(names or ["core"]))
        typer.echo("\n".join(["", table(lab.results.rows), "", *advice(lab.results.rows)]))
        if page is not None:
            write_page(page, page_text(lab.results.rows, f"python -m bench {shlex.join(sys.argv[1:])}"))
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if any(row["ours"] is None for row in made):
        raise typer.Exit(1)


def _cores() -> int:
    """How many this process may use, where the system tells."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def _chosen(names: list[str]) -> list[str]:
    """Names and suites as benches, each once, the ceilings before all others."""
    chosen = ["ceilings"]
    for name in names:
        named = [b for b in BENCHES if BENCHES[b].suite in SUITES[name]] if name in SUITES else [name]
        chosen += [b for b in named if BENCHES[b] and b not in chosen]
    return chosen


def _peers(text: str) -> tuple[str, ...]:
    """The peers of an ``--against``."""
    chosen = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in chosen:
        if name not in PEERS:
            raise ConfigError(unknown("peer", name, PEERS))
    return chosen


if __name__ == "__main__":
    app()
