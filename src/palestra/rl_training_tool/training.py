# SPDX-License-Identifier: Apache-2.0
"""``action: train``: parameters → data files and a config → a run → the numbers of the result."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra import config as configuration
from palestra.errors import ConfigError
from palestra.model.export import export_merged
from palestra.model.loading import LoadedModel, load_model
from palestra.model.lora import is_adapter
from palestra.rl_training_tool.datasets import (
    GSM8K,
    Row,
    Writer,
    check_raw,
    has_split,
    named_rows,
    rows_of,
    split_off,
    write_rows,
)
from palestra.rl_training_tool.held_out import HeldOut
from palestra.rl_training_tool.parameters import Data, TrainParameters
from palestra.rl_training_tool.rewards import keep, reward_parts
from palestra.run.progress import Progress
from palestra.run.trackers import read_metrics
from palestra.train.config import RLConfig, SFTConfig
from palestra.train.prefer import train_prefer
from palestra.train.preference_config import PreferConfig, RewardModelConfig
from palestra.train.reward_model import train_reward_model
from palestra.train.rl import train_rl
from palestra.train.sft import train_sft

ENV = "palestra.rl_training_tool.env:OneAnswerEnv"
LAST_STEPS = 10
"""Means of a training's numbers are over so many of its last steps."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """What was registered: data sets, and reward functions with the key that a config names them by."""

    datasets: Mapping[str, Any]
    rewards: Mapping[str, str]


class Log(Progress):
    """Prints the offline log, a line every ``every`` steps, and keeps warnings.

    >>> import io
    >>> from rich.console import Console
    >>> out = io.StringIO()
    >>> log = Log(2, epochs=1, console=Console(file=out))
    >>> log.phase("RL", total=2)
    >>> log.update(1, {"train/reward": 0.4})
    >>> log.update(2, {"train/reward": 0.45, "train/kl": 0.023, "train/loss": 1.234})
    >>> print(out.getvalue().strip())
    Epoch 1/1 | Step 2/2 | Reward: 0.45 | KL: 0.023 | Loss: 1.234
    """

    SHOWN = (("Reward", "train/reward"), ("KL", "train/kl"), ("Accuracy", "eval/accuracy"))
    LOSSES = ("train/loss", "sft/loss", "prefer/loss", "reward_model/loss")

    def __init__(self, every: int, epochs: int, *, console: Any = None, quiet: bool = False) -> None:
        super().__init__(console, quiet=True)
        self._every, self._epochs, self._silent = every, epochs, quiet
        self._of = 1
        self.warnings: list[str] = []

    def phase(self, name: str, total: int, *, done: int = 0) -> None:
        super().phase(name, total, done=done)
        self._of = total

    def update(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        super().update(step, metrics)
        loss = next((metrics[name] for name in self.LOSSES if name in metrics), None)
        shown = [*((label, metrics.get(name)) for label, name in self.SHOWN), ("Loss", loss)]
        told = [f"{label}: {value:.4g}" for label, value in shown if value is not None]
        if told and not self._silent and (step % self._every == 0 or step == self._of):
            epoch = max(1, -(-step * self._epochs // max(self._of, 1)))
            self.console.print(
                " | ".join([f"Epoch {epoch}/{self._epochs}", f"Step {step}/{self._of}", *told]), highlight=False
            )

    def is_last(self, step: int) -> bool:
        """Whether the phase ends with this step."""
        return step == self._of

    def held_out(self, step: int, told: str) -> None:
        """A line about a measurement of a supervised run."""
        if not self._silent:
            self.console.print(f"Step {step}/{self._of} | {told}", highlight=False)

    def note(self, text: str, *, warning: bool = False) -> None:
        super().note(text, warning=warning)
        self.warnings += [text] if warning else []


def train(p: TrainParameters, shelf: Shelf, *, quiet: bool = False) -> dict[str, Any]:
    """Train, leave the model in ``output_dir``, and return the numbers of the result."""
    out = Path(p.output_dir or f"models/{p.algorithm}_model")
    if any(out.glob("*.safetensors")) and not any(out.glob("run*/run.json")):
        raise ConfigError(f"output_dir={out} holds a model that was not trained there; choose another directory")
    if p.use_wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError("use_wandb needs the package wandb: pip install wandb, or set use_wandb to false")
    run = fresh(out / "run")
    rows, held_out = _rows(p, shelf)
    start, loaded = _start(p, run)
    maker = {"sft": _sft, "dpo": _dpo, "reward": _reward_model}.get(p.algorithm, _rl)
    data = run.with_name(f"{run.name}-data")
    job = _Job(p, start, loaded, data, rows, held_out, shelf, str(run))
    config, loop = maker(job)
    del loaded, job  # the loop loads the model itself; two copies would not always fit
    log = Log(p.logging_steps, p.num_epochs, quiet=quiet)
    measured = _held_out(config, data / "test.jsonl", p.eval_steps, log)
    with _wandb_project(p.wandb_project):
        summary = loop(config, progress=log, **({} if measured is None else {"observe": measured}))
    if not p.use_tensorboard:
        shutil.rmtree(run / "tensorboard", ignore_errors=True)
    checkpoint = Path(summary["checkpoint"])
    publish(checkpoint, out)
    result: dict[str, Any] = {"model_path": str(out), "output_dir": str(out), "num_samples": len(rows)}
    result |= {"num_epochs": p.num_epochs, "steps": summary["steps"]}
    metrics = read_metrics(run / "metrics.jsonl")
    result |= {k: v for k, v in _numbers(metrics, summary).items() if v is not None}
    if measured is not None:
        result |= {"eval_loss": measured.losses[max(measured.losses)], "eval_losses": measured.losses}
    details: dict[str, Any] = {"run": str(run), "checkpoint": str(checkpoint), "started_from": start}
    if p.algorithm in ("grpo", "ppo"):
        details |= {"num_generations": p.group, "prompts_per_step": p.batch // p.group}
    return result | {"warnings": log.warnings, "details": {**details, "seconds": summary["seconds"]}}


@dataclass(frozen=True, slots=True)
class _Job:
    """What a config is made of."""

    p: TrainParameters
    start: str
    loaded: LoadedModel
    data: Path
    rows: Sequence[Row]
    held_out: Sequence[Row]
    shelf: Shelf
    run: str

    @property
    def chat(self) -> bool:
        return has_template(self.loaded)

    @property
    def writer(self) -> Writer:
        return Writer(self.loaded.tokenizer, chat=self.chat)

    @property
    def common(self) -> dict[str, Any]:
        p = self.p
        lora = None
        if p.use_lora:
            targets = {} if p.lora_target_modules is None else {"target_modules": p.lora_target_modules}
            lora = {"r": p.lora_rank or 8, "alpha": p.lora_alpha, **targets}
        return {
            "seed": p.seed,
            "out": self.run,
            "model": self.start,
            "lora": lora,
            "renderer": "chat" if self.chat else "plain",
            "trackers": ["wandb"] if p.use_wandb else [],
        }

    @property
    def optim(self) -> dict[str, Any]:
        p = self.p
        return {
            "learning_rate": p.learning_rate,
            "warmup_ratio": p.warmup_ratio,
            "weight_decay": p.weight_decay,
        }

    @property
    def max_length(self) -> int:
        return min(self.p.max_length, self.loaded.max_context)


def has_template(loaded: LoadedModel) -> bool:
    """Whether prompts go through a chat template; a model without one reads plain text."""
    return bool(getattr(loaded.tokenizer, "chat_template", None))


def _sft(job: _Job) -> tuple[SFTConfig, Any]:
    p = job.p
    write_rows(job.data / "train.jsonl", job.writer.sft(job.rows))
    if job.held_out:
        write_rows(job.data / "test.jsonl", job.writer.sft(job.held_out))
    settings = {
        "data": {"name": "jsonl", "path": str(job.data / "train.jsonl")},
        "epochs": p.num_epochs,
        "batch_size": p.batch,
        "max_length": job.max_length,
        **job.optim,
    }
    return configuration.load({**job.common, "sft": settings, "save_every": p.save_steps}, [], SFTConfig), train_sft


def _held_out(config: Any, file: Path, every: int | None, log: Log) -> HeldOut | None:
    """What measures a supervised run on its way; the other algorithms do so themselves."""
    if not isinstance(config, SFTConfig) or every is None:
        return None
    sizes = {"max_length": config.sft.max_length, "max_tokens": config.sft.micro_batch_tokens}
    return HeldOut(file, every, last=log.is_last, tell=log.held_out, **sizes)


def _pair_settings(job: _Job) -> dict[str, Any]:
    p = job.p
    write_rows(job.data / "train.jsonl", job.writer.pairs(job.rows))
    held: dict[str, Any] = {}
    if job.held_out:
        write_rows(job.data / "test.jsonl", job.writer.pairs(job.held_out))
        held = {"held_out": {"name": "table", "path": str(job.data / "test.jsonl")}, "eval_every": p.eval_steps}
    return {
        "data": {"name": "table", "path": str(job.data / "train.jsonl")},
        "epochs": p.num_epochs,
        "batch_size": p.batch,
        "max_length": job.max_length,
        **job.optim,
        **held,
    }


def _dpo(job: _Job) -> tuple[PreferConfig, Any]:
    loss = {"name": "dpo", **({} if job.p.kl_coef is None else {"beta": job.p.kl_coef})}
    settings = {**_pair_settings(job), "loss": loss}
    return configuration.load(
        {**job.common, "prefer": settings, "save_every": job.p.save_steps}, [], PreferConfig
    ), train_prefer


def _reward_model(job: _Job) -> tuple[RewardModelConfig, Any]:
    values = {**job.common, "reward_model": _pair_settings(job), "save_every": job.p.save_steps}
    return configuration.load(values, [], RewardModelConfig), train_reward_model


def _rl(job: _Job) -> tuple[RLConfig, Any]:
    p = job.p
    write_rows(job.data / "train.jsonl", job.writer.rl(job.rows))
    if job.held_out:
        write_rows(job.data / "test.jsonl", job.writer.rl(job.held_out))
    tasks = p.batch // p.group
    algorithm: dict[str, Any] = {"preset": p.algorithm, "group_size": p.group}
    if p.kl_coef is not None:
        algorithm["kl_coef"] = p.kl_coef
    if p.clip_range is not None:
        algorithm |= {"clip_low": p.clip_range, "clip_high": p.clip_range}
    steps = max(1, -(-len(job.rows) * p.num_epochs // tasks))
    held = {"size": len(job.held_out), "every": p.eval_steps or 0, "curve_size": max(1, len(job.held_out))}
    values = {
        **job.common,
        **played(job.data, p.max_new_tokens, p.temperature),
        "rewards": chosen_reward(p, job.shelf),
        "algorithm": algorithm,
        "train": {"steps": steps, "tasks_per_step": tasks, "save_every": p.save_steps, **job.optim},
        "eval": held,
    }
    return configuration.load(values, [], RLConfig), train_rl


def played(data: Path, max_new_tokens: int, temperature: float) -> dict[str, Any]:
    """How the rows of a file, or of a directory with one per split, are played: one question, one answer."""
    return {
        "data": {"name": "jsonl", "path": str(data)},
        "env": ENV,
        "sampling": {"max_new_tokens": max_new_tokens, "temperature": temperature},
        "limits": {"max_turns": 1, "max_tool_calls": 0, "max_tokens": max_new_tokens},
    }


def chosen_reward(p: Any, shelf: Shelf) -> dict[str, Any]:
    """The reward of the parameters: a function that is handed over, a type, or the one registered under the name of the
    data set; accuracy where nothing is said."""
    if p.custom_reward is not None:
        if p.reward_type is not None or p.reward_config is not None:
            raise ConfigError("custom_reward is a whole reward; leave reward_type and reward_config out")
        name = p.custom_reward if isinstance(p.custom_reward, str) else getattr(p.custom_reward, "__name__", "reward")
        own = shelf.rewards if isinstance(p.custom_reward, str) else {name: keep(p.custom_reward)}
        return reward_parts(name, None, own)
    name = p.dataset or (GSM8K if p.custom_dataset is None else None)
    paired = name if name in shelf.rewards else None
    return reward_parts(p.reward_type or paired or "accuracy", p.reward_config, shelf.rewards)


def given_rows(p: Data, shelf: Shelf) -> list[Row]:
    """The rows that the parameters name, ``max_samples`` at most."""
    if p.custom_dataset is not None:
        if p.dataset is not None:
            raise ConfigError("custom_dataset and dataset are both given; leave one out")
        rows = rows_of(p.custom_dataset, "custom_dataset")
    else:
        rows = named_rows(p.dataset or GSM8K, p.split, shelf.datasets)
    return rows[: p.max_samples]


def _rows(p: TrainParameters, shelf: Shelf) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows to measure on: the test split where there is one, else a part of the rows."""
    rows = given_rows(p, shelf)
    if p.format == "raw":
        check_raw(rows)
    if p.eval_steps is None:
        return rows, []
    name = p.dataset or GSM8K
    if p.custom_dataset is None and has_split(name, "test", shelf.datasets):
        return rows, named_rows(name, "test", shelf.datasets)[: max(1, len(rows) // 10)]
    return split_off(rows)


def _start(p: TrainParameters, run: Path) -> tuple[str, LoadedModel]:
    """What training starts from. An adapter is merged first: the new one then has the rank that is asked for, and the
    policy before the first step is the reference. A model whose place the trained one takes is copied: an adapter on it
    would have no base any more."""
    loaded = load_model(p.model_name)
    base = run.with_name(f"{run.name}-base").resolve()
    if is_adapter(loaded.model):
        export_merged(p.model_name, base)
    elif Path(p.model_name).resolve() == run.parent.resolve():
        shutil.copytree(p.model_name, base, ignore=lambda folder, names: [n for n in names if Path(folder, n).is_dir()])
    else:
        return loaded.source, loaded
    return str(base), load_model(str(base))


def publish(checkpoint: Path, out: Path) -> None:
    """The model files of a checkpoint in ``out`` itself, so that its name is a model."""
    for old in (*out.glob("*.safetensors"), *out.glob("adapter_config.json"), *out.glob("config.json")):
        old.unlink()
    for file in checkpoint.iterdir():
        if file.is_file() and file.name != "COMPLETE":
            shutil.copy2(file, out / file.name)


def fresh(path: Path) -> Path:
    """``path``, or the first of path-2, path-3, … that does not exist: training into a directory twice just works."""
    n = 1
    found = path
    while found.exists():
        n += 1
        found = path.with_name(f"{path.name}-{n}")
    return found


@contextmanager
def _wandb_project(name: str | None) -> Iterator[None]:
    before = os.environ.get("WANDB_PROJECT")
    if name is not None:
        os.environ["WANDB_PROJECT"] = name
    try:
        yield
    finally:
        if name is not None:
            os.environ.pop("WANDB_PROJECT")
            os.environ |= {} if before is None else {"WANDB_PROJECT": before}


def _numbers(metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> dict[str, float | None]:
    """The last loss, and means over the last steps of what was sampled."""

    def mean(name: str) -> float | None:
        values = [float(row[name]) for row in metrics if name in row][-LAST_STEPS:]
        return sum(values) / len(values) if values else None

    losses = [row[name] for row in metrics for name in Log.LOSSES if name in row]
    failed = [row["rollout/errors"] for row in metrics if "rollout/errors" in row]
    return {
        "final_loss": losses[-1] if losses else summary.get("final_loss"),
        "average_reward": mean("train/reward"),
        "accuracy": mean("rollout/success_rate"),
        "average_length": mean("rollout/sampled_tokens_mean"),
        "format_correctness": mean("reward/format"),
        "kl": mean("train/kl"),
        "errors": int(sum(failed)),
        "accuracy_before": summary.get("accuracy_before"),
        "accuracy_after": summary.get("accuracy_after"),
    }


def read_json(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))
