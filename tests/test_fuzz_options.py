# SPDX-License-Identifier: Apache-2.0
"""Options that a factory cannot use: one line that names the option, as mutated configs have found them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from test_fuzz_files import CONFIGS, EXAMPLES, told

# One change each: file, place, value, what the refusal says.
MISTAKES = [
    ("calculator.yaml", "warmup.data.noise.left-mul", 0, "option noise = "),
    ("calculator.yaml", "warmup.data.noise.left-mul", {"wrong_last": float("nan")}, "slip probabilities"),
    ("calculator.yaml", "warmup.data.noise.left-mul", {"wrong_last": 1e308, "operand": 1e308}, "slip probabilities"),
    ("calculator.yaml", "warmup.data.count", 10**30, "ask for at most 10,000,000"),
    ("calculator.yaml", "warmup.data.count", [], "option count = []: should be a valid integer"),
    ("calculator.yaml", "warmup.data.seed", 1, "takes the run's seed"),
    ("calculator.yaml", "data", {"name": "jsonl"}, "data source 'jsonl' needs the option 'path'"),
    ("calculator.yaml", "data", {"name": "jsonl", "path": "a" * 5000}, "does not exist"),
    ("calculator.yaml", "data", {"name": "table", "path": "a" * 5000}, "no such path"),
    ("calculator.yaml", "data", {"name": "curriculum", "source": {"name": "arithmetic", "seed": 1}}, "source: seed"),
    ("calculator.yaml", "algorithm", 5, "unknown algorithm preset '5'"),
    ("calculator.yaml", "algorithm", [[]], "algorithm = [[]]"),
    ("calculator.yaml", "algorithm.preset", [[]], "unknown algorithm preset '[[]]'"),
    ("calculator.yaml", "eval.size", 10**30, "ask for at most 10,000,000"),
    ("calculator.yaml", "env.max_steps", "x", "env 'calculator': option max_steps = 'x': should be a valid integer"),
    ("calculator.yaml", "renderer", {"name": "plain", "tokenizer": "x"}, "renderer.tokenizer comes from the model"),
    (
        "calculator.yaml",
        "rewards.short",
        {"function": "length_penalty", "target": "x"},
        "rewards.short: 'length_penalty': option target",
    ),
    ("prefer_calculator.yaml", "prefer.held_out.count", "", "option count = '': should be a valid integer"),
    ("reward_model_calculator.yaml", "reward_model.data.count", 1e308, "option count = 1e+308"),
]


@pytest.mark.parametrize(("name", "place", "value", "says"), MISTAKES, ids=lambda v: str(v)[:30])
def test_an_option_that_a_factory_cannot_use_is_refused_by_its_name(
    tmp_path: Path, name: str, place: str, value: Any, says: str
) -> None:
    tree = yaml.safe_load((EXAMPLES / name).read_text())
    *parents, key = place.split(".")
    node = tree
    for part in parents:
        node = node[part]
    node[key] = value
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    assert says in told(CONFIGS[name], file, f"out={tmp_path / 'run'}", "--dry-run")
