# SPDX-License-Identifier: Apache-2.0
"""Learning the demo's problems: the warm start that everyone begins from, and our loop from there."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.ours.loop import trainer_of
from bench.peers.serve import Reply, timed
from palestra.run.progress import Progress
from palestra.train.config import RLConfig, SFTConfig
from palestra.train.demo import demo_config
from palestra.train.rl import RLTrainer
from palestra.train.sft import train_sft


def warm_start(out: str, seed: int, warmup: int | None = None) -> Callable[[dict[str, Any]], Reply]:
    """The demo's model after the demo's supervised warm-up (or ``warmup`` steps), as a checkpoint directory ``out``."""

    def measure(_: dict[str, Any]) -> Reply:
        if (Path(out) / "config.json").exists():
            return {"seconds": 0.0}
        with tempfile.TemporaryDirectory(prefix="palestra-bench-") as folder:
            demo = demo_config(folder, seed=seed)
            assert demo.warmup is not None
            settings = demo.warmup if warmup is None else demo.warmup.model_copy(update={"steps": warmup})
            config = SFTConfig(
                seed=seed, out=f"{folder}/run", model=demo.model, renderer=demo.renderer, sft=settings, save_every=0
            )
            seconds, summary = timed(lambda: train_sft(config, progress=Progress(quiet=True)))
            shutil.copytree(summary["checkpoint"], out)
        return {"seconds": seconds}

    return measure


def learning(
    model: str, seed: int, steps: int, dtype: str, held_out: int, tasks: int | None = None
) -> Callable[[dict[str, Any]], Reply]:
    """The demo's loop from a warm start: blocks of steps, and after each the greedy accuracy on ``held_out`` problems,
    which is not timed. dtype bfloat16: sampled and computed in it, corrected as in the whole-step bench."""
    trainer = trainer_of(_config(model, seed, steps, dtype, held_out, tasks))

    def measure(request: dict[str, Any]) -> Reply:
        seconds, _ = timed(lambda: asyncio.run(_steps(trainer, request["steps"])))
        result = asyncio.run(trainer.evaluate(held_out, "held out"))
        assert result is not None
        return {"seconds": seconds, "accuracy": result["accuracy"], "steps": trainer.steps_done}

    return measure


async def _steps(trainer: RLTrainer, count: int) -> None:
    for _ in range(count):
        await trainer.step()


def _config(model: str, seed: int, steps: int, dtype: str, held_out: int, tasks: int | None) -> RLConfig:
    """The demo's config, from the warm start instead of a warm-up of its own."""
    demo = demo_config("unused", seed=seed, steps=steps)
    low = {"old_logprobs": "recompute", "importance": "token_truncate"} if dtype == "bfloat16" else {}
    values = demo.model_dump(mode="json", exclude_unset=True)
    values |= {"model": model, "warmup": None, "eval": values["eval"] | {"size": held_out, "every": 0}}
    values["algorithm"] = values["algorithm"] | low
    values["engine"] = {"dtype": "bfloat16"} if low else {}
    fewer = {"tasks_per_step": tasks} if tasks is not None else {}
    values["train"] = values["train"] | {"compute_dtype": dtype, "guard": "off", "dump_every": 0, **fewer}
    return RLConfig.model_validate(values)
