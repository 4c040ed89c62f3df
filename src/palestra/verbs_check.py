# SPDX-License-Identifier: Apache-2.0
"""The verb ``data check``: what is wrong with a data file, before a run learns it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from palestra.errors import ConfigError
from palestra.verbs_tables import RED, YELLOW

if TYPE_CHECKING:
    from palestra.data.check import Report, Verify
    from palestra.types import Task


Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def add_verb(app: typer.Typer) -> None:
    """File the verb of this module."""
    app.command()(check)


def check(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A data file, or a directory with train and test files.")
    ],
    test: Annotated[Path | None, typer.Option(help="A file that should share no question with FILE.")] = None,
    form: Annotated[
        str | None, typer.Option(help="rl, sft, dialogue or preference (default: as the rows look).")
    ] = None,
    mode: Annotated[str | None, typer.Option(help="How answers are compared: numeric, boxed or math.")] = None,
    max_prompt: Annotated[int | None, typer.Option(min=1, help="Longest prompt, in characters or tokens.")] = None,
    model: Annotated[str | None, typer.Option(help="Count tokens of this model instead of characters.")] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="CONFIG.yaml", help="Measure prompts against the limits of this config.")
    ] = None,
    near: Annotated[bool, typer.Option(help="Look for near duplicates.")] = True,
    examples: Annotated[int, typer.Option(min=0, help="How many faults of a kind are shown.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every fault.")] = False,
    debug: Debug = False,
) -> None:
    """Look for what is wrong with a data file before a model learns it. Exit code 1 when there are errors."""
    from palestra.cli import _told

    with _told(debug):
        from palestra.data.check import check_files
        from palestra.data.tables import table_file

        if file.is_dir():
            folder, file = file, table_file(str(file), "train")
            test = test or next(iter(sorted(f for f in folder.glob("test.*") if f.suffix == file.suffix)), None)
        with Console(stderr=True).status("loading the tokenizer" if model or config else "reading") as status:
            sizes = _sizes(file, model, max_prompt, config)
            told = status.update
            report = check_files(file, test, form=form, verify=_verifier(mode), near=near, told=told, **sizes)
        if as_json:
            typer.echo(json.dumps(report.to_dict(), ensure_ascii=False))
        else:
            _show_report(Console(highlight=False), report, examples)
    if report.errors:
        raise typer.Exit(1)


def _verifier(mode: str | None) -> Verify:
    """A task's gold answer must pass its own verifier, in the mode that is chosen, or its own, or looks right."""
    from palestra.errors import unknown
    from palestra.reward.answers import MODES
    from palestra.reward.validate import validate

    if mode is not None and mode not in MODES:
        raise ConfigError(unknown("answer mode", mode, MODES))

    def verify(task: Task) -> list[str]:
        chosen = mode or str(task.meta.get("mode") or ("math" if "\\" in str(task.answer) else "numeric"))
        return validate([task], chosen)

    return verify


def _sizes(file: Path, model: str | None, max_prompt: int | None, config: Path | None) -> dict[str, Any]:
    """How prompts are measured, and how long they may be."""
    if config is None:
        return {"limit": max_prompt} | ({} if model is None else {"length": _tokens(model), "unit": "tokens"})
    if model is not None:
        raise ConfigError("--config names the model whose tokens are counted: leave --model out")
    from palestra.prompt_limits import limit_of

    found = limit_of(config, file)
    told = found.told if max_prompt is None else "--max-prompt"
    most = found.most if max_prompt is None else max_prompt
    return {"length": found.length, "unit": "tokens", "limit": most, "limited_by": told, "whole": found.whole}


def _tokens(model: str) -> Callable[[str], int]:
    from palestra.model.loading import load_model

    tokenizer = load_model(model, device="cpu").tokenizer
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _show_report(console: Console, report: Report, examples: int) -> None:
    from palestra.run.text import visible

    for name, rows in report.rows.items():
        console.print(f"{name}: {rows} rows, read as {report.forms[name]}")
    kinds = list(dict.fromkeys(f.kind for f in report.findings))
    for kind in kinds:
        found = [f for f in report.findings if f.kind == kind]
        console.print(f"{kind.replace('_', ' ')}: {len(found)}", style=RED if found[0].error else YELLOW)
        for finding in found[:examples]:
            console.print(Text(f"  {', '.join(finding.rows)}: {visible(finding.message)}"))
        if len(found) > examples:
            console.print(f"  and {len(found) - examples} more (--json has all)", style="dim")
    _show_lengths(console, report)
    warnings = len(report.findings) - report.errors
    console.print(f"{report.errors} errors, {warnings} warnings" if kinds else "nothing wrong was found")


def _show_lengths(console: Console, report: Report) -> None:
    most = max((n for _, _, n in report.histogram), default=0)
    by = f" ({report.limited_by})" if report.limited_by else ""
    limit = f", limit {report.limit}{by}" if report.limit is not None else ""
    what = "length of prompt and reply" if report.whole else "prompt length"
    console.print(f"{what} in {report.unit}: longest {report.longest}{limit}")
    for low, high, n in report.histogram:
        over = report.limit is not None and low >= report.limit
        bar = "█" * round(40 * n / most) or ("▏" if n else "")
        console.print(Text(f"  {low:>7} … {high:<7} {n:>7} {bar}", RED if over else ""))
