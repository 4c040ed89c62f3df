# SPDX-License-Identifier: Apache-2.0
"""The verbs ``rewards`` and ``data``: what a reward pays for, and what a data file holds, before a run learns it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from pydantic import ConfigDict
from rich.console import Console

from palestra.config import Config, load, read_yaml
from palestra.errors import ConfigError
from palestra.verbs_check import add_verb as add_check_verb
from palestra.verbs_tables import show_ablation, show_inspection

if TYPE_CHECKING:
    from palestra.reward.rubric import Rubric
    from palestra.types import Group

rewards_app = typer.Typer(help="What a reward pays for.", no_args_is_help=True)
data_app = typer.Typer(help="Data files: check, augment, measure.", no_args_is_help=True)
add_check_verb(data_app)

Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
PROBED_TASKS = 20
T = TypeVar("T")


@rewards_app.command()
def inspect(
    path: Annotated[
        Path, typer.Argument(metavar="CONFIG.yaml|ROLLOUTS", help="A config, a run directory or a rollouts file.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="rewards.part=…", help="Overrides of the config's rewards.")
    ] = None,
    rollouts: Annotated[
        Path | None, typer.Option(help="Run or rollouts file to score (default: the config's `out`).")
    ] = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Play so many episodes with the config's model, instead of reading any.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Step whose rollouts are read (default: the last).")] = None,
    groups: Annotated[int, typer.Option(min=1, help="How many groups are read.")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Show what each part of a reward does on episodes, what probes for hacking would earn, and what to change.

    A config (or an override) scores recorded episodes again; a run or rollouts file alone shows what was recorded;
    --sample plays episodes as the config's training would begin with.
    """
    from palestra.cli import _told

    with _told(debug):
        from dataclasses import asdict

        from palestra.reward.advice import advise
        from palestra.reward.inspection import inspect_groups
        from palestra.reward.probes import probe

        if sample is None:
            what, read, rubric = _recorded(path, overrides, rollouts, step, groups)
        else:
            what, read, rubric = _sampled(path, overrides, sample, quiet=as_json)
        found = inspect_groups(read)
        probes = []
        if rubric is not None and rubric.functions:
            probes = probe(rubric, read[:PROBED_TASKS], shown=lambda groups: _shown(groups, "probing"))
        advice = advise(found, rubric)
        if as_json:
            plain = {"rollouts": what, **found.to_dict(), "probes": [asdict(p) for p in probes]}
            typer.echo(json.dumps(plain | {"advice": [asdict(a) for a in advice]}, ensure_ascii=False))
            return
        show_inspection(Console(highlight=False), what, found, probes, rubric, advice)


Read = tuple[str, "list[Group]", "Rubric | None"]
"""What was read, the groups, and the rubric where a config names one."""


def _recorded(
    path: Path, overrides: Sequence[str] | None, rollouts: Path | None, step: int | None, groups: int
) -> Read:
    from palestra.reward.inspection import score_again
    from palestra.rollout.dump import read_rollouts
    from palestra.run.view import rollouts_of

    config = path if path.suffix in (".yaml", ".yml") else None
    settings = _rewards_of(config or _config_beside(path), overrides)
    if config is not None and settings is not None:
        path = rollouts or Path(settings.out)
    file = rollouts_of(path, step) if path.is_dir() else path
    with Console(stderr=True).status(f"reading {file}"):
        read = list(islice(read_rollouts(file), groups))
    again = config is not None or bool(overrides)
    rubric = None if settings is None else settings.rubric(probing=not again)
    if rubric is not None and again:
        read = score_again(rubric, _shown(read, "scoring"))
    return str(file), read, rubric


def _shown(items: Sequence[T], doing: str) -> Iterable[T]:
    """The items one by one, with a bar on standard error until the last."""
    from rich.progress import track

    return track(items, description=doing, console=Console(stderr=True), transient=True)


def _sampled(path: Path, overrides: Sequence[str] | None, episodes: int, *, quiet: bool) -> Read:
    from palestra.run.progress import Progress
    from palestra.train.config import RLConfig
    from palestra.train.played import play_groups

    settings = load(path, list(overrides or ()), RLConfig)
    with Progress(Console(stderr=True), quiet=quiet) as progress:
        played, rubric = play_groups(settings, episodes, progress=progress)
    before = ", before its warm-up" if settings.warmup is not None else ""
    return f"{path}, played by {settings.model.path}{before}", played, rubric


@rewards_app.command()
def ablate(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The config of `palestra rl`.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key.sub=value", help="Overrides of the config, the value as YAML.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the runs go (default: the config's `out` with -ablation behind).")
    ] = None,
    parts: Annotated[str, typer.Option(help="Parts to switch off, separated by commas (default: all).")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each kind; one cannot tell noise from movement.")] = 3,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each run (default: train.steps).")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (also in ablation.json).")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    debug: Debug = False,
) -> None:
    """Train with one part of the reward off each, and say what that changed. Call it again to go on."""
    from palestra.cli import _told

    with _told(debug):
        from palestra.run.progress import Progress
        from palestra.train.ablate import ablate as run_all
        from palestra.train.ablate import trials
        from palestra.train.config import RLConfig

        settings = load(config, list(overrides or ()), RLConfig)
        where = out or Path(f"{settings.out}-ablation")
        wanted = [name.strip() for name in parts.split(",") if name.strip()]
        runs = trials(settings, where, parts=wanted, seeds=seeds, steps=steps)
        if dry_run:
            for trial in runs:
                done = "done" if trial.summary() is not None else f"{trial.config.train.steps} steps"
                typer.echo(f"{trial.off:>24}  seed {trial.config.seed}  {done:>10}  {trial.folder}")
            return
        with Progress(Console(stderr=True, highlight=False), quiet=quiet) as progress:
            found = run_all(runs, where, progress=progress)
        if as_json:
            typer.echo((where / "ablation.json").read_text(encoding="utf-8"))
        else:
            show_ablation(Console(highlight=False), found)


class RewardsOf(Config):
    """Of a root config, what scoring needs; its other keys are left alone."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    rewards: dict[str, float | dict[str, Any]] | None = None
    renderer: str | dict[str, Any] = "chat"
    out: str = "runs/latest"

    def rubric(self, *, probing: bool = False) -> Rubric:
        """The rubric, as the run would make it. probing: what only the policy can measure abstains."""
        from palestra.reward import functions as functions  # the package registers the built-in rewards
        from palestra.reward.build import make_rubric
        from palestra.reward.information import by_policy

        def abstain(completions: Sequence[Any]) -> list[None]:
            return [None] * len(completions)

        name = self.renderer if isinstance(self.renderer, str) else self.renderer.get("name")
        rewards = self.rewards
        if probing and rewards is not None:
            rewards = {n: by_policy(n, entry, "abstain") for n, entry in rewards.items()}
        return make_rubric(rewards, chat=name != "plain", functions={"abstain": abstain})


def _rewards_of(config: Path | None, overrides: Sequence[str] | None) -> RewardsOf | None:
    if config is None:
        if overrides:
            raise ConfigError("overrides change a config, and there is none beside these rollouts: name a CONFIG.yaml")
        return None
    stray = next((o for o in overrides or () if o.split(".")[0].split("=")[0] not in RewardsOf.model_fields), None)
    if stray is not None:
        raise ConfigError(f"override {stray!r} does not change how episodes are scored: override rewards or renderer")
    known = {k: v for k, v in read_yaml(config).items() if k in (*RewardsOf.model_fields, "format")}
    return load(known, list(overrides or ()), RewardsOf)


def _config_beside(path: Path) -> Path | None:
    """The config of the run that a run directory or rollouts file belongs to."""
    folder = path if path.is_dir() else path.resolve().parent.parent
    return config if (config := folder / "config.yaml").is_file() else None


@data_app.command()
def augment(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A table of questions and answers.")],
    out: Annotated[Path, typer.Option("--out", help="Where the new rows are written, as JSONL.")],
    kinds: Annotated[str, typer.Option(help="numbers, names, order, wording; separated by commas.")] = "numbers,names",
    copies: Annotated[int, typer.Option(min=1, help="New rows of each kind for each row.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    originals: Annotated[bool, typer.Option(help="Write the rows of FILE too.")] = True,
    debug: Debug = False,
) -> None:
    """Write more rows with answers that are right for certain: numbers recomputed, names, order, wording."""
    from palestra.cli import _told

    with _told(debug):
        from collections import Counter

        from palestra.data.augment import augment as more
        from palestra.data.tables import read_table

        rows = [row for _, row in read_table(file)]
        if out.exists() and out.samefile(file):
            raise ConfigError(f"{out} is the file that is read; write the new rows to another one")
        counts: Counter[str] = Counter()
        shown, written = _shown(rows, f"augmenting {file.name}"), rows[:] if originals else []
        for kind, row in more(shown, [k.strip() for k in kinds.split(",")], copies=copies, seed=seed):
            counts[kind] += 1
            written.append(row)
        _write_rows(out, written)
        made = ", ".join(f"{kind} {n}" for kind, n in sorted(counts.items())) or "none could be made"
        typer.echo(f"{out}: {len(rows) if originals else 0} rows of {file}, new ones: {made}")


@data_app.command()
def difficulty(
    rollouts: Annotated[
        list[Path], typer.Argument(metavar="RUN|ROLLOUTS…", help="Run directories (all their rollouts) or files.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Where the pass rates are written, as JSON.")],
    part: Annotated[str, typer.Option(help="The reward part that says whether a task was passed.")] = "accuracy",
    passed: Annotated[float, typer.Option(help="The value from which it was.")] = 1.0,
    debug: Debug = False,
) -> None:
    """Count how often each task was passed, for a curriculum (data source `curriculum`, key `pass_rates`)."""
    from palestra.cli import _told

    with _told(debug):
        from palestra.data.curriculum import pass_rates, write_pass_rates
        from palestra.errors import DataError
        from palestra.rollout.dump import read_rollouts

        files = _shown(_rollout_files(rollouts), "reading")
        rates = pass_rates((group for file in files for group in read_rollouts(file)), part, passed)
        if not rates:
            raise DataError(f"no episode has a value of the part {part!r}: check --part and the rollouts")
        write_pass_rates(out, rates, part)
        never, always = (sum(r == edge for r in rates.values()) for edge in (0.0, 1.0))
        typer.echo(f"{out}: {len(rates)} tasks, {never} never passed, {always} always")


@data_app.command()
def posed(
    rollouts: Annotated[
        list[Path], typer.Argument(metavar="RUN|ROLLOUTS…", help="Run directories (all their rollouts) or files.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Where the problems are written, as JSONL.")],
    debug: Debug = False,
) -> None:
    """Collect the problems that a model posed itself (environment `self_question`), each once, with their solutions."""
    from palestra.cli import _told

    with _told(debug):
        from palestra.data.posed import posed_rows
        from palestra.errors import DataError
        from palestra.rollout.dump import read_rollouts

        files = _shown(_rollout_files(rollouts), "reading")
        rows = list(posed_rows(group for file in files for group in read_rollouts(file)))
        if not rows:
            raise DataError("no episode posed a problem that could be checked: are these of the env self_question?")
        _write_rows(out, rows)
        typer.echo(f"{out}: {len(rows)} problems")


def _write_rows(out: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Rows as JSONL, whole or not at all."""
    from palestra.run.files import write_text

    write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _rollout_files(paths: Sequence[Path]) -> list[Path]:
    return [f for path in paths for f in (sorted(path.glob("rollouts/*")) if path.is_dir() else [path])]
