# SPDX-License-Identifier: Apache-2.0
"""``palestra eval``: a model on held-out tasks, through the very same episodes as in training."""

from __future__ import annotations

import asyncio
from typing import Any

from palestra.eval.evaluate import EvalResult, evaluate
from palestra.rollout.dump import write_rollouts
from palestra.run.directory import Run
from palestra.run.progress import Progress
from palestra.train import setup
from palestra.train.config import EvalConfig
from palestra.train.metrics import eval_metrics
from palestra.train.report import report_run


def run_eval(config: EvalConfig, *, progress: Progress) -> dict[str, Any]:
    """Play ``eval.size`` held-out tasks; returns the result that ``summary.json`` holds, and leaves the episodes
    and a report beside it."""
    loaded = setup.load(config.model)
    world = setup.make_world(config, loaded)
    settings = config.eval
    tasks = setup.eval_tasks(config, settings, settings.size)
    with Run.open(config.out, config) as run:
        progress.phase("evaluation", total=1)
        engine = setup.make_engine(config, loaded.model, world.renderer)
        rollout = world.rollout(engine, setup.eval_sampling(config, settings), purpose="eval")
        try:
            result: EvalResult = asyncio.run(evaluate(tasks, rollout, world.rubric, metric=settings.metric))
        finally:
            engine.close()
        metrics = eval_metrics(result)
        run.log(0, metrics, phase="eval")
        progress.update(1, metrics)
        write_rollouts(run.path / "rollouts" / "eval.jsonl.zst", result.groups)
        summary = {"model": config.model.path, "seed": config.seed, **result.to_dict()}
        run.write_summary(summary)
        report_run(run.path, summary, decode=world.renderer.decode)
    return summary
