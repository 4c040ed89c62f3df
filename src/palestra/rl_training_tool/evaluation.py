# SPDX-License-Identifier: Apache-2.0
"""``action: evaluate``: a model on held-out rows, through the episodes of ``palestra eval``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from palestra import config as configuration
from palestra.errors import ConfigError
from palestra.eval.compare import read_episodes
from palestra.model.loading import load_model
from palestra.rl_training_tool.datasets import Writer, write_rows
from palestra.rl_training_tool.parameters import EvaluateParameters
from palestra.rl_training_tool.training import (
    Log,
    Shelf,
    chosen_reward,
    fresh,
    given_rows,
    has_template,
    played,
    read_json,
)
from palestra.train.config import EvalConfig
from palestra.train.evaluation import run_eval

SEVERAL = 0.7
"""Temperature of several samples of a question."""


def evaluate(p: EvaluateParameters, shelf: Shelf, *, quiet: bool = False) -> dict[str, Any]:
    """Play the rows and return the metrics that were asked for."""
    if p.output_dir is not None:
        return _evaluate(p, shelf, fresh(Path(p.output_dir)), quiet)
    with tempfile.TemporaryDirectory(prefix="palestra-eval-") as folder:
        return _evaluate(p, shelf, Path(folder) / "eval", quiet)


def _evaluate(p: EvaluateParameters, shelf: Shelf, out: Path, quiet: bool) -> dict[str, Any]:
    path = _with_or_without_adapter(p)
    rows = given_rows(p, shelf)
    loaded = load_model(path)
    chat = has_template(loaded)
    data = out.with_name(f"{out.name}-data")
    write_rows(data / "test.jsonl", Writer(loaded.tokenizer, chat=chat).rl(rows))
    del loaded
    sampled = p.temperature if p.temperature is not None else SEVERAL if p.k > 1 else 0.0
    values = {
        "seed": p.seed,
        "out": str(out),
        "model": path,
        "renderer": "chat" if chat else "plain",
        **played(data / "test.jsonl", p.max_new_tokens, sampled),
        "rewards": chosen_reward(p, shelf),
        "eval": {
            "size": len(rows),
            "samples": p.k,
            "pass_k": [p.k],
            "temperature": sampled,
            "concurrency": p.batch_size,
        },
    }
    summary = run_eval(
        configuration.load(values, [], EvalConfig), progress=Log(max(1, len(rows) // 10), 1, quiet=quiet)
    )
    result: dict[str, Any] = {"model_path": path, "num_samples": len(rows), "errors": summary["errors"]}
    every = _numbers(summary, out, p.k)
    result |= {name: every[name] for name in p.wanted}
    if p.return_details:
        lines = (out / "examples.jsonl").read_text(encoding="utf-8").splitlines()
        result["details"] = [_detail(json.loads(line)) for line in lines]
    return result | ({"report": str(out / "report.html")} if p.output_dir is not None else {})


def _numbers(summary: dict[str, Any], out: Path, k: int) -> dict[str, Any]:
    each = summary["per_episode"]
    rewards = [e.reward for g in read_episodes(out) for e in g.episodes if e.error is None and e.reward is not None]
    return {
        "accuracy": summary["accuracy"],
        "average_reward": sum(rewards) / len(rewards) if rewards else None,
        "average_length": each["tokens"]["mean"],
        "format_correctness": summary["format_rate"],
        "accuracy_at_k": summary["pass_at_k"][str(k)]["value"],
        "numeric_error": summary["numeric_error"]["mean"],
        "average_steps": each["steps"]["mean"],
        "average_time": each["seconds"]["mean"],
        "error_analysis": summary["mistakes"],
        "difficulty": summary["difficulty"],
    }


def _detail(example: dict[str, Any]) -> dict[str, Any]:
    return {
        "question": example["question"],
        "ground_truth": example["gold"],
        "prediction": example["prediction"],
        "completion": example["text"],
        "correct": example["right"],
        "length": example["tokens"],
        "steps": example["steps"],
        "rewards": example["rewards"],
        "error_type": example["kind"],
        "why": example["rule"],
        "error": example["error"],
    }


def _with_or_without_adapter(p: EvaluateParameters) -> str:
    """The model to load. ``use_lora: false`` on an adapter evaluates the base under it."""
    settings = Path(p.model_path) / "adapter_config.json"
    if p.use_lora and not settings.is_file():
        raise ConfigError(
            f"use_lora is set and {p.model_path} holds no adapter; leave use_lora out for the model as it is"
        )
    if p.use_lora is False and settings.is_file():
        return str(read_json(settings)["base_model_name_or_path"])
    return p.model_path
