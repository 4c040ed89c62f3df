# SPDX-License-Identifier: Apache-2.0
"""Episodes and whole training steps, by the loop that ``palestra rl`` runs."""

from __future__ import annotations

import asyncio
import atexit
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.ours.worlds import Unstopped
from bench.peers.serve import Reply, peak_gib, reset_peak, resident_gib, timed
from palestra.config import load
from palestra.rollout.collect import collect
from palestra.run.directory import Run
from palestra.run.progress import Progress
from palestra.train.config import RLConfig
from palestra.train.prepare import prepare
from palestra.train.rl import RLTrainer
from palestra.types import Group


def settings(
    model: str,
    texts: Sequence[str],
    *,
    samples: int,
    new: int,
    turns: int = 1,
    delay_s: float = 0.0,
    dtype: str = "float32",
    algorithm: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A run on these prompts whose every reply has ``new`` tokens; GRPO without KL, one update a step. bfloat16: the
    engine samples and the trainer computes in it, parameters stay float32, and what the two differ by is corrected
    with truncated importance weights."""
    low = dtype == "bfloat16"
    correction = {"old_logprobs": "recompute", "importance": "token_truncate"} if low else {}
    return {
        "model": model,
        "renderer": {"name": "chat", "tools": "template"},
        "data": {"name": "bench_prompts", "texts": list(texts)},
        "env": {"name": "bench_turns", "turns": turns, "delay_s": delay_s},
        "sampling": {"max_new_tokens": new},
        "limits": {"max_turns": turns, "max_tokens": turns * new, "max_tool_calls": turns},
        "engine": {"dtype": dtype if low else "auto"},
        "algorithm": {"preset": "grpo", "group_size": samples, "kl_coef": 0.0, **correction, **(algorithm or {})},
        "train": {
            "steps": 100_000,
            "tasks_per_step": len(texts),
            "learning_rate": 1e-6,
            "compute_dtype": dtype,
            "dump_every": 0,
            "save_every": 0,
            "guard": "off",
        },
        "eval": {"size": 0},
    }


def scratch() -> Path:
    """A directory that goes with the process."""
    folder = Path(tempfile.mkdtemp(prefix="palestra-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def trainer_of(config: RLConfig, *, endless: bool = False) -> RLTrainer:
    """A trainer at the beginning of its loop. It logs to nobody. endless: no token ends a turn, so every episode has
    exactly the length that is asked for."""
    made = prepare(config)
    if endless:
        made = replace(made, world=replace(made.world, renderer=Unstopped(made.world.renderer)))
    trainer = RLTrainer(made, Run(scratch(), ()), progress=Progress(quiet=True))
    trainer.begin_rl()
    return trainer


def step(**config: Any) -> Callable[[dict[str, Any]], Reply]:
    """Whole steps: rollout, rewards, update, new weights in the engine."""
    trainer = trainer_of(load(settings(**config), [], RLConfig), endless=True)

    def measure(request: dict[str, Any]) -> Reply:
        reset_peak()
        steps = request.get("steps", 1)
        parts: dict[str, float] = {}
        seconds = 0.0
        for _ in range(steps):
            spent, parts = timed(lambda: asyncio.run(trainer.step()))
            seconds += spent
        split = {name: value for name, value in parts.items() if name.startswith("time/")}
        return {"seconds": seconds / steps, "split": split, "peak_gib": peak_gib(), "resident_gib": resident_gib()}

    return measure


def episodes(**config: Any) -> Callable[[dict[str, Any]], Reply]:
    """Rollouts alone: all episodes of one step, through environment, renderer and engine."""
    trainer = trainer_of(load(settings(**config), [], RLConfig), endless=True)
    draws = 0

    def measure(_: dict[str, Any]) -> Reply:
        nonlocal draws
        trainer.engine.load_weights(trainer.model, trainer.engine.version + 1)
        seconds, groups = timed(lambda: asyncio.run(collected(trainer, draws)))
        draws += 1
        tokens = sum(t.sampled_tokens for g in groups for e in g.episodes for t in e.trajectories)
        return {"seconds": seconds, "tokens": tokens, "turns": _turns(groups)}

    return measure


async def collected(trainer: RLTrainer, draw: int) -> list[Group]:
    """One step's groups."""
    config, world = trainer.config, trainer.world
    tasks, _ = world.tasks.take(trainer.cursor, config.train.tasks_per_step)
    rollout = world.rollout(trainer.engine, config.sampling, purpose=f"bench {draw}")
    async with aclosing(
        collect(list(enumerate(tasks)), rollout, group_size=config.algorithm.group_size, concurrency=256)
    ) as groups:
        return [group async for group in groups]


def _turns(groups: Sequence[Group]) -> float:
    """Turns per episode, on average."""
    played = [len(t.turns) for g in groups for e in g.episodes for t in e.trajectories]
    return sum(played) / len(played)
