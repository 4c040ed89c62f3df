# SPDX-License-Identifier: Apache-2.0
"""What the configured rewards read is asked of the data before anything is trained or written."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from palestra.data.source import GeneratedSource, check_source, make_source
from palestra.errors import DataError
from palestra.reward.rubric import Rubric
from palestra.train.config import EvalConfig, RLConfig
from palestra.train.prepare import prepare
from palestra.train.setup import fields_read, load, make_world
from palestra.types import Task


def by_length(completions: list[str], question: list[str]) -> list[float]:
    return [float(len(c)) for c in completions]


def by_hint(prompts: list[str], completions: list[str], ground_truth: list[Any], hint: list[str], **_: Any) -> Any:
    raise AssertionError("nothing is scored here")


class Scorer:
    def __call__(self, completions: list[str], task_id: list[str], *, level: list[int], weight: float = 1.0) -> Any:
        raise AssertionError("nothing is scored here")


def test_a_function_reads_its_parameters_without_a_default_but_those_that_all_functions_get() -> None:
    limited = functools.partial(by_hint, hint=["h"])
    for function, fields in (
        (by_length, []),
        (by_hint, ["answer", "hint"]),
        (limited, ["answer"]),
        (Scorer(), ["level"]),
        (lambda completions, answer=None, **columns: [0.0], []),
    ):
        assert fields_read(Rubric({"f": (function, 1.0)}, chat=False)) == dict.fromkeys(fields, "reward 'f'")
    two = Rubric({"long": (by_hint, 1.0), "short": (limited, 0.5)}, chat=False)
    assert fields_read(two)["answer"] == "reward 'long'", "the first that reads it is named"


def config(tmp_path: Path, rewards: dict[str, Any] | None, **changed: Any) -> dict[str, Any]:
    for split, rows in {"train": [{"answer": 3}, {}], "test": [{"answer": 3}, {"answer": 4}]}.items():
        lines = (json.dumps({"question": f"1+{n}\n", **row}) for n, row in enumerate(rows, 2))
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    plain = {"model": "builtin:calculator", "renderer": "plain", "env": "calculator", "out": str(tmp_path / "run")}
    return {
        **plain,
        "data": {"name": "jsonl", "path": str(tmp_path)},
        "rewards": rewards,
        "eval": {"size": 0},
        **changed,
    }


def test_training_tasks_that_lack_what_a_reward_reads_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    accuracy = {"accuracy": {"function": "calculator_accuracy"}}
    told = r"train.jsonl:2: no field 'answer' or 'ground_truth', which reward 'accuracy' reads; there is: question"
    with pytest.raises(DataError, match=told):
        prepare(RLConfig.model_validate(config(tmp_path, accuracy)))
    assert not (tmp_path / "run").exists()
    prepare(RLConfig.model_validate(config(tmp_path, {f"{__name__}:by_length": 1.0})))
    prepare(RLConfig.model_validate(config(tmp_path, accuracy, data="arithmetic")))


def test_held_out_tasks_are_asked_too_and_an_evaluation_asks_no_others(tmp_path: Path) -> None:
    rewards, eval_on_train = {"calculator_accuracy": 1.0}, {"size": 2, "split": "train"}
    with pytest.raises(DataError, match=r"train.jsonl:2: no field 'answer'"):
        prepare(
            RLConfig.model_validate(
                config(
                    tmp_path,
                    rewards,
                    data="arithmetic",
                    eval={**eval_on_train, "data": {"name": "jsonl", "path": str(tmp_path)}},
                )
            )
        )
    evaluation = EvalConfig.model_validate(config(tmp_path, rewards, eval={"size": 2}))
    make_world(evaluation, loaded := load(evaluation.model))
    with pytest.raises(DataError, match=r"train.jsonl:2: no field 'answer'"):
        make_world(EvalConfig.model_validate(config(tmp_path, rewards, eval=eval_on_train)), loaded)


def test_of_an_endless_source_some_tasks_may_have_no_answer_and_not_all() -> None:
    needs = {"answer": "reward 'accuracy'"}
    check_source(GeneratedSource(lambda i: Task(f"{i}", "1+1=", 2 if i % 4 == 3 else None)), needs, "mine")
    with pytest.raises(DataError, match="mine: none of 100 tasks has an answer"):
        check_source(GeneratedSource(lambda i: Task(f"{i}", "1+1=")), needs, "mine")


def test_a_row_of_math_without_a_level_is_named_before_training_meets_it(tmp_path: Path) -> None:
    rows = [{"problem": f"{n}?", "solution": f"\\boxed{{{n}}}", "level": f"Level {n or '?'}"} for n in (1, 2, 0)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=r"train/3: no field 'level', which reward 'hard' reads"):
        make_source("math", {"level": "reward 'hard'"}, path=str(tmp_path))
    assert make_source("math", path=str(tmp_path)).size == 3
