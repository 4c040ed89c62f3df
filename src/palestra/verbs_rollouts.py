# SPDX-License-Identifier: Apache-2.0
"""The verbs about episodes themselves: play and keep them, look at them, learn from them once more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def add_verbs(app: typer.Typer) -> None:
    """Put the verbs of this module beside the others."""
    for verb in (sample, view, replay):
        app.command()(verb)


def sample(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The config file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key.sub=value", help="Overrides of the config, the value as YAML.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Run directory (overrides the config's `out`).")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved plan and stop; writes nothing.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the run directory.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, only errors.")] = False,
    debug: Debug = False,
) -> None:
    """Play episodes and keep them: rollouts, dialogues for sft, pairs for prefer."""
    from palestra.cli import _Given, _perform, _told

    with _told(debug):
        given = _Given(config, overrides, out, dry_run, quiet)
        _perform("palestra.train.sample_config:SampleConfig", "palestra.train.sample:run_sample", given, resume=resume)


def view(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_ROLLOUTS", help="A run directory or a rollouts file.")],
    step: Annotated[int | None, typer.Option(help="Step whose rollouts are shown (default: the last).")] = None,
    groups: Annotated[int, typer.Option(min=1, help="How many groups are shown.")] = 4,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report page instead.")] = None,
    debug: Debug = False,
) -> None:
    """Show episodes: question, responses, tool results, reward by part, advantage, mask."""
    from palestra.cli import _told

    with _told(debug):
        from itertools import islice

        from palestra.rollout.dump import group_from_dict
        from palestra.run.view import read_groups, rollouts_of, show_group

        file = rollouts_of(path, step) if path.is_dir() else path
        chosen = list(islice(read_groups(file), groups))
        for number, group in enumerate(chosen, start=1):
            group_from_dict(group, f"{file}:{number}")  # what is shown below has every field
        if html is not None:
            _write_html(html, path, file, chosen)
            return
        console = Console(highlight=False)
        console.print("+ marks what the model wrote: the tokens that are trained on", style="dim")
        for group in chosen:
            console.print(show_group(group))


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory of `palestra rl`.")],
    step: Annotated[int | None, typer.Option(help="Step to take again (default: the last that can be).")] = None,
    drift: Annotated[
        bool, typer.Option("--drift", help="Also compare the sampler's log-probs with the trainer's, token by token.")
    ] = False,
    fault: Annotated[
        Path | None, typer.Option(help="Instead: a batch of a skipped step (RUN/faults/…), what of it is not finite.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Take a recorded step again, in memory: does the same batch give the same loss? Exit code 1 where it does not."""
    from palestra.cli import _told

    with _told(debug):
        from palestra.train.fault_replay import replay_fault
        from palestra.train.replay import replay as replay_step

        if fault is not None:
            shown = replay_fault(run, fault)
            typer.echo(json.dumps(shown.to_dict(), ensure_ascii=False) if as_json else shown.text())
            return
        found = replay_step(run, step, drift=drift)
        typer.echo(json.dumps(found.to_dict(), ensure_ascii=False) if as_json else found.text())
    if not found.same:
        raise typer.Exit(1)


def _write_html(html: Path, path: Path, file: Path, groups: list[dict[str, Any]]) -> None:
    from palestra.run.files import read_json
    from palestra.run.report import write_report
    from palestra.run.trackers import read_metrics

    metrics = read_metrics(path / "metrics.jsonl") if path.is_dir() else []
    stored = path / "summary.json"
    summary = read_json(stored, "remove it to have a report without it") if stored.is_file() else {}
    write_report(html, title=f"{path.name}: {file.name}", summary=summary, metrics=metrics, groups=groups)
    typer.echo(f"report in {html}")
