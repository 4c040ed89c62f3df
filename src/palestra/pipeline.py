# SPDX-License-Identifier: Apache-2.0
"""``palestra pipeline``: the whole road from data to an exported model in one config, stage by stage.

    OUT/
      pipeline.yaml        the config in force
      results/NAME.json    one per stage that ended: status, output, seconds, config, summary
      results/NAME.begun.json   the config of a stage that has begun and not ended
      NAME/                what the stage wrote: a run directory, data files, a model
      summary.json         every stage in one place, written when the pipeline ends or stops

A stage with a result is not repeated. One without goes on where it was: training from its last checkpoint, what is
short from its beginning. ``--from NAME`` forgets that stage and all behind it.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic

from palestra import config as configuration
from palestra.config import Config
from palestra.errors import ConfigError, RunError, UserError, unknown
from palestra.pipeline_stages import KINDS, Kind, Outcome, Work
from palestra.run.directory import check_writable
from palestra.run.files import read_json, write_json, write_text, writing
from palestra.run.progress import Progress

FORMAT = 1
REFERENCE = "stage:"
_REFERENCE = re.compile(rf"{REFERENCE}([\w-]+)(/.+)?")
_NAME = re.compile(r"[A-Za-z0-9][\w-]*")


class PipelineConfig(Config):
    """``palestra pipeline``: stages, run in the order in which they are written.

    common: keys that every stage has which knows them and does not give its own (``model``, ``renderer``, ``env``, …).
    stages: name → the stage's own config, with ``kind`` beside it where the name is no kind itself. Wherever a stage
    needs a model or a file, ``stage:NAME`` is what the earlier stage of that name made (``stage:NAME/FILE`` a file in
    it): a training stage's is its last checkpoint.
    """

    seed: int = 0
    out: str = "runs/pipeline"
    common: dict[str, Any] = pydantic.Field(default_factory=dict)
    stages: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage as it is written. given: its config without ``kind``, with what ``common`` adds. needs: the earlier
    stages that it refers to."""

    name: str
    kind: Kind
    given: Mapping[str, Any]
    needs: tuple[str, ...]

    def config(self, outputs: Mapping[str, str], out: Path) -> Any:
        """The config, with the outputs of earlier stages in the place of references to them."""
        given = _resolved(self.given, outputs)
        if "out" in self.kind.config.model_fields:
            given["out"] = str(out)
        try:
            return configuration.load(given, [], self.kind.config)
        except UserError as error:
            raise ConfigError(f"stage {self.name!r}: {error}") from error


def plan(config: PipelineConfig) -> list[Stage]:
    """The stages, every name, key and reference of theirs checked; raises ConfigError before anything is spent.

    >>> gate = {"gate": {"of": "eval", "require": "accuracy >= 0.4"}}
    >>> plan(PipelineConfig(stages=gate))
    Traceback (most recent call last):
    palestra.errors.ConfigError: stage 'gate' refers to the stage 'eval', and there is no earlier one of that name
    """
    if not config.stages:
        raise ConfigError("stages is empty: name at least one, such as `sft: {...}`")
    stages: dict[str, Stage] = {}
    for name, given in config.stages.items():
        if not _NAME.fullmatch(name) or name == "results":
            raise ConfigError(f"stage {name!r}: its name becomes a directory; use letters, digits, - and _")
        stages[name] = _stage(name, given, config, stages)
    read = {key for stage in stages.values() for key in stage.kind.config.model_fields}
    for key in config.common:
        if key not in read:
            raise ConfigError(f"common.{key}: {unknown('key', key, read)}")
    placeholders = {name: f"{config.out}/{name}" for name in stages}
    for stage in stages.values():
        stage.config(placeholders, Path(config.out) / stage.name)
    _refuse_second_adapters(stages)
    return list(stages.values())


def _stage(name: str, given: Mapping[str, Any], config: PipelineConfig, earlier: Mapping[str, Stage]) -> Stage:
    own = dict(given)
    kind_name = str(own.pop("kind", name))
    try:
        kind = KINDS[kind_name]
    except ConfigError as error:
        raise ConfigError(f"stage {name!r}: {error}; write `kind:` where the name is none") from error
    fields = kind.config.model_fields
    if "out" in own:
        raise ConfigError(f"stage {name!r}: leave `out` away, a stage writes to {config.out}/{name}")
    shared = {key: value for key, value in config.common.items() if key in fields and key not in own}
    seed = {"seed": config.seed} if "seed" in fields and "seed" not in own and "seed" not in shared else {}
    named = [str(own[key]) for key in kind.stages if key in own]
    referred = [match[1] for text in _texts({**shared, **own}) if (match := _reference(name, text))]
    for needed in (*named, *referred):
        if needed not in earlier:
            raise ConfigError(
                f"stage {name!r} refers to the stage {needed!r}, and there is no earlier one of that name"
            )
    for needed in referred:
        if not earlier[needed].kind.output:
            raise ConfigError(f"stage {name!r} refers to {REFERENCE}{needed}, which makes nothing to refer to")
    return Stage(name, kind, {**seed, **shared, **own}, tuple(dict.fromkeys((*named, *referred))))


def _reference(stage: str, text: str) -> re.Match[str] | None:
    found = _REFERENCE.fullmatch(text)
    if found is None and text.startswith(REFERENCE):
        raise ConfigError(f"stage {stage!r}: {text!r} is no reference; write {REFERENCE}NAME or {REFERENCE}NAME/FILE")
    return found


def _refuse_second_adapters(stages: Mapping[str, Stage]) -> None:
    """Training an adapter on a model that is one already fails; better before the first stage than after it."""
    for stage in stages.values():
        model = stage.given.get("model")
        path = model.get("path") if isinstance(model, Mapping) else model
        found = _REFERENCE.fullmatch(str(path))
        if stage.given.get("lora") and found and stages[found[1]].given.get("lora"):
            raise ConfigError(
                f"stage {stage.name!r} puts an adapter on {path}, whose model carries one: put a stage "
                f"`kind: export, model: {path}` between them, which merges it, or leave `lora` away to train it on"
            )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _resolved(value: Any, outputs: Mapping[str, str]) -> Any:
    if isinstance(value, str) and (found := _REFERENCE.fullmatch(value)):
        return outputs[found[1]] + (found[2] or "")
    if isinstance(value, Mapping):
        return {key: _resolved(item, outputs) for key, item in value.items()}
    return [_resolved(item, outputs) for item in value] if isinstance(value, list | tuple) else value


# Results ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Book:
    """The results of a pipeline's directory."""

    out: Path
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, config: PipelineConfig, stages: Sequence[Stage]) -> Book:
        """Claim the directory, or read what it holds; RunError where other files are in the way."""
        out = Path(config.out)
        check_writable(out)
        if out.exists() and not (out / "pipeline.yaml").is_file() and any(out.iterdir()):
            raise RunError(f"{out} is not empty and holds no pipeline; choose another --out")
        with writing(out):
            (out / "results").mkdir(parents=True, exist_ok=True)
        write_text(out / "pipeline.yaml", configuration.dump(config))
        book = cls(out)
        for stage in stages:
            if (file := book.file(stage.name)).is_file():
                book.results[stage.name] = _read(file)
        return book

    def file(self, name: str) -> Path:
        return self.out / "results" / f"{name}.json"

    def begun(self, name: str) -> Path:
        return self.out / "results" / f"{name}.begun.json"

    def done(self, stage: Stage) -> bool:
        """Whether a stage need not be run. A result of another config is refused: it would be passed off as this."""
        result = self.results.get(stage.name)
        if result is None or result["status"] != "done":
            return False
        _refuse_change(stage, result["config"], "done")
        return result["output"] is None or Path(result["output"]).exists()

    def begin(self, stage: Stage) -> None:
        """Write down what a stage is begun with. What one killed under another config has left is refused where the
        kind would go on with it: half a training by one config and half by another is a training by neither. The
        other kinds begin anew."""
        work, begun = self.out / stage.name, self.begun(stage.name)
        given = _plain(stage.given)
        if begun.is_file() and work.exists() and (held := _read(begun)["config"]) != given:
            if stage.kind.resumes:
                _refuse_change(stage, held, "begun")
            with writing(self.out):
                shutil.rmtree(work)
        write_json(begun, {"format": FORMAT, "stage": stage.name, "config": given})

    def outputs(self) -> dict[str, str]:
        return {name: str(r["output"]) for name, r in self.results.items() if r["output"] is not None}

    def keep(self, stage: Stage, outcome: Outcome, seconds: float) -> None:
        """Write the result of a stage."""
        self.results[stage.name] = {
            "format": FORMAT,
            "stage": stage.name,
            "status": "done" if outcome.stopped is None else "stopped",
            "reason": outcome.stopped,
            "output": None if outcome.output is None else str(outcome.output),
            "seconds": seconds,
            "config": _plain(stage.given),
            "summary": _plain(outcome.summary),
        }
        write_json(self.file(stage.name), self.results[stage.name])
        with writing(self.out):
            self.begun(stage.name).unlink(missing_ok=True)

    def forget(self, stages: Sequence[Stage]) -> None:
        """Remove what stages wrote, the last first; killed in between, those before are still whole."""
        for stage in reversed(stages):
            work, dropped = self.out / stage.name, self.out / f".{stage.name}.dropped"
            with writing(self.out):
                if work.exists():
                    shutil.rmtree(dropped, ignore_errors=True)
                    work.rename(dropped)
                for file in (self.file(stage.name), self.begun(stage.name)):
                    file.unlink(missing_ok=True)
                shutil.rmtree(dropped, ignore_errors=True)
            self.results.pop(stage.name, None)


def _read(file: Path) -> dict[str, Any]:
    found = read_json(file, "remove it to repeat the stage")
    if found.get("format") != FORMAT:
        raise RunError(f"{file}: not a stage's result of format {FORMAT}; remove it to repeat the stage")
    return found


def _refuse_change(stage: Stage, held: Mapping[str, Any], how: str) -> None:
    if changed := _differing(held, _plain(stage.given)):
        raise RunError(
            f"stage {stage.name!r} was {how} with another config ({', '.join(changed)} changed): repeat it and what "
            f"follows with --from {stage.name}, or choose another --out"
        )


def _differing(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The dotted keys whose values are not the same.

    >>> _differing({"sft": {"steps": 3, "data": "arithmetic"}}, {"sft": {"steps": 4, "data": "arithmetic"}, "seed": 1})
    ['sft.steps', 'seed']
    """
    found: list[str] = []
    for key in {**a, **b}:
        one, other = a.get(key), b.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += _differing(one, other, f"{prefix}{key}.")
        elif key not in a or key not in b or one != other:
            found.append(f"{prefix}{key}")
    return found


def _plain(value: Any) -> Any:
    """As JSON would give it back, so that what is written and what is given compare; NaN and infinities are None."""
    text = json.dumps(value, default=str)
    return json.loads(text, parse_constant=lambda _: None)


# The run ---------------------------------------------------------------------------------------------------


def run_pipeline(config: PipelineConfig, *, progress: Progress, start: str | None = None) -> dict[str, Any]:
    """Run the stages that have no result yet; returns what ``summary.json`` holds: ``status`` (done or stopped),
    ``reason``, ``seconds`` and the ``stages`` with their results.

    start: repeat from this stage on. A gate or a check that says no stops the pipeline, with the reason; it is asked
    again when the pipeline is run again.
    """
    stages = plan(config)
    names = [stage.name for stage in stages]
    if start is not None and start not in names:
        raise ConfigError(unknown("stage", start, names))
    book = Book.open(config, stages)
    if start is not None:
        book.forget(stages[names.index(start) :])
    stopped: str | None = None
    for at, stage in enumerate(stages, 1):
        told = f"stage {at} of {len(stages)}, {stage.name}"
        if book.done(stage):
            progress.note(f"{told}: done before")
            continue
        progress.note(told)
        began = time.perf_counter()
        settings = stage.config(book.outputs(), book.out / stage.name)
        book.begin(stage)
        outcome = stage.kind.run(settings, _work(stage, book, progress))
        book.keep(stage, outcome, time.perf_counter() - began)
        if outcome.stopped is not None:
            stopped = f"stopped at stage {stage.name!r}: {outcome.stopped}"
            break
    summary = {
        "format": FORMAT,
        "status": "done" if stopped is None else "stopped",
        "reason": stopped,
        "seconds": sum(r["seconds"] for r in book.results.values()),
        "stages": {name: book.results[name] for name in names if name in book.results},
    }
    write_json(book.out / "summary.json", summary)
    return summary


def _work(stage: Stage, book: Book, progress: Progress) -> Work:
    summaries = {name: result["summary"] for name, result in book.results.items()}
    return Work(book.out / stage.name, summaries, {name: book.out / name for name in book.results}, progress)


def describe(config: PipelineConfig) -> str:
    """``--dry-run``: the stages in their order, what each takes from which, and the config."""
    lines = []
    for at, stage in enumerate(plan(config), 1):
        takes = f", after {' and '.join(stage.needs)}" if stage.needs else ""
        model = f", model {m}" if (m := stage.given.get("model")) is not None else ""
        lines.append(f"# {at}. {stage.name} ({stage.kind.config.__name__}){model}{takes}")
    return configuration.dump(config).rstrip() + "\n\n" + "\n".join(lines) + "\n"
