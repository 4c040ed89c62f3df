# SPDX-License-Identifier: Apache-2.0
"""Rows that train to an accuracy: seconds until the demo's problems are learned, and what bfloat16 does to learning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean
from typing import Any

from bench.lab import Crew, Lab, Measured, Member, bench
from bench.rows import Bar, Check, Row
from bench.workers import WorkerError
from palestra.data.arithmetic import problem

ENOUGH = 0.9
BLOCK = 2
"""Steps between two evaluations."""


@dataclass(frozen=True, slots=True)
class _Race:
    """Sizes of the race: seeds, steps at most, problems of a step (None: the demo's own), held-out problems."""

    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 60
    tasks: int | None = None
    held_out: int = 200
    warmup: int | None = None


def _race(lab: Lab) -> _Race:
    return _Race((0,), 2, 2, 4, 2) if lab.settings.quick else _Race()


def warm_start(lab: Lab, seed: int, warmup: int | None) -> str:
    """The checkpoint that everyone begins from, made once: the demo's warm-up, or ``warmup`` steps of it."""
    out = str(lab.settings.models / f"warm-start-{seed}{'-quick' if lab.settings.quick else ''}")
    config = {"work": "warm_start", "out": out, "seed": seed, "warmup": warmup}
    with lab.crew({"ours": Member("ours", config)}) as crew:
        crew.once("ours", {})
    return out


@bench("learn", suite="learn")
def learn(lab: Lab) -> Iterator[Row]:
    """Seconds of training from the same warm start to held-out accuracy 0.9 on the demo's problems, three seeds."""
    work, dtype, race = "learn to 0.9", "float32", _race(lab)
    if not lab.wants(work, dtype):
        return
    seconds: dict[str, list[float]] = {"ours": [], "trl": []}
    curves: dict[str, list[list[float]]] = {"ours": [], "trl": []}
    absent: dict[str, str] = {}
    for seed in race.seeds:
        start = warm_start(lab, seed, race.warmup)
        members = {
            "ours": Member("ours", _ours(start, race, seed, dtype)),
            "trl": Member("trl", _trl(start, race, seed)),
        }
        with lab.crew(members, together=False) as crew:
            for name, member in members.items():
                if member.absent is not None:
                    continue
                try:
                    spent, curve = _run(crew, name, race)
                except WorkerError as problem:
                    member.absent = f"failed: {problem}"
                    continue
                seconds[name].append(spent)
                curves[name].append(curve)
            absent |= crew.absent()
    worst = min((max(curve) for curve in curves["ours"]), default=0.0)
    yield lab.row(
        work,
        dtype,
        Measured(seconds, absent),
        unit="s",
        better="lower",
        bar=Bar({"trl": 4.0}, stretch={"trl": 8.0}),
        checks={"best accuracy of the worst seed": Check(worst, at_least=ENOUGH)},
        facts={"curves": curves, "block": BLOCK},
    )


def _run(crew: Crew, name: str, race: _Race) -> tuple[float, list[float]]:
    """Seconds until an evaluation shows enough (or of all steps, when none does), and the accuracies on the way."""
    seconds, curve = 0.0, []
    for _ in range(race.steps // BLOCK):
        found = crew.once(name, {"steps": BLOCK})
        seconds += found["seconds"]
        curve.append(found["accuracy"])
        if curve[-1] >= ENOUGH:
            break
    crew.members[name].end()
    return seconds, curve


def _ours(start: str, race: _Race, seed: int, dtype: str) -> dict[str, Any]:
    return {
        "work": "learning",
        "model": start,
        "seed": seed,
        "steps": race.steps,
        "dtype": dtype,
        "held_out": race.held_out,
        "tasks": race.tasks,
    }


def _trl(start: str, race: _Race, seed: int) -> dict[str, Any]:
    """The demo's own settings in TRL's words; problems in the order in which our loop draws them."""
    from palestra.train.demo import demo_config

    demo = demo_config("unused", seed=seed, steps=race.steps)
    tasks = race.tasks or demo.train.tasks_per_step
    drawn = [problem(i, seed, "train") for i in range(race.steps * tasks)]
    held_out = [problem(i, seed, "test") for i in range(race.held_out)]
    return {
        "work": "learning",
        "model": start,
        "seed": seed,
        "steps": race.steps,
        "tasks": tasks,
        "samples": demo.algorithm.group_size,
        "updates": demo.algorithm.updates_per_batch,
        "turns": 4,
        "new": demo.sampling.max_new_tokens,
        "learning_rate": demo.train.learning_rate,
        "warmup_ratio": demo.train.warmup_ratio,
        "betas": list(demo.train.betas),
        "weight_decay": demo.train.weight_decay,
        "problems": [(task.prompt, task.answer) for task in drawn],
        "held_out": [(task.prompt, task.answer) for task in held_out],
    }


@bench("learn-bf16", suite="learn")
def learn_bf16(lab: Lab) -> Iterator[Row]:
    """Held-out accuracy after the demo's steps in bfloat16, beside float32, from the same warm starts, three seeds."""
    work, dtype, race = "accuracy after the same steps", "bfloat16", _race(lab)
    if not lab.wants(work, dtype):
        return
    curves: dict[str, list[list[float]]] = {}
    for name, each in (("ours", dtype), ("float32", "float32")):
        for seed in race.seeds:
            config = _ours(warm_start(lab, seed, race.warmup), race, seed, each)
            with lab.crew({"ours": Member("ours", config)}) as crew:
                blocks = [crew.once("ours", {"steps": BLOCK}) for _ in range(race.steps // BLOCK)]
            curves.setdefault(name, []).append([block["accuracy"] for block in blocks])
    last = {name: [mean(curve[-3:]) for curve in found] for name, found in curves.items()}
    yield lab.row(
        work,
        dtype,
        Measured(last),
        unit="of the problems",
        bar=Bar({"float32": 0.97}, said="≥ 0.97 × float32"),
        facts={"curves": curves, "block": BLOCK},
    )
