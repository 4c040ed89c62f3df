# SPDX-License-Identifier: Apache-2.0
"""Advice about a reward: each rule is told where it is hurt and only there; and episodes played for a first look."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from palestra import cli
from palestra.reward.advice import DENSE, OWN_THING, PENALTIES, advise
from palestra.reward.build import make_rubric
from palestra.reward.inspection import inspect_groups
from palestra.types import Episode, Group, RewardTerm, StopReason, Task, Trajectory


def group(*members: dict[str, float], weights: dict[str, float] | None = None) -> Group:
    task = Task("t", "?")
    terms = [{n: RewardTerm(v, (weights or {}).get(n, 1.0)) for n, v in m.items()} for m in members]
    made = (Trajectory((), StopReason.ENV_TERMINATED, rewards=t) for t in terms)
    return Group(task, 0, tuple(Episode(task, (t,), member=i) for i, t in enumerate(made)))


def told(*groups: Group, rubric: Any = None) -> dict[str, str]:
    """The principle of each piece of advice, and its text; a principle is told once here."""
    advice = advise(inspect_groups(groups), rubric)
    assert len({a.principle for a in advice}) == len(advice)
    return {a.principle: a.text for a in advice}


def test_a_reward_that_keeps_the_rules_is_told_nothing() -> None:
    weights = {"accuracy": 1.0, "format": 0.1, "rude": -0.5}
    kept = group(
        {"accuracy": 1.0, "format": 1.0, "rude": 0.0},
        {"accuracy": 0.0, "format": 1.0, "rude": 1.0},
        {"accuracy": 1.0, "format": 0.0, "rude": 1.0},
        weights=weights,
    )
    assert told(kept) == {}


def test_two_names_for_one_thing_are_told() -> None:
    text = told(group({"a": 1.0, "b": 0.5, "c": 0.3}, {"a": 0.0, "b": 0.0, "c": 0.9}, {"a": 0.5, "b": 0.25, "c": 0.0}))
    assert set(text) == {OWN_THING} and text[OWN_THING].startswith("a and b say the same")


def test_a_penalty_that_a_bonus_outweighs_is_told() -> None:
    members = (
        {"accuracy": 1.0, "brief": 0.5, "rude": 1.0},
        {"accuracy": 0.0, "brief": 1.0, "rude": 0.0},
        {"accuracy": 0.0, "brief": 0.2, "rude": 0.5},
    )
    light = told(group(*members, weights={"accuracy": 1.0, "brief": 0.4, "rude": -0.2}))
    assert light == {PENALTIES: light[PENALTIES]}
    assert "rude costs at most 0.2 where brief pays up to 0.4" in light[PENALTIES]
    assert told(group(*members, weights={"accuracy": 1.0, "brief": 0.4, "rude": -0.5})) == {}
    # what the reward is mainly about is no bonus: a penalty need not outweigh it
    assert told(group(*({k: v for k, v in m.items() if k != "brief"} for m in members), weights={"rude": -0.2})) == {}


def test_a_sparse_reward_and_a_part_that_never_varies_are_told() -> None:
    flat = group({"accuracy": 0.0}, {"accuracy": 0.0})
    signal = group({"accuracy": 1.0}, {"accuracy": 0.0})
    assert told(flat, signal) == {}
    assert "67% of the groups have no signal" in told(flat, flat, signal)[DENSE]
    same = group({"accuracy": 1.0, "form": 1.0}, {"accuracy": 0.0, "form": 1.0})
    assert told(same)[DENSE].startswith("form varies in no group")
    assert told(group({"accuracy": 1.0, "form": 1.0}, {"accuracy": 0.0, "form": 1.0}, weights={"form": 0.0})) == {}


def test_a_function_of_ones_own_says_in_a_sentence_what_it_looks_at() -> None:
    def mute(completions: Any) -> list[float]:
        return [0.0 for _ in completions]

    def clear(completions: Any) -> list[float]:
        """Is it polite?"""
        return [0.0 for _ in completions]

    functions: Any = {"mute": mute, "clear": clear}
    rubric = make_rubric({"mute": 1.0, "clear": 1.0, "step": 0.1}, chat=True, functions=functions)
    assert told(rubric=rubric)[OWN_THING].startswith("mute has no docstring")


# Episodes that are played ----------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "model: builtin:calculator\nrenderer: plain\nenv: {name: calculator, max_steps: 2}\ndata: arithmetic\n"
        "rewards: {calculator_accuracy: 1.0, calculator_format: 0.1}\nsampling: {max_new_tokens: 4}\n"
        "algorithm: {group_size: 2}\nwarmup: {data: {name: arithmetic, count: 8}, steps: 2}\n"
    )
    return path


def test_episodes_are_played_where_none_were_recorded(tiny: Path, tmp_path: Path) -> None:
    options = ["rewards", "inspect", str(tiny), "limits.max_turns=1", "--sample", "5"]
    result = CliRunner().invoke(cli.app, [*options, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert (found["episodes"], found["groups"]) == (6, 3)  # whole groups of two
    assert found["rollouts"] == f"{tiny}, played by builtin:calculator, before its warm-up"
    assert [p["name"] for p in found["parts"]] == ["calculator_accuracy", "calculator_format", "reward"]
    assert found["no_signal"] == 1.0  # a model with random weights answers nothing
    assert any("no signal" in a["text"] for a in found["advice"] if a["principle"] == DENSE)
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.yaml"], "nothing is written"


def test_a_mistake_in_the_config_is_told(tiny: Path) -> None:
    result = CliRunner().invoke(cli.app, ["rewards", "inspect", str(tiny), "train.stepz=1", "--sample", "2"])
    assert (result.exit_code, "did you mean 'steps'" in result.output) == (2, True)
