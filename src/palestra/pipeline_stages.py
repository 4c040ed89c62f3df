# SPDX-License-Identifier: Apache-2.0
"""What a stage of a pipeline may be: its config, what it does, and what it hands to later stages.

Training stages take up a run that was killed; the others are short, and are done again from their beginning.
"""

from __future__ import annotations

import json
import operator
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic import Field

from palestra.config import Config
from palestra.data.check import check_files
from palestra.data.dialogues import make_dialogues
from palestra.data.faults import ERRORS
from palestra.data.source import Cursor, make_source
from palestra.errors import ConfigError, RunError, unknown
from palestra.eval.compare import compare_runs
from palestra.model.export import export_merged
from palestra.pipeline_feedback import JudgeStage, PairsStage, judge_rollouts, write_pairs
from palestra.registry import Registry
from palestra.reward.validate import validate
from palestra.run.files import HALVES, read_json, writing
from palestra.run.progress import Progress
from palestra.train.config import Dtype, EvalConfig, MaybeSource, ModelConfig, RLConfig, SFTConfig, Source
from palestra.train.evaluation import run_eval
from palestra.train.prefer import train_prefer
from palestra.train.preference_config import PreferConfig, RewardModelConfig
from palestra.train.reward_model import train_reward_model
from palestra.train.rl import train_rl
from palestra.train.sample import run_sample
from palestra.train.sample_config import SampleConfig
from palestra.train.sft import train_sft
from palestra.types import Task

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "≥": operator.ge,
    "≤": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
}
_CONDITION = re.compile(r"\s*([\w./-]+)\s*(>=|<=|==|≥|≤|>|<)\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stage ended. summary: its numbers. output: what later stages call ``stage:NAME``. stopped: why the
    pipeline must not go on."""

    summary: Mapping[str, Any]
    output: Path | None = None
    stopped: str | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """What a stage works with: its own directory, and the summaries of the stages before it."""

    path: Path
    summaries: Mapping[str, Mapping[str, Any]]
    paths: Mapping[str, Path]
    progress: Progress


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of stage. output: whether later stages may refer to it as ``stage:NAME``. stages: keys of its config
    that name earlier stages. resumes: goes on with what a killed try has left."""

    config: type[Config]
    run: Callable[[Any, Work], Outcome]
    output: bool = True
    stages: tuple[str, ...] = ()
    resumes: bool = False


# Data ------------------------------------------------------------------------------------------------------


class DataStage(Config):
    """Writes what later stages read: ``train.jsonl`` and ``test.jsonl`` (tasks), ``demonstrations.jsonl`` (dialogues).

    tasks: a task source by name. train, test: how many of each split (none = all there are). demonstrations: a
    dialogue source by name.
    """

    seed: int = 0
    tasks: Source
    train: int | None = Field(default=None, ge=1)
    test: int | None = Field(default=None, ge=1)
    demonstrations: MaybeSource = None


def make_data(config: DataStage, work: Work) -> Outcome:
    """The three files, in a directory that is whole or absent."""
    aside = work.path.with_name(f".{work.path.name}.part")
    counts: dict[str, int] = {}
    with writing(work.path):
        for old in (aside, work.path):
            shutil.rmtree(old, ignore_errors=True)
        aside.mkdir(parents=True)
        work.progress.phase("data", total=2 + (config.demonstrations is not None))
        for done, (split, wanted) in enumerate((("train", config.train), ("test", config.test)), 1):
            tasks = _tasks(config, split, wanted)
            counts[split] = _write(aside / f"{split}.jsonl", map(_task_row, tasks))
            work.progress.update(done, {})
        if (shown := config.demonstrations) is not None:
            dialogues = make_dialogues(shown.name, seed=config.seed, **shown.options)
            rows = ({"messages": list(d.messages), "tools": list(d.tools)} for d in dialogues)
            counts["demonstrations"] = _write(aside / "demonstrations.jsonl", rows)
            work.progress.update(3, {})
        aside.rename(work.path)
    return Outcome(counts, work.path)


def _tasks(config: DataStage, split: str, wanted: int | None) -> list[Task]:
    source = make_source(config.tasks.name, seed=config.seed, **config.tasks.options | {"split": split})
    if wanted is None and source.size is None:
        raise ConfigError(f"data source {config.tasks.name!r} has no end: say how many tasks `{split}` is to hold")
    size = source.size if wanted is None else wanted if source.size is None else min(wanted, source.size)
    return source.take(Cursor(), int(size or 0))[0]


def _task_row(task: Task) -> dict[str, Any]:
    prompt = task.prompt if isinstance(task.prompt, str) else list(task.prompt)
    return {**task.meta, "id": task.id, "prompt": prompt, "answer": task.answer}


def _write(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    count = 0
    with path.open("w", encoding="utf-8", errors=HALVES) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


class CheckStage(Config):
    """Looks for what is wrong with data files, as ``palestra data check`` does, and stops at errors.

    train, test: the files; two that should share no question. form: of the rows (none = as they look). mode: how
    answers are compared: numeric, boxed or math (none = as the row says). limit: longest prompt in characters.
    allow: kinds of errors that do not stop.
    """

    train: str
    test: str | None = None
    form: str | None = None
    mode: Literal["numeric", "boxed", "math"] | None = None
    limit: int | None = Field(default=None, ge=1)
    near: bool = True
    allow: tuple[str, ...] = ()

    @pydantic.model_validator(mode="after")
    def _known(self) -> CheckStage:
        for kind in self.allow:
            if kind not in ERRORS:
                raise ConfigError(unknown("kind of data error", kind, ERRORS))
        return self


def check_data(config: CheckStage, work: Work) -> Outcome:
    """Errors stop the pipeline; warnings are written down."""

    def verify(task: Task) -> list[str]:
        mode = config.mode or str(task.meta.get("mode") or ("math" if "\\" in str(task.answer) else "numeric"))
        return validate([task], mode)

    def told(what: str) -> None:
        work.progress.phase(what, total=1)

    how: Any = {"form": config.form, "limit": config.limit, "near": config.near}
    report = check_files(config.train, config.test, verify=verify, told=told, **how)
    stopping = [f for f in report.findings if f.error and f.kind not in config.allow]
    work.progress.update(1, {})
    first = f"{', '.join(stopping[0].rows)}: {stopping[0].message}" if stopping else None
    why = f"{len(stopping)} errors in the data, the first: {first}" if stopping else None
    return Outcome(report.to_dict(), stopped=why)


# Gates and comparisons -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Condition:
    """``accuracy >= 0.40``: a number of a summary, by its dotted name, against a bound."""

    name: str
    comparison: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> Condition:
        """A condition from its text.

        >>> Condition.parse("accuracy >= 0.40")
        Condition(name='accuracy', comparison='>=', bound=0.4)
        """
        found = _CONDITION.fullmatch(text)
        if found is None:
            raise ConfigError(f"condition {text!r}: write a name, one of {' '.join(COMPARISONS)} and a number")
        return cls(found[1], found[2], float(found[3]))

    def holds(self, value: float) -> bool:
        return COMPARISONS[self.comparison](value, self.bound)

    def __str__(self) -> str:
        return f"{self.name} {self.comparison} {self.bound:g}"


class GateStage(Config):
    """Lets the pipeline go on only when a summary is good enough. of: the stage. require: one condition or several,
    such as ``accuracy >= 0.40``, on the numbers of its summary."""

    of: str
    require: str | tuple[str, ...]

    @property
    def conditions(self) -> list[Condition]:
        given = (self.require,) if isinstance(self.require, str) else self.require
        return [Condition.parse(text) for text in given]

    @pydantic.model_validator(mode="after")
    def _readable(self) -> GateStage:
        _ = self.conditions
        return self


def pass_gate(config: GateStage, work: Work) -> Outcome:
    """Stops with the numbers that were not good enough."""
    found = numbers(work.summaries[config.of])
    reasons, seen = [], {}
    for condition in config.conditions:
        if condition.name not in found:
            raise ConfigError(unknown(f"number in the summary of stage {config.of!r}:", condition.name, found))
        value = seen[condition.name] = found[condition.name]
        if value is None:
            reasons.append(f"{config.of}: {condition.name} was not measured, and {condition} is required")
        elif not condition.holds(value):
            reasons.append(f"{config.of}: {condition.name} is {value:.4g}, and {condition} is required")
    return Outcome(seen, stopped="; ".join(reasons) or None)


def numbers(summary: Mapping[str, Any], prefix: str = "") -> dict[str, float | None]:
    """Every number of a summary by its dotted name.

    >>> numbers({"accuracy": 0.5, "rewards": {"format": 1.0}, "stops": {}, "model": "m", "wilson95": None})
    {'accuracy': 0.5, 'rewards.format': 1.0, 'wilson95': None}
    """
    found: dict[str, float | None] = {}
    for name, value in summary.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{name}.")
        elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            found[prefix + name] = value
    return found


class CompareStage(Config):
    """Compares two evaluations on the same tasks. before, after: the stages."""

    before: str
    after: str


def compare(config: CompareStage, work: Work) -> Outcome:
    """What was fixed, what was broken, and whether that is more than chance."""
    return Outcome(compare_runs(work.paths[config.before], work.paths[config.after]).to_dict())


# Training and evaluation -----------------------------------------------------------------------------------


def finished(path: Path) -> dict[str, Any] | None:
    """The summary of a run that came to its end."""
    file = path / "summary.json"
    if not file.is_file():
        return None
    return {key: value for key, value in read_json(file, "remove it to go on with the run").items() if key != "format"}


def _training(loop: Callable[..., dict[str, Any]]) -> Callable[[Any, Work], Outcome]:
    def run(config: Any, work: Work) -> Outcome:
        summary = finished(work.path) or loop(config, progress=work.progress, resume=True)
        return Outcome(summary, Path(summary["checkpoint"]))

    return run


def _evaluate(config: EvalConfig, work: Work) -> Outcome:
    summary = finished(work.path)
    if summary is None:
        shutil.rmtree(work.path, ignore_errors=True)  # of an evaluation that was killed
        summary = run_eval(config, progress=work.progress)
    return Outcome(summary, work.path)


def _sample(config: SampleConfig, work: Work) -> Outcome:
    return Outcome(finished(work.path) or run_sample(config, progress=work.progress, resume=True), work.path)


class ExportStage(Config):
    """Writes a model to hand out: merged, in safetensors. dtype: of its weights."""

    model: ModelConfig
    dtype: Dtype = "float32"


def _export(config: ExportStage, work: Work) -> Outcome:
    shutil.rmtree(work.path, ignore_errors=True)
    work.progress.phase("export", total=1)
    made = export_merged(config.model.path, work.path, dtype=config.dtype)
    work.progress.update(1, {})
    return Outcome(made, work.path)


def _judge(config: JudgeStage, work: Work) -> Outcome:
    file = work.path / "scored.jsonl.zst"
    return Outcome(judge_rollouts(config, file, work.progress), file)


def _pairs(config: PairsStage, work: Work) -> Outcome:
    file = work.path / "pairs.jsonl"
    work.progress.phase("pairs", total=1)
    summary = write_pairs(config, file)
    work.progress.update(1, {})
    if not summary["pairs"]:
        where = f"the {summary['groups']} groups in {config.rollouts}"
        raise RunError(f"no pair could be made of {where}: {summary['said']}")
    return Outcome(summary, file)


KINDS: Registry[Kind] = Registry("kind of stage")
for _name, _kind in {
    "data": Kind(DataStage, make_data),
    "check": Kind(CheckStage, check_data, output=False),
    "sft": Kind(SFTConfig, _training(train_sft), resumes=True),
    "prefer": Kind(PreferConfig, _training(train_prefer), resumes=True),
    "reward_model": Kind(RewardModelConfig, _training(train_reward_model), resumes=True),
    "rl": Kind(RLConfig, _training(train_rl), resumes=True),
    "eval": Kind(EvalConfig, _evaluate),
    "gate": Kind(GateStage, pass_gate, output=False, stages=("of",)),
    "compare": Kind(CompareStage, compare, output=False, stages=("before", "after")),
    "sample": Kind(SampleConfig, _sample, resumes=True),
    "judge": Kind(JudgeStage, _judge, resumes=True),
    "pairs": Kind(PairsStage, _pairs),
    "export": Kind(ExportStage, _export),
}.items():
    KINDS.register(_name)(_kind)
