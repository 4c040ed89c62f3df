# SPDX-License-Identifier: Apache-2.0
"""``palestra sweep``: the same training with other values of some keys, in parallel, and the best of them.

    OUT/
      sweep.yaml                the config in force
      trials/003/trial.json     values, status, reports, result; the trial's own config.yaml, log.txt and run/
      study.db                  Optuna's, with ``method: tpe``
      best.yaml                 the config of the best trial, ready to run
      summary.json, report.html

Run it again to go on: finished trials are not repeated, and those that were cut off resume from their checkpoints.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pydantic
from pydantic import Field

from palestra import config as configuration
from palestra.config import Config
from palestra.errors import ConfigError, RunError, unknown
from palestra.run.files import read_json, write_json, write_text, writing
from palestra.run.progress import Progress
from palestra.run.trackers import read_metrics
from palestra.sweep_report import write_sweep_report
from palestra.sweep_space import SPACES, TRIALS, Axis, Method, Sampler, make_sampler
from palestra.sweep_trials import PHASES, Direction, PruneConfig, Trial, Verb, direction_of, falls_behind
from palestra.train.config import RLConfig, SFTConfig
from palestra.train.preference_config import PreferConfig, RewardModelConfig

FORMAT = 1
POLL_S = 0.5
VERBS: dict[str, tuple[type[Config], str]] = {
    "rl": (RLConfig, "accuracy_after"),
    "sft": (SFTConfig, "final_loss"),
    "prefer": (PreferConfig, "accuracy_after"),
    "reward-model": (RewardModelConfig, "accuracy_after"),
}
"""Verb → its config, and the number of its summary that is searched for."""


class SweepConfig(Config):
    """``palestra sweep``. base: the config that is varied, a file or written here. verb: what runs it. method: grid,
    random or tpe (Optuna). trials: how many (none = the whole grid, 10 random ones, 20 by TPE). workers: trials at
    once. space: key of the base → a list of values, or ``{low, high, log, integer}`` (none = the method's usual one:
    learning rate, rank, KL, batch). metric: the number of a trial's summary (none = held-out accuracy, or the final
    loss of SFT). direction: which way of it is better (none = as its name says). prune: end bad trials early.
    """

    seed: int = 0
    out: str = "runs/sweep"
    base: str | dict[str, Any]
    verb: Verb = "rl"
    method: Method = "tpe"
    trials: int | None = Field(default=None, ge=1)
    workers: int = Field(default=1, ge=1)
    space: dict[str, Axis] | None = None
    metric: str | None = None
    direction: Direction | None = None
    prune: PruneConfig | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> SweepConfig:
        if self.space is not None and not self.space:
            raise ConfigError("space is empty: name at least one key, such as `train.learning_rate: [1e-5, 5e-5]`")
        if self.method == "grid" and (bad := [k for k, axis in self.axes.items() if axis.choices is None]):
            raise ConfigError(f"space.{bad[0]}: a grid needs a list of values, not a range")
        return self

    @property
    def axes(self) -> dict[str, Axis]:
        return self.space if self.space is not None else SPACES[self.verb, self.method]

    @property
    def target(self) -> tuple[str, bool]:
        """The number that counts, and whether more of it is better."""
        metric = self.metric or VERBS[self.verb][1]
        direction = self.direction or direction_of(metric)
        if direction is None:
            raise ConfigError(f"direction: say whether {metric} is to maximize or to minimize")
        return metric, direction == "maximize"

    @property
    def count(self) -> int:
        """How many trials there are to be."""
        whole = math.prod(len(axis.choices or ()) for axis in self.axes.values())
        wanted = self.trials or TRIALS.get(self.method, whole)
        return min(wanted, whole) if self.method == "grid" else wanted

    def trial_config(self, params: Mapping[str, Any], out: Path) -> Any:
        """The base with a trial's values in it."""
        values = {**params, "out": str(out)}
        return configuration.load(
            self.base, [f"{key}={json.dumps(value)}" for key, value in values.items()], VERBS[self.verb][0]
        )


def check(config: SweepConfig) -> None:
    """Every key and every end of its range loads; the metric to prune by is measured. Raises ConfigError."""
    for key, axis in config.axes.items():
        for value in axis.ends:
            config.trial_config({key: value}, Path(config.out))
    base = config.trial_config({}, Path(config.out))
    _ = config.target
    if config.prune is not None:
        config.prune.check(config.verb)
        if unset := _unmeasured(config, base):
            raise ConfigError(f"prune reads held-out numbers while a trial trains: set {unset} in the base")
    if config.verb == "rl" and config.metric is None and not base.eval.size:
        raise ConfigError("trials are compared by held-out accuracy after training: set eval.size in the base")


def _unmeasured(config: SweepConfig, base: Any) -> str | None:
    """The key that has the trials measure what they are pruned by, where it is not set."""
    if config.prune is None or not config.prune.name(config.verb).startswith("eval/"):
        return None
    if config.verb == "rl":
        return None if base.eval.every else "eval.every"
    settings = config.verb.replace("-", "_")
    return None if getattr(base, settings).eval_every else f"{settings}.eval_every"


# Trials ----------------------------------------------------------------------------------------------------


class Sweep:
    """A sweep's directory, and the trials that run."""

    def __init__(self, config: SweepConfig) -> None:
        self.config, self.out = config, Path(config.out)
        self.metric, self.larger = config.target
        self.trials: list[Trial] = []
        self._jobs: dict[int, tuple[subprocess.Popen[bytes], float]] = {}
        self._claim()
        self.sampler: Sampler = make_sampler(config.method, config.axes, config.seed, self.out, larger=self.larger)

    def _claim(self) -> None:
        held = self.out / "sweep.yaml"
        if self.out.exists() and not held.is_file() and any(self.out.iterdir()):
            raise RunError(f"{self.out} is not empty and holds no sweep; choose another --out")
        if held.is_file():
            free = {"trials", "workers", "prune"}
            old, new = (c.model_dump(mode="json", exclude=free) for c in (_stored(held), self.config))
            if changed := [key for key in new if new[key] != old[key]]:
                raise RunError(
                    f"{self.out} holds a sweep with another {changed[0]}: its trials would not compare; "
                    "choose another --out"
                )
        with writing(self.out):
            (self.out / "trials").mkdir(parents=True, exist_ok=True)
        write_text(held, configuration.dump(self.config))
        for file in sorted((self.out / "trials").glob("*/trial.json")):
            found = read_json(file, "remove its directory to try it again")
            reports = [(int(s), float(v)) for s, v in found.pop("reports")]
            self.trials.append(Trial(**{k: v for k, v in found.items() if k != "format"}, reports=reports))

    def folder(self, number: int) -> Path:
        return self.out / "trials" / f"{number:03d}"

    @property
    def ended(self) -> int:
        return sum(trial.status != "running" for trial in self.trials)

    def fill(self) -> None:
        """Start trials while workers are free: first those that were cut off, then new ones."""
        waiting = [t for t in self.trials if t.status == "running" and t.number not in self._jobs]
        while len(self._jobs) < self.config.workers:
            if waiting:
                self._start(waiting.pop(0))
            elif len(self.trials) < self.config.count:
                number = len(self.trials)
                trial = Trial(number, self.sampler.params(number))
                self.trials.append(trial)
                self._start(trial)
            else:
                return

    def _start(self, trial: Trial) -> None:
        folder = self.folder(trial.number)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        settings = self.config.trial_config(trial.params, folder / "run")
        write_text(folder / "config.yaml", configuration.dump(settings))
        self._keep(trial)
        if (folder / "run" / "summary.json").is_file():  # it ended, and the sweep was killed before it wrote so
            self._end(trial, 0)
            return
        command = worker_command(self.config.verb, folder / "config.yaml")
        with (folder / "log.txt").open("ab") as log:
            job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=_threads(self.config))
        self._jobs[trial.number] = (job, time.monotonic() - trial.seconds)

    def poll(self) -> list[Trial]:
        """Look at the trials that run; returns those that have just ended."""
        over = []
        for number, (job, began) in list(self._jobs.items()):
            trial = self.trials[number]
            code = job.poll()
            trial.seconds = time.monotonic() - began
            fresh = self._hear(trial)
            if code is None and not (fresh and self._hopeless(trial)):
                continue
            if code is None:
                job.kill()
            _close(job)
            del self._jobs[number]
            self._end(trial, code)
            over.append(trial)
        return over

    def _hopeless(self, trial: Trial) -> bool:
        rule = self.config.prune
        return rule is not None and falls_behind(trial, self.trials, rule, larger=rule.larger(self.config.verb))

    def _hear(self, trial: Trial) -> bool:
        """Take up what a trial has reported since the last look."""
        file = self.folder(trial.number) / "run" / "metrics.jsonl"
        if self.config.prune is None or not file.is_file():
            return False
        name, phase = self.config.prune.name(self.config.verb), PHASES[self.config.verb]
        rows = {r["step"]: float(r[name]) for r in read_metrics(file) if name in r and r["phase"] == phase}
        new = [(step, value) for step, value in rows.items() if step > (trial.reports or [(-1, 0.0)])[-1][0]]
        for step, value in new:
            trial.reports.append((step, value))
            self.sampler.report(trial.number, step, value)
        return bool(new)

    def _end(self, trial: Trial, code: int | None) -> None:
        summary = self.folder(trial.number) / "run" / "summary.json"
        if code is None and self.config.prune is not None:
            step, seen = trial.reports[-1]
            trial.status = "pruned"
            trial.error = f"{self.config.prune.name(self.config.verb)} {seen:.4g} at step {step}"
        elif code == 0 and summary.is_file():
            found = read_json(summary, "remove its directory to try it again")
            if self.metric not in found:
                known = [k for k, v in found.items() if isinstance(v, int | float) and k not in ("format", "seed")]
                raise ConfigError("metric: " + unknown("number in a trial's summary", self.metric, known))
            trial.value = found[self.metric]
            trial.status = "failed" if trial.value is None else "done"
            trial.error = f"{self.metric} was not measured" if trial.value is None else None
        else:
            trial.status, trial.error = "failed", _last_line(self.folder(trial.number) / "log.txt")
        self.sampler.tell(trial.number, trial.value, trial.status)
        self._keep(trial)

    def _keep(self, trial: Trial) -> None:
        write_json(self.folder(trial.number) / "trial.json", {"format": FORMAT, **asdict(trial)})

    def stop(self) -> None:
        """Let the trials that run write a checkpoint and end; they go on when the sweep is run again."""
        jobs = [job for job, _ in self._jobs.values()]
        for job in jobs:
            if job.stdin is not None:
                job.stdin.close()
        for job in jobs:
            _close(job)
        self._jobs.clear()

    def best(self) -> Trial | None:
        """The finished trial of the best value; of equal ones the first."""
        done = [t for t in self.trials if t.status == "done" and t.value is not None]
        return (max if self.larger else min)(done, key=lambda t: t.value or 0.0, default=None)


def _threads(config: SweepConfig) -> dict[str, str]:
    """The environment of a trial: trials at once share the cores instead of each taking all of them."""
    share = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // config.workers))} if config.workers > 1 else {}
    return {**share, **os.environ}


def _close(job: subprocess.Popen[bytes]) -> None:
    """Wait for a trial's process and let go of its pipe."""
    with job:
        pass


def worker_command(verb: str, config: Path) -> list[str]:
    """What runs a trial, as long as its standard input is open."""
    return [sys.executable, "-m", "palestra.sweep_worker", verb, str(config)]


def _stored(file: Path) -> SweepConfig:
    return configuration.load(file, [], SweepConfig)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it ended without a word"


def run_sweep(config: SweepConfig, *, progress: Progress) -> dict[str, Any]:
    """Run the trials that are left; returns what ``summary.json`` holds. Ctrl-C lets running trials end with a
    checkpoint. Raises RunError when no trial came to its end."""
    check(config)
    sweep = Sweep(config)
    progress.phase(f"sweep ({config.method})", total=config.count, done=sweep.ended)
    try:
        sweep.fill()
        while sweep.ended < config.count:
            for trial in sweep.poll():
                value = trial.error if trial.value is None else f"{sweep.metric} {trial.value:.4g}"
                progress.note(f"trial {trial.number} {trial.status}: {value}{_told(trial)}")
                progress.update(sweep.ended, {sweep.metric: trial.value})
                sweep.fill()
            time.sleep(POLL_S)
    finally:
        sweep.stop()
    best = sweep.best()
    if best is None:
        raise RunError(f"no trial came to its end; the first: {sweep.trials[0].error or sweep.trials[0].status}")
    settings = config.trial_config(best.params, sweep.out / "best")
    write_text(sweep.out / "best.yaml", configuration.dump(settings))
    summary = {
        "format": FORMAT,
        "method": config.method,
        "metric": sweep.metric,
        "direction": "maximize" if sweep.larger else "minimize",
        "best": best.number,
        "best_value": best.value,
        "best_params": best.params,
        "best_config": str(sweep.out / "best.yaml"),
        "trials": [asdict(trial) for trial in sweep.trials],
    }
    write_json(sweep.out / "summary.json", summary)
    write_sweep_report(sweep.out / "report.html", summary)
    return summary


def _told(trial: Trial) -> str:
    values = ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in trial.params.items()
    )
    return f" ({values})"


def describe(config: SweepConfig) -> str:
    """``--dry-run``: what is searched, and the config."""
    check(config)
    metric, larger = config.target
    axes = [f"# {key}: {axis}" for key, axis in config.axes.items()]
    head = f"# {config.count} trials by {config.method}, {config.workers} at once, "
    head += f"for the {'largest' if larger else 'smallest'} {metric}"
    return configuration.dump(config).rstrip() + "\n\n" + "\n".join([head, *axes]) + "\n"
