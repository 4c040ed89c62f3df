# SPDX-License-Identifier: Apache-2.0
"""The verb ``compare``: two evaluations on the same tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def add_verbs(app: typer.Typer) -> None:
    """Make this file's verb one of the command."""
    app.command()(compare)


def compare(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="A run directory of `palestra eval`.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="Another one, on the same tasks.")],
    metric: Annotated[str | None, typer.Option(help="The reward part compared (default: the one both report).")] = None,
    examples: Annotated[int, typer.Option(min=0, help="How many fixed and broken tasks are shown.")] = 10,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with all of them.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Compare two evaluations task by task: what was fixed, what broke, and whether it is more than chance."""
    from palestra.cli import _told

    with _told(debug):
        from palestra.eval.compare import compare_runs
        from palestra.eval.report import render_comparison
        from palestra.run.files import write_text
        from palestra.run.text import visible

        found = compare_runs(before, after, metric)
        if html is not None:
            write_text(html, render_comparison(found))
        if as_json:
            typer.echo(json.dumps(found.to_dict(), ensure_ascii=False))
            return
        typer.echo(f"{found.metric}: {found.before:.3f} → {found.after:.3f} on {found.tasks} tasks")
        typer.echo(found.verdict)
        for name, (a, b) in found.parts.items():
            typer.echo(f"  {name}: {a:.3f} → {b:.3f}")
        for label, changes in (("fixed", found.fixed), ("broken", found.broken)):
            for change in changes[:examples]:
                typer.echo(f"  {label} {visible(change.task)}: {visible(change.question)[:100]}")
            if len(changes) > examples:
                typer.echo(f"  and {len(changes) - examples} more {label} (--json has all)")
        if html is not None:
            typer.echo(f"page in {html}")
