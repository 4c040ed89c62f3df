# SPDX-License-Identifier: Apache-2.0
"""One door for all: a dictionary of parameters in, JSON out."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from palestra.errors import ConfigError, UserError, unknown
from palestra.rl_training_tool.datasets import Writer, format_math_dataset, named_rows, rows_of
from palestra.rl_training_tool.parameters import (
    EvaluateParameters,
    LoadParameters,
    RewardParameters,
    TrainParameters,
    read,
)
from palestra.rl_training_tool.rewards import keep, reward_parts

ACTIONS = ("train", "load_dataset", "create_reward", "evaluate")
SHOWN_ROWS = 3


class RLTrainingTool:
    """Training, data, rewards and evaluation through ``run({...})``; see ``docs/pipeline.md`` for every parameter.

    quiet: print no progress. Nothing is loaded before it is used.

    >>> tool = RLTrainingTool(quiet=True)
    >>> json.loads(tool.run({"action": "create_reward", "reward_typ": "step"}))["error"]
    "unknown parameter 'reward_typ' (parameters): did you mean 'reward_type'?"
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._datasets: dict[str, Any] = {}
        self._rewards: dict[str, str] = {}

    def register_dataset(self, name: str, dataset: Any) -> None:
        """Make rows, columns, a ``datasets.Dataset`` or a path known by a name, for ``dataset: name``."""
        rows_of(dataset, f"dataset {name!r}")
        self._datasets[name] = dataset

    def register_reward_function(self, name: str, function: Callable[..., Any]) -> None:
        """Make a reward ``f(completions, **columns) -> list[float]`` known by a name, for ``reward_type: name``. A data
        set that is registered under the same name is trained on with it."""
        self._rewards[name] = keep(function)

    def run(self, parameters: Mapping[str, Any] | str) -> str:
        """Do what ``action`` says; the result as JSON: ``status`` is ``success`` or ``error``, with one line in
        ``error``. Ctrl-C goes through."""
        try:
            result = {"status": "success", **self._do(_given(parameters))}
        except UserError as error:
            result = {"status": "error", "error": " ".join(str(error).split())}
        except Exception as error:  # the caller reads JSON; the traceback goes to the log
            logging.getLogger("palestra").debug("RLTrainingTool", exc_info=True)
            result = {"status": "error", "error": " ".join(f"{type(error).__name__}: {error}".split())}
        return json.dumps(_finite(result), ensure_ascii=False, default=str)

    def train(self, **parameters: Any) -> dict[str, Any]:
        """``run`` with ``action: train``, as a dictionary."""
        return self._called("train", parameters)

    def load_dataset(self, **parameters: Any) -> dict[str, Any]:
        """``run`` with ``action: load_dataset``, as a dictionary."""
        return self._called("load_dataset", parameters)

    def create_reward(self, **parameters: Any) -> dict[str, Any]:
        """``run`` with ``action: create_reward``, as a dictionary."""
        return self._called("create_reward", parameters)

    def evaluate(self, **parameters: Any) -> dict[str, Any]:
        """``run`` with ``action: evaluate``, as a dictionary."""
        return self._called("evaluate", parameters)

    def _called(self, action: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run({"action": action, **parameters}))
        return found

    def _do(self, given: dict[str, Any]) -> dict[str, Any]:
        action = given.get("action")
        if action not in ACTIONS:
            raise ConfigError(unknown("action", str(action), ACTIONS))
        if action == "create_reward":
            return self._create_reward(read(given, RewardParameters))
        if action == "load_dataset":
            return self._load(read(given, LoadParameters))
        from palestra.rl_training_tool.training import Shelf, train

        shelf = Shelf(dict(self._datasets), dict(self._rewards))
        if action == "train":
            parameters = read(given, TrainParameters)
            return {"algorithm": parameters.algorithm, **train(parameters, shelf, quiet=self._quiet)}
        from palestra.rl_training_tool.evaluation import evaluate

        return evaluate(read(given, EvaluateParameters), shelf, quiet=self._quiet)

    def _load(self, p: LoadParameters) -> dict[str, Any]:
        if p.custom_dataset is not None:
            rows = rows_of(p.custom_dataset, "custom_dataset")
        else:
            rows = named_rows(p.dataset or "gsm8k", p.split, self._datasets)
        rows = rows[: p.max_samples]
        if p.format != "raw":
            rows = _formed(rows, p)
        columns = list(dict.fromkeys(name for row in rows for name in row))
        return {
            "format": p.format,
            "split": p.split,
            "num_samples": len(rows),
            "columns": columns,
            "samples": rows[:SHOWN_ROWS],
        }

    def _create_reward(self, p: RewardParameters) -> dict[str, Any]:
        from palestra.reward import functions as functions  # the package registers the built-in rewards
        from palestra.reward.build import make_rubric

        own = dict(self._rewards)
        kind = p.reward_type
        if p.custom_reward is not None:
            kind = p.name or str(getattr(p.custom_reward, "__name__", "custom_reward"))
            own[kind] = keep(p.custom_reward)
        parts = reward_parts(kind, p.options, own)
        rubric = make_rubric(parts, chat=False)
        result: dict[str, Any] = {"reward_type": kind, "parts": parts}
        if p.name is not None:
            self._rewards[p.name] = own[kind] if kind in own else keep(_together(rubric.functions))
            result["registered_as"] = p.name
        if p.completions:
            values = _together(rubric.functions)(list(p.completions), ground_truth=list(p.ground_truth))
            scored = [v for v in values if v is not None]
            result |= {"rewards": values, "average_reward": sum(scored) / len(scored) if scored else None}
        return result


def _together(functions: Mapping[str, tuple[Callable[..., Any], float]]) -> Callable[..., list[float | None]]:
    """The weighted sum of a rubric's functions, as one function."""
    chosen = [(function, weight) for function, weight in functions.values() if weight]

    def reward(
        completions: list[str], ground_truth: list[Any], prompts: list[str] | None = None, **columns: Any
    ) -> list[float | None]:
        given = {"completions": completions, "prompts": prompts or [""] * len(completions), **columns}
        given |= {"ground_truth": ground_truth, "answer": ground_truth}
        rows = [_values(function(**given)) for function, _ in chosen]
        sums: list[float | None] = []
        for values in zip(*rows, strict=True):
            terms = [w * v for (_, w), v in zip(chosen, values, strict=True) if v is not None]
            sums.append(sum(terms) if terms else None)
        return sums

    return reward


def _values(returned: Any) -> Any:
    return asyncio.run(returned) if asyncio.iscoroutine(returned) else returned


def _given(parameters: Mapping[str, Any] | str) -> dict[str, Any]:
    if isinstance(parameters, str):
        try:
            parameters = json.loads(parameters)
        except ValueError as error:
            raise ConfigError(f"parameters are no JSON ({error}); give an object with an action") from None
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"parameters are a {type(parameters).__name__}; give a dictionary with an action")
    return dict(parameters)


def _finite(value: Any) -> Any:
    """Numbers that JSON has no word for become null."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def _formed(rows: list[dict[str, Any]], p: LoadParameters) -> list[dict[str, Any]]:
    """Rows in the form that is asked for; a table of questions and answers, or rows that are in it already."""
    if not {"completion", "ground_truth", "messages"} & {*rows[0]}:
        return format_math_dataset(rows, p.format, p.model_name)
    if p.model_name is not None:
        raise ConfigError("model_name writes questions into a chat template, and these rows have a form; leave it out")
    writer = Writer(None, chat=True)
    return writer.sft(rows) if p.format == "sft" else writer.rl(rows)


__all__ = ["RLTrainingTool"]
