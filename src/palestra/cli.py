# SPDX-License-Identifier: Apache-2.0
"""The command ``palestra``: which verb was asked for, and how a mistake is told.

Exit codes: 0 done, 1 something failed, 2 a mistake in what was asked, 130 interrupted. What a verb needs is
imported when the verb runs, so that ``palestra --help`` is quick.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer
from rich.console import Console
from typer.core import TyperGroup

from palestra import config as configuration
from palestra.errors import UserError
from palestra.run.interrupt import heed_termination
from palestra.run.progress import Progress, clock, number
from palestra.verbs_data import data_app, rewards_app
from palestra.verbs_eval import add_verbs as add_eval_verbs
from palestra.verbs_pipeline import add_verbs as add_pipeline_verbs
from palestra.verbs_rollouts import add_verbs as add_rollout_verbs

C = TypeVar("C", bound=configuration.Config)
_UsageError: Any = typer.BadParameter.__base__
"""What a command line that makes no sense raises; some releases of typer carry click inside, so neither is named."""


class _Root(TyperGroup):
    """The command and all its verbs: a command line that makes no sense is told in one line, like any mistake."""

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with _usage_told():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _usage_told():
            return super().invoke(ctx)


@contextmanager
def _usage_told() -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        if type(error).show is not _UsageError.show:  # a verb alone shows its help
            raise
        said, command = _line(error.format_message()).rstrip("."), getattr(error.ctx, "command_path", "palestra")
        if "." in getattr(error, "option_name", ""):
            said += " (keys of the config are written without dashes: key.sub=value)"
        said = f"{said[:1].lower()}{said[1:]}{'' if said.endswith('?') else ';'}"
        typer.echo(f"error: {said} `{command} --help` shows what there is", err=True)
        raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Root,
    help="Trains language agents by reinforcement learning. Begin with `palestra demo`; see `palestra VERB --help`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(rewards_app, name="rewards")
app.add_typer(data_app, name="data")

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The config file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="key.sub=value", help="Overrides of the config, the value as YAML.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Run directory (overrides the config's `out`).")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved plan and stop; writes nothing.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the run directory.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only errors.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"palestra {_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Run directory (default: the first free of runs/demo, runs/demo-2, …)."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="RL steps (default: as many as the demo needs).")] = None,
    resume: Resume = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a small model from scratch to use a calculator, in minutes, with nothing to download."""
    with _told(debug):
        where = out or (_latest(Path("runs/demo")) if resume else _fresh(Path("runs/demo")))
        _check_out(where, resume=resume)
        from palestra.train.demo import run_demo

        with _left(where), _progress(quiet) as progress:
            summary = run_demo(where, seed=seed, steps=steps, progress=progress, resume=resume)
        _done(where, summary, quiet)


@app.command()
def sft(
    config: ConfigFile,
    overrides: Overrides = None,
    out: Out = None,
    dry_run: DryRun = False,
    resume: Resume = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Fine-tune on demonstrations: only what the assistant writes is trained on."""
    with _told(debug):
        given = _Given(config, overrides, out, dry_run, quiet)
        _perform("palestra.train.config:SFTConfig", "palestra.train.sft:train_sft", given, resume=resume)


@app.command()
def prefer(
    config: ConfigFile,
    overrides: Overrides = None,
    out: Out = None,
    dry_run: DryRun = False,
    resume: Resume = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Learn from preferences: DPO, IPO, KTO, SimPO, ORPO."""
    with _told(debug):
        given = _Given(config, overrides, out, dry_run, quiet)
        _perform(
            "palestra.train.preference_config:PreferConfig", "palestra.train.prefer:train_prefer", given, resume=resume
        )


@app.command("reward-model")
def reward_model(
    config: ConfigFile,
    overrides: Overrides = None,
    out: Out = None,
    dry_run: DryRun = False,
    resume: Resume = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a model that scores replies, on pairs."""
    with _told(debug):
        given = _Given(config, overrides, out, dry_run, quiet)
        _perform(
            "palestra.train.preference_config:RewardModelConfig",
            "palestra.train.reward_model:train_reward_model",
            given,
            resume=resume,
        )


@app.command()
def rl(
    config: ConfigFile,
    overrides: Overrides = None,
    out: Out = None,
    dry_run: DryRun = False,
    resume: Resume = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Improve a model by reinforcement learning on episodes."""
    with _told(debug):
        given = _Given(config, overrides, out, dry_run, quiet)
        _perform("palestra.train.config:RLConfig", "palestra.train.rl:train_rl", given, resume=resume)


@app.command("eval")
def evaluate(
    config: ConfigFile,
    overrides: Overrides = None,
    out: Out = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Play held-out tasks: accuracy with its interval, pass@k, kinds of mistakes."""
    with _told(debug):
        given = _Given(config, overrides, out, dry_run, quiet)
        _perform("palestra.train.config:EvalConfig", "palestra.train.evaluation:run_eval", given)


@app.command()
def doctor(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, finished or running.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the alarms as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Say what looks sick in a run: since when, what usually causes it, what to change."""
    with _told(debug):
        from palestra.run.doctor import diagnose
        from palestra.train.config import RAILS

        diagnosis = diagnose(run, rails=RAILS)
        typer.echo(json.dumps(diagnosis.to_dict(), ensure_ascii=False) if as_json else diagnosis.text())


@app.command()
def profile(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, finished or running.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Say where the seconds of a step went, beside what is typical elsewhere, and what to change."""
    with _told(debug):
        from palestra.run import profile as measured

        found = measured.profile(run)
        typer.echo(json.dumps(found.to_dict(), ensure_ascii=False) if as_json else found.text())


@app.command()
def selfcheck(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE.jsonl", help="Known answers of your own (default: ours).")
    ] = None,
    debug: Debug = False,
) -> None:
    """Compute known answers on this machine: advantages, losses, masks, answers, pass@k. Exits 1 if one fails."""
    with _told(debug):
        from palestra.selfcheck.run import tell

        whole = tell(file, typer.echo)
    if not whole:
        raise typer.Exit(1)


add_rollout_verbs(app)  # `palestra --help` lists verbs in this order: the training ones first
add_pipeline_verbs(app)
add_eval_verbs(app)


def main() -> None:
    """Entry point of the command ``palestra``."""
    # Between two small kernels a thread that sleeps is woken too late (decoding takes almost twice as long), and one
    # that spins without end makes a busy machine many times slower. GNU's OpenMP reads this once, at torch's import.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    heed_termination()
    app()


@contextmanager
def _told(debug: bool) -> Iterator[None]:
    """A mistake or a failure becomes one line on stderr and an exit code; ``debug`` shows the traceback too."""
    try:
        yield
    except KeyboardInterrupt as stop:
        _fail(f"interrupted{f': {stop}' if str(stop) else ''}", 130, debug)
    except UserError as error:
        _fail(f"error: {_line(error)}", 2, debug)
    except BrokenPipeError:
        raise  # the reader of our output went away (`| head`); typer ends quietly
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # struck while a module was imported
            _fail("interrupted", 130, debug)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            _fail(f"error: the disk is full ({_line(error)}); free some space or choose another --out", 2, debug)
        said = f"{type(error).__name__}: {_line(error)}" if str(error) else type(error).__name__
        _fail(f"error: {said} (run again with --debug for the traceback)", 1, debug)


def _fail(line: str, code: int, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    typer.echo(line, err=True)
    raise typer.Exit(code)


@contextmanager
def _left(out: Path, *, resumable: bool = True) -> Iterator[None]:
    """Ctrl-C says what is in the run directory and, where the verb has ``--resume``, how to go on."""
    try:
        yield
    except KeyboardInterrupt as stop:
        kept = [mark.parent for at in ("warmup", "checkpoints") for mark in sorted(out.glob(f"{at}/step_*/COMPLETE"))]
        if not (out / "run.json").exists():
            raise KeyboardInterrupt("nothing was written that is worth keeping") from stop
        there = f"the last checkpoint is {kept[-1]}" if kept else f"what was done is in {out}"
        raise KeyboardInterrupt(there + ("; go on by --resume" if resumable else "")) from stop


def _line(error: object) -> str:
    return " ".join(str(error).split())


def _load(path: Path, overrides: list[str] | None, out: Path | None, cls: type[C]) -> C:
    """The config, ``--out`` counting as its last override."""
    chosen = [] if out is None else [f"out={json.dumps(str(out))}"]
    return configuration.load(path, [*(overrides or []), *chosen], cls)


def _plan(settings: configuration.Config) -> None:
    typer.echo(_named("palestra.train.plan:describe")(settings))


def _progress(quiet: bool) -> Progress:
    return Progress(Console(highlight=False), quiet=quiet)


class _Given(NamedTuple):
    """What was asked of a verb with a config."""

    config: Path
    overrides: list[str] | None
    out: Path | None
    dry_run: bool
    quiet: bool


def _perform(settings_at: str, loop_at: str, given: _Given, **options: bool) -> None:
    """What the verbs with a config do: load it, and print its plan or run its loop (both as ``module:name``)."""
    settings = _load(given.config, given.overrides, given.out, _named(settings_at))
    if given.dry_run:
        _plan(settings)
        return
    _check_out(Path(settings.out), resume=options.get("resume", False))
    with _left(Path(settings.out), resumable="resume" in options), _progress(given.quiet) as progress:
        summary = _named(loop_at)(settings, progress=progress, **options)
    _done(Path(settings.out), summary, given.quiet)


def _check_out(out: Path, *, resume: bool) -> None:
    """A run directory that cannot be used is told before a model is loaded."""
    from palestra.run.directory import check_free, check_writable

    (check_writable if resume else check_free)(out)


def _named(at: str) -> Any:
    module, name = at.split(":")
    return getattr(importlib.import_module(module), name)


def _fresh(path: Path) -> Path:
    """``path``, or the first of path-2, path-3, … that does not exist yet: a second demo just runs."""
    candidate, n = path, 1
    while candidate.exists():
        n += 1
        candidate = path.with_name(f"{path.name}-{n}")
    return candidate


def _latest(path: Path) -> Path:
    """The last of ``path``, path-2, path-3, … that exists, or ``path``."""
    following = _fresh(path)
    if following == path:
        return path
    n = int(following.name.rpartition("-")[2]) - 1
    return path if n == 1 else path.with_name(f"{path.name}-{n}")


def _done(where: Path, summary: Mapping[str, Any], quiet: bool) -> None:
    """The run's numbers and where to look."""
    if quiet:
        return
    for name, value in summary.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "format":
            typer.echo(f"{name.replace('_', ' '):>24}  {clock(value) if name == 'seconds' else number(value)}")
    report = where / "report.html"
    also = f", report in {report}" if report.exists() else ""
    typer.echo(f"results in {where}{also}" + (f"; what rang: palestra doctor {where}" if summary.get("alarms") else ""))


def _version() -> str:
    try:
        return metadata.version("palestra")
    except metadata.PackageNotFoundError:
        return "(not installed)"
