# SPDX-License-Identifier: Apache-2.0
"""reasoning-gym's tasks by name and its own scorer, on a stand-in for the package, and on the package where it is."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from palestra.data.source import Cursor, make_source
from palestra.errors import ConfigError, DataError, RewardError
from palestra.reward import reasoning_gym as module
from palestra.reward.jobs import JobWorker
from palestra.reward.reasoning_gym import ScorerError, free_answer, reasoning_gym
from palestra.types import Task

STAND_IN = """
import time
from dataclasses import dataclass
from random import Random


@dataclass
class Config:
    low: int = 1
    seed: int = 0
    size: int = 500

    def validate(self):
        assert self.low > 0, "low must be positive"


class Sums:
    def __init__(self, config):
        self.config = config

    def __getitem__(self, index):
        rng = Random(self.config.seed + index)
        a, b = (rng.randint(self.config.low, 99) for _ in range(2))
        return {"question": f"{a}+{b}?", "answer": str(a + b), "metadata": {"pair": (a, b)}}

    def score_answer(self, answer, entry):
        if answer == "loop":
            time.sleep(60)
        if answer == "raise":
            raise ZeroDivisionError("by a reply")
        return 1.0 if answer == str(sum(entry["metadata"]["pair"])) else 0.01 if answer else 0.0
"""
FACTORY = """
from .sums import Config, Sums

DATASETS = {"sums": (Sums, Config), "more_sums": (Sums, Config)}


def create_dataset(name, **options):
    config = Config(**options)
    config.validate()
    return Sums(config)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of that name, here and in the scorer's process."""
    package = tmp_path / "reasoning_gym"
    package.mkdir()
    (package / "__init__.py").write_text("from .factory import create_dataset\n")
    (package / "factory.py").write_text(FACTORY)
    (package / "sums.py").write_text(STAND_IN)
    for name in [n for n in sys.modules if n.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = JobWorker(module.WORKER.program, what="scoring", needs="reasoning-gym")
    monkeypatch.setattr(module, "WORKER", worker)
    yield
    worker.close()
    for name in [n for n in sys.modules if n.partition(".")[0] == "reasoning_gym"]:
        del sys.modules[name]


def take(n: int, **options: Any) -> list[Task]:
    return make_source("reasoning_gym", **options).take(Cursor(), n)[0]


def score(tasks: list[Task], texts: list[str], **options: Any) -> Any:
    columns = {name: [t.meta[name] for t in tasks] for name in ("question", "gym")}
    return reasoning_gym(**options)(completions=texts, **columns)


# The source ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stand_in")
def test_tasks_come_by_name_repeat_by_seed_and_splits_share_no_seed() -> None:
    tasks = take(20, task="sums", size=20)
    assert [t.id for t in sorted(tasks, key=lambda t: t.meta["gym"]["index"])][:2] == [
        "reasoning_gym/train/0/sums/0",
        "reasoning_gym/train/0/sums/1",
    ]
    assert all(eval(t.prompt.rstrip("?")) == int(t.answer) for t in tasks)  # type: ignore[union-attr]
    again, test, other = (
        [t.prompt for t in take(20, task="sums", size=20, **more)] for more in ({}, {"split": "test"}, {"seed": 1})
    )
    assert again == [t.prompt for t in tasks]
    assert len({*again} & {*test}) <= 1 and len({*again} & {*other}) <= 1


@pytest.mark.usefixtures("stand_in")
def test_several_tasks_take_turns_and_options_reach_them() -> None:
    tasks = take(5, task=["sums", "more_sums"], split="test", size=5, options={"low": 90})
    assert [t.meta["task"] for t in tasks] == ["sums", "more_sums", "sums", "more_sums", "sums"]
    assert all(int(t.answer) >= 180 for t in tasks)
    assert make_source("reasoning_gym", task="sums", size=7).size == 7


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"task": "sum"}, "did you mean 'sums'"),
        ({"task": []}, "empty list"),
        ({"task": "sums", "size": 0}, "data.size"),
        ({"task": "sums", "options": {"lo": 1}}, "did you mean 'low'"),
        ({"task": "sums", "options": {"low": 0}}, "low must be positive"),
        ({"task": "sums", "options": {"size": 3}}, "unknown option"),
    ],
)
def test_mistakes_are_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        take(1, **options)
    assert "\n" not in str(caught.value)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"pip install 'palestra\[reasoning-gym\]'"):
        take(1, task="leg_counting")


# The reward ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stand_in")
def test_gold_passes_and_garbage_gets_what_its_own_scorer_gives_it() -> None:
    tasks = take(2, task="sums", size=9)
    gold = [f"so <answer>{t.answer}</answer>" for t in tasks]
    assert score(tasks, gold) == [1.0, 1.0]
    assert score(tasks, list(reversed(gold))) == [0.01, 0.01]
    assert score(tasks, ["", str(tasks[1].answer)]) == [0.0, 0.0], "a number without a marker is no answer"


@pytest.mark.usefixtures("stand_in")
def test_a_scorer_that_raises_or_never_ends_leaves_the_completion_unscored() -> None:
    tasks = take(1, task="sums", size=9) * 3
    raised, late, right = score(
        tasks, ["<answer>raise</answer>", "<answer>loop</answer>", f"#### {tasks[0].answer}"], timeout_s=2.0
    )
    assert isinstance(raised, ScorerError) and "ZeroDivisionError" in str(raised)
    assert isinstance(late, ScorerError) and "within 2 s" in str(late)
    assert right == 1.0


@pytest.mark.usefixtures("stand_in")
def test_a_task_that_is_made_differently_now_is_not_scored_by_another_ones_answer() -> None:
    (task,) = take(1, task="sums", size=9)
    with pytest.raises(RewardError, match="one version of the package"):
        reasoning_gym()(completions=["#### 5"], question=["1+1?"], gym=[task.meta["gym"]])


def test_where_an_answer_is_read_from() -> None:
    assert free_answer("<answer>a</answer> no, <answer> b </answer>") == "b"
    assert free_answer("\\boxed{1 2} hence \\boxed{x_{1}}") == "x_{1}"
    assert free_answer("#### 5 apples") == "5 apples"
    assert free_answer("The answer is:\n1 0\n0 1") == "1 0\n0 1"
    assert free_answer("<answer>4</answer><|im_end|>") == "4"
    assert free_answer("<think>the answer is 4</think>") is None


# The package itself ----------------------------------------------------------------------------------------

HAS_PACKAGE = importlib.util.find_spec("reasoning_gym") is not None


@pytest.mark.skipif(not HAS_PACKAGE, reason="the optional package reasoning-gym is not installed")
@pytest.mark.parametrize("name", ["leg_counting", "chain_sum", "word_sorting", "countdown"])
def test_the_packages_own_gold_passes_its_own_scorer(name: str) -> None:
    tasks = take(3, task=name, size=3, split="test")
    assert score(tasks, [f"<answer>{t.answer}</answer>" for t in tasks], timeout_s=60.0) == [1.0] * 3
    assert all(float(s) < 1 for s in score(tasks, ["<answer>no idea</answer>"] * 3, timeout_s=60.0))
