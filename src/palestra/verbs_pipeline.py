# SPDX-License-Identifier: Apache-2.0
"""The verbs ``pipeline`` and ``sweep``: several runs from one config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The config file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="key.sub=value", help="Overrides of the config, the value as YAML.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Directory of all runs (overrides the config's `out`).")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done and stop; writes nothing.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only errors.")]


def add_verbs(app: typer.Typer) -> None:
    """File the verbs of this module."""
    app.command()(pipeline)
    app.command()(sweep)


def pipeline(
    config: ConfigFile,
    overrides: Overrides = None,
    out: Out = None,
    start: Annotated[str | None, typer.Option("--from", metavar="STAGE", help="Repeat from this stage on.")] = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run stages (data, check, sft, eval, gate, rl, …), none twice. Exit code 1 when a gate says stop."""
    from palestra.cli import _load, _progress, _told

    with _told(debug):
        from palestra.pipeline import PipelineConfig, describe, run_pipeline

        settings = _load(config, overrides, out, PipelineConfig)
        if dry_run:
            typer.echo(describe(settings))
            return
        with _again(settings.out), _progress(quiet) as progress:
            summary = run_pipeline(settings, progress=progress, start=start)
        if not quiet:
            Console(highlight=False).print(_stages(summary))
            typer.echo(f"results in {Path(settings.out) / 'summary.json'}")
    if summary["reason"] is not None:
        typer.echo(summary["reason"], err=True)
        raise typer.Exit(1)


@contextmanager
def _again(out: str) -> Iterator[None]:
    """Ctrl-C says how to go on."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"the same command again goes on with {out}") from stop


def _stages(summary: Mapping[str, Any]) -> Table:
    from palestra.run.progress import clock, number

    table = Table("stage", "", "time", "", box=SIMPLE_HEAD)
    for name, result in summary["stages"].items():
        shown = {k: v for k, v in result["summary"].items() if k in _SHOWN and isinstance(v, int | float)}
        told = ", ".join(f"{key.replace('_', ' ')} {number(value)}" for key, value in shown.items())
        table.add_row(name, result["status"], clock(result["seconds"]), told)
    return table


_SHOWN = (
    *("accuracy", "accuracy_before", "accuracy_after", "before", "after", "p_value", "final_loss", "steps", "train"),
    *("test", "errors", "tasks", "episodes", "pairs", "reward_mean", "parameters"),
)


def sweep(
    config: ConfigFile,
    overrides: Overrides = None,
    out: Out = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Search for a good config: grid, random or TPE; trials in parallel; run again to go on where it stopped."""
    from palestra.cli import _load, _progress, _told

    with _told(debug):
        from palestra.run.directory import check_writable
        from palestra.sweep import SweepConfig, describe, run_sweep

        settings = _load(config, overrides, out, SweepConfig)
        if dry_run:
            typer.echo(describe(settings))
            return
        check_writable(settings.out)
        with _again(settings.out), _progress(quiet) as progress:
            summary = run_sweep(settings, progress=progress)
        if not quiet:
            Console(highlight=False).print(_trials(summary))
            typer.echo(
                f"the best config is {summary['best_config']}, all trials in {Path(settings.out) / 'report.html'}"
            )


def _trials(summary: Mapping[str, Any]) -> Table:
    names = list(dict.fromkeys(name for trial in summary["trials"] for name in trial["params"]))
    table = Table("trial", *names, summary["metric"], "", box=SIMPLE_HEAD)
    for trial in summary["trials"]:
        value = "" if trial["value"] is None else f"{trial['value']:.4g}"
        why = " (best)" if trial["number"] == summary["best"] else f": {trial['error']}" if trial["error"] else ""
        values = (f"{trial['params'][n]}" for n in names)
        table.add_row(str(trial["number"]), *values, value, escape(f"{trial['status']}{why}"))
    return table
