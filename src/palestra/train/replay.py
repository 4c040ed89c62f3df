# SPDX-License-Identifier: Apache-2.0
"""``palestra replay``: a recorded batch through the recorded weights, and whether what was recorded comes out again.

The learning half of a step is a function of the weights before it, the optimiser's state, the recorded episodes and the
config. All four are in the run directory wherever a checkpoint lies right before a step with a rollouts file, and there
the step can be taken again: by the very code that took it, in memory, without a change to the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from palestra import config as configuration
from palestra.data.source import Cursor
from palestra.errors import DataError, RunError
from palestra.learn.annotate import annotate
from palestra.learn.batch import rows
from palestra.learn.update import UpdateConfig
from palestra.model.lora import trainable_parameters
from palestra.rollout.dump import read_rollouts
from palestra.run.directory import Run, read_run
from palestra.run.health import numbers
from palestra.run.progress import Progress
from palestra.run.trackers import read_metrics
from palestra.train import setup
from palestra.train.checkpoint import load_checkpoint, restore_model
from palestra.train.config import RLConfig
from palestra.train.prepare import Prepared
from palestra.train.reference import load_teacher
from palestra.train.rl import RLTrainer
from palestra.train.sealed import MARK, damage
from palestra.types import Author, Group

RELATIVE, ABSOLUTE = 1e-3, 1e-5
"""Numbers this close are the same: another device or number of threads adds up in another order."""


@dataclass(frozen=True, slots=True)
class Drift:
    """The log-probs of what was sampled, by the trainer's forward pass against what the sampler recorded, in nats.

    tokens: compared. largest, mean: of |trainer − sampler|. task, member, token: where the largest is (token: its index
    in the trajectory). other_versions: tokens that other weights sampled, not compared.
    """

    tokens: int
    largest: float
    mean: float
    task: str
    member: str
    token: int
    other_versions: int = 0

    def line(self) -> str:
        left = f"; {self.other_versions:,} tokens of other versions left out" if self.other_versions else ""
        return (
            f"drift of {self.tokens:,} sampled tokens: largest {self.largest:.3g} nats (task {self.task}, episode "
            f"{self.member}, token {self.token}), mean {self.mean:.3g}{left}"
        )


@dataclass(frozen=True, slots=True)
class Replayed:
    """A step taken again. recorded, replayed: its metrics then and now. weights: largest difference to the checkpoint
    behind the step, None where there is none. drift: None where it was not asked for, or cannot be measured; no_drift
    says why."""

    step: int
    recorded: Mapping[str, float]
    replayed: Mapping[str, float]
    weights: float | None
    drift: Drift | None
    no_drift: str | None = None

    @property
    def same(self) -> bool:
        """Whether every number came out again, rounding aside."""
        pairs = [(self.recorded[name], value) for name, value in self.replayed.items()]
        return all(math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE) for a, b in pairs)

    @property
    def exact(self) -> bool:
        """Whether every number, and the weights where they can be compared, came out again to the last bit."""
        return self.recorded == self.replayed and not self.weights

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"format": 1, "same": self.same, "exact": self.exact, **asdict(self)}

    def text(self) -> str:
        """For people: name, recorded, replayed, then the verdict."""
        wide = max(map(len, self.replayed), default=0)
        lines = [f"{'step ' + str(self.step):{wide}}  {'recorded':>14}  {'replayed':>14}"]
        for name, value in sorted(self.replayed.items()):
            lines.append(f"{name:{wide}}  {self.recorded[name]:>14.8g}  {value:>14.8g}")
        verdict = "the same, bit for bit" if self.exact else "the same, rounding aside" if self.same else "NOT the same"
        lines.append(f"the step came out {verdict}")
        if self.weights is not None:
            lines.append(f"largest difference of a weight to checkpoint step_{self.step:06d}: {self.weights:.3g}")
        said = self.drift.line() if self.drift is not None else self.no_drift
        return "\n".join([*lines, *([said] if said is not None else [])])


def replay(run: Path, step: int | None = None, *, drift: bool = False) -> Replayed:
    """Take a step of a finished (or interrupted) ``palestra rl`` run again; None: the last that can be.

    Nothing in the run directory changes. Raises RunError for what is no such run, and for a step that cannot be
    replayed, with those that can.
    """
    config = config_of(run)
    step = _chosen(run, step)
    before = run / "checkpoints" / f"step_{step - 1:06d}"
    load_checkpoint(before)  # checksums compared: a damaged file is named, rather than replayed
    recorded = _recorded(run, step)
    groups = list(read_rollouts(_rollouts(run, step)))
    trainer = trainer_at(config, run, before)
    try:
        trainer.begin_rl()
        seen, why = _drift(trainer, groups, run, step) if drift else (None, None)
        learned, _ = trainer.learn(groups, Cursor())
    finally:
        trainer.engine.close()
    # What learning says; not how long it took, and not the place in the data, which is collecting's.
    shared = [n for n in learned if n in recorded and n.startswith("train/") and n != "train/epoch"]
    return Replayed(
        step=step,
        recorded={name: recorded[name] for name in shared},
        replayed={name: learned[name] for name in shared},
        weights=_difference(trainer, run / "checkpoints" / f"step_{step:06d}"),
        drift=seen,
        no_drift=why,
    )


def replayable(run: Path) -> list[int]:
    """The steps with a rollouts file and a finished checkpoint right before, in order."""
    files = (run / "rollouts").glob("step_*.jsonl.zst")
    steps = sorted(int(f.name.split(".")[0].removeprefix("step_")) for f in files)
    return [n for n in steps if (run / "checkpoints" / f"step_{n - 1:06d}" / MARK).is_file()]


def _drift(trainer: RLTrainer, groups: Sequence[Group], run: Path, step: int) -> tuple[Drift | None, str | None]:
    """The drift, by the newest weights that sampled something and are still there, or why there is none.

    With ``train.max_staleness`` a step's tokens are older than the weights before it; the trainer has those again
    afterwards.
    """
    spans = (s for g in groups for e in g.episodes for t in e.trajectories for s in t.spans)
    known = {s.version for s in spans if s.author is Author.MODEL and len(s.tokens)}
    versions = sorted((v for v in known if v is not None), reverse=True)
    kept = {v: run / "checkpoints" / f"step_{v:06d}" for v in versions}
    there = [v for v, path in kept.items() if v == step - 1 or (path.is_dir() and damage(path) is None)]
    if not versions:
        return None, "no drift: nothing was sampled in this step"
    if not there:
        names = ", ".join(path.name for path in kept.values())
        return None, f"no drift: no checkpoint holds the weights that sampled ({names}); train.keep_last keeps more"
    if there[0] == step - 1:
        return measure_drift(trainer, groups, version=there[0]), None
    restore_model(kept[there[0]], trainer.model)
    try:
        return measure_drift(trainer, groups, version=there[0]), None
    finally:
        restore_model(run / "checkpoints" / f"step_{step - 1:06d}", trainer.model)


def measure_drift(trainer: RLTrainer, groups: Sequence[Group], *, version: int) -> Drift:
    """Every trajectory's log-probs anew, with the weights that the trainer holds; ``version`` is theirs."""
    made = rows(groups, min_group=1, unscored=True)
    made = made.with_(samples=tuple(replace(s, trained=True) for s in made.samples))
    settings = UpdateConfig(
        advantage="reinforce",
        kl_coef=0.0,
        old_logprobs="recompute",
        micro_batch_tokens=trainer.config.algorithm.micro_batch_tokens,
    )
    made = annotate(trainer.policy, made, settings, temperature=trainer.config.sampling.temperature)
    tokens, total, others, worst = 0, 0.0, 0, (-1.0, "", "", 0)
    for sample, now in zip(made.samples, made.old or (), strict=True):
        sampled = sample.loss_mask & (np.arange(len(sample.tokens)) > 0)
        mine = sampled & (sample.versions == version)
        others += int(sampled.sum() - mine.sum())
        gap = np.where(mine, np.abs(np.asarray(now, np.float64) - sample.logprobs), 0.0)
        tokens, total, at = tokens + int(mine.sum()), total + float(gap.sum()), int(gap.argmax())
        if mine.any() and gap[at] > worst[0]:
            group, _, member = sample.episode.rpartition("/")
            worst = (float(gap[at]), group.partition(":")[2], member, at)
    if not tokens:
        raise DataError(f"none of the recorded tokens was sampled by weights of version {version}")
    return Drift(tokens, worst[0], total / tokens, *worst[1:], other_versions=others)


def config_of(run: Path) -> RLConfig:
    read_run(run)
    values = configuration.read_yaml(run / "config.yaml")
    if "algorithm" not in values:
        raise RunError(f"{run} is not a run of `palestra rl`: only its steps can be replayed")
    return configuration.load(values | {"out": str(run)}, [], RLConfig)


def _chosen(run: Path, step: int | None) -> int:
    """The step to replay, or one line that says which can be."""
    known = replayable(run)
    if step is None and known:
        return known[-1]
    if step in known:
        return step
    can = f"steps that can be replayed: {', '.join(map(str, known))}" if known else "no step of it can be replayed"
    more = "train.save_every and train.keep_last keep more"
    if step is None:
        raise RunError(f"{run}: {can}: no rollouts file has a checkpoint right before its step; {more}")
    if not _rollouts(run, step).is_file():
        raise RunError(f"{run} holds no rollouts of step {step}; {can}")
    raise RunError(f"{run}: step {step} began with weights that no finished checkpoint holds; {can}; {more}")


def _rollouts(run: Path, step: int) -> Path:
    return run / "rollouts" / f"step_{step:06d}.jsonl.zst"


def _recorded(run: Path, step: int) -> dict[str, float]:
    """The metrics that the run logged for a step."""
    file = run / "metrics.jsonl"
    found = [r for r in (read_metrics(file) if file.is_file() else []) if (r["phase"], r["step"]) == ("rl", step)]
    learned = [row for row in found if "train/updates" in row]
    if not learned:
        raise RunError(f"{file} has no numbers of step {step}: there is nothing to compare a replay with")
    return numbers(learned[-1])


def trainer_at(config: RLConfig, run: Path, checkpoint: Path) -> RLTrainer:
    """The run's trainer as it was at a checkpoint. Its run directory has no trackers: nothing is written or rewound."""
    began = time.perf_counter()
    loaded = setup.load(config.model)
    teacher = load_teacher(config, loaded)
    prepared = Prepared(config, loaded, setup.make_world(config, loaded), (), began, teacher)
    return RLTrainer(prepared, Run(run, ()), progress=Progress(quiet=True), checkpoint=checkpoint)


def _difference(trainer: RLTrainer, after: Path) -> float | None:
    """The largest difference of a trained weight to a checkpoint's; None where there is no such checkpoint."""
    if not (after / MARK).is_file():
        return None
    load_checkpoint(after)
    mine = [p.detach().clone() for p in trainable_parameters(trainer.model)]
    restore_model(after, trainer.model)
    theirs = trainable_parameters(trainer.model)
    with torch.no_grad():
        return max(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True) if a.numel())
