# SPDX-License-Identifier: Apache-2.0
"""What an inspection finds: numbers worked out by hand, planted hacks, and no hack where there is none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from palestra import cli
from palestra.reward.base import REWARDS
from palestra.reward.build import make_rubric
from palestra.reward.inspection import Inspection, Pair, Part, inspect_groups, score_again
from palestra.reward.probes import Probe, probe, texts
from palestra.rollout.dump import write_rollouts
from palestra.types import Author, Episode, Group, Message, RewardTerm, Span, StopReason, Task, Trajectory, Turn

RIGHT, WRONG = "Step 1: 2+2=4.\n#### 4", "Step 1: 2+2=5.\n#### 5"


def episode(task: Task, text: str, member: int = 0, **rewards: RewardTerm) -> Episode:
    words = len(text.split())
    said = Span(np.zeros(words, np.int32), Author.MODEL, "assistant", text, np.zeros(words, np.float32), 0)
    action: Message = {"role": "assistant", "content": text}
    turn = Turn((said,), ({"role": "user", "content": "2+2?"},), action, "eos")
    return Episode(task, (Trajectory((turn,), StopReason.ENV_TERMINATED, rewards=rewards),), member=member)


def group(draw: int, *members: str | dict[str, float | None], weights: dict[str, float] | None = None) -> Group:
    task = Task(f"t{draw}", "What is 2+2?", "4")
    episodes = []
    for i, member in enumerate(members):
        given = {} if isinstance(member, str) else member
        terms = {n: RewardTerm(v, (weights or {}).get(n, 1.0)) for n, v in given.items()}
        episodes.append(episode(task, member if isinstance(member, str) else "x", i, **terms))
    return Group(task, draw, tuple(episodes))


def part(found: Inspection, name: str) -> Part:
    return next(p for p in found.parts if p.name == name)


def test_distributions_and_signal_are_counted_by_hand() -> None:
    weights = {"right": 1.0, "form": 0.1}
    groups = [
        group(0, {"right": 1.0, "form": 1.0}, {"right": 0.0, "form": 1.0}, weights=weights),
        group(1, {"right": 0.0, "form": 1.0}, {"right": 0.0, "form": 1.0}, weights=weights),
        group(2, {"right": None, "form": 0.0}, {"right": 1.0, "form": 1.0}, weights=weights),
    ]
    found = inspect_groups([*groups, Group(Task("f", "?"), 3, (Episode(Task("f", "?"), error="lost"),))])
    assert (found.groups, found.episodes, found.failed) == (4, 6, 1)
    assert found.no_signal == pytest.approx(1 / 3)  # of the three groups with rewards, one has equal ones
    right, form, total = part(found, "right"), part(found, "form"), part(found, "reward")
    assert (right.scored, right.missing, right.mean, right.low, right.high) == (5, 1, 0.4, 0.0, 1.0)
    assert right.std == pytest.approx(math.sqrt(0.24))
    assert right.histogram == (3, 0, 0, 0, 0, 0, 0, 0, 0, 2)
    assert right.flat_groups == 0.5  # varies in one of the two groups that have two values
    assert form.flat_groups == pytest.approx(2 / 3)
    # totals 1.1 0.1 | 0.1 0.1 | 0.0 1.1
    assert total.mean == pytest.approx(2.5 / 6)


def test_pull_is_the_share_of_the_variance_and_correlation_is_within_groups() -> None:
    # a and b rise together from group to group, and pull apart within: an advantage sees only the latter
    groups = [
        group(0, {"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}, weights={"a": 2.0, "b": 1.0}),
        group(1, {"a": 9.0, "b": 8.0}, {"a": 8.0, "b": 9.0}, weights={"a": 2.0, "b": 1.0}),
    ]
    found = inspect_groups(groups)
    (pair,) = found.pairs
    assert (pair.correlation, pair.verdict, pair.episodes) == (pytest.approx(-1.0), "conflict", 4)
    # centred: a ±0.5, b ∓0.5, so paid a ±1, b ∓0.5, total ±0.5: shares 1·0.5/0.25 = 2 and −0.5·0.5/0.25 = −1
    assert part(found, "a").pull == pytest.approx(2.0)
    assert part(found, "b").pull == pytest.approx(-1.0)


def test_a_negative_weight_turns_the_sign_and_two_names_for_one_thing_are_told() -> None:
    weights = {"a": 1.0, "b": -1.0}
    (pair,) = inspect_groups([group(0, {"a": 1.0, "b": 1.0}, {"a": 0.0, "b": 0.0}, weights=weights)]).pairs
    assert (pair.correlation, pair.verdict) == (pytest.approx(-1.0), "conflict")
    (pair,) = inspect_groups([group(0, {"a": 1.0, "b": 0.3}, {"a": 0.0, "b": 0.1})]).pairs
    assert pair.verdict == "same"
    assert Pair("a", "b", 0.5, 9).verdict == ""
    assert inspect_groups([group(0, {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 0.0})]).pairs == ()  # a never varies


def test_a_closed_gate_is_seen() -> None:
    rewards: dict[str, Any] = {"accuracy": 1.0, "step": {"weight": 0.1, "gate": "accuracy"}}
    scored = score_again(make_rubric(rewards, chat=True), [group(0, RIGHT, WRONG)])
    assert part(inspect_groups(scored), "step").counted == 0.5


def probes(rewards: dict[str, Any], chat: bool = True) -> dict[str, Probe]:
    rubric = make_rubric(rewards, chat=chat)
    scored = score_again(rubric, [group(i, RIGHT, WRONG, WRONG) for i in range(3)])
    return {p.name: p for p in probe(rubric, scored)}


@pytest.mark.parametrize("chat", [True, False])
def test_built_in_rewards_pay_no_probe(chat: bool) -> None:
    found = probes({"accuracy": 1.0, "step": 0.2}, chat)
    assert [name for name, p in found.items() if p.verdict] == []
    assert all(found[name].reward == 0 for name in ("empty", "newlines", "echo of the question"))
    assert found["many answers"].reward == found["two answers"].reward == 0  # several values are no answer
    assert found["answer without work"].reward == pytest.approx(1.2)  # the recorded best has its step: 1.22


@REWARDS.register("planted_equals")
def planted_equals(completions: Any, **_: Any) -> list[float]:
    return [0.6 * (c[-1]["content"].count("\n") > 50) + 0.1 for c in completions]


@REWARDS.register("planted_anywhere")
def planted_anywhere(completions: Any, answer: Any, **_: Any) -> list[float]:
    return [float(str(gold) in c[-1]["content"]) for c, gold in zip(completions, answer, strict=True)]


def test_planted_hacks_are_found_and_only_they() -> None:
    spam = probes({"planted_equals": 1.0, "accuracy": 1.0})
    assert {n for n, p in spam.items() if p.verdict.startswith(("more", "half"))} == {"newlines"}
    anywhere = probes({"planted_anywhere": 1.0})
    assert anywhere["many answers"].reward == 1.0
    assert {n for n, p in anywhere.items() if p.verdict.startswith(("more", "half"))} == {"many answers", "two answers"}
    brief = probes({"accuracy": 1.0, "soft_overlong": {"max_len": 4, "cache": 3, "weight": 9.0}})
    assert brief["empty"].verdict.startswith("more than the recorded mean")  # saying nothing is what it teaches


def test_guesses_have_the_right_one_at_every_place_and_need_no_number() -> None:
    made = texts(Task("t", "?", "red"), ["blue", "red", "green", "blue"])
    assert made["many answers"][0] == ["#### red blue green", "#### blue red green", "#### blue green red"]
    assert made["two answers"][0] == ["\\boxed{red or blue}", "\\boxed{blue or red}"]
    assert "two answers" not in texts(Task("t", "?", "red"), ["red"])  # nothing to choose from
    assert set(texts(Task("t", "?"), [])) == {"empty", "newlines", "echo of the question"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with recorded rewards and the config that made them."""
    folder = tmp_path / "run"
    rewards: dict[str, Any] = {"accuracy": 1.0}
    scored = score_again(make_rubric(rewards, chat=True), [group(i, RIGHT, WRONG) for i in range(2)])
    write_rollouts(folder / "rollouts" / "step_000001.jsonl.zst", scored)
    (folder / "config.yaml").write_text("format: 1\nmodel: builtin:calculator\nrewards: {accuracy: 1.0}\n")
    return folder


def call(*args: str) -> Any:
    result = CliRunner().invoke(cli.app, ["rewards", "inspect", *args])
    return json.loads(result.output) if result.exit_code == 0 and "--json" in args else result


def test_a_run_shows_what_was_recorded_and_a_config_scores_again(run: Path, tmp_path: Path) -> None:
    recorded = call(str(run), "--json")
    assert [p["name"] for p in recorded["parts"]] == ["accuracy", "reward"]
    assert [p["verdict"] for p in recorded["probes"] if p["name"] == "many answers"] == [""]
    config = tmp_path / "new.yaml"
    config.write_text(f"out: {run}\nrewards:\n  accuracy: 1.0\n  step: {{gate: accuracy}}\n")
    again = call(str(config), "rewards.step.weight=0.5", "--json")
    means = {p["name"]: (p["weight"], p["mean"]) for p in again["parts"]}
    assert means == {"accuracy": (1.0, 0.5), "step": (0.5, 0.55), "reward": (1.0, 0.775)}


def test_what_only_the_policy_can_measure_is_shown_as_recorded_and_not_scored_again(run: Path) -> None:
    gated = "{accuracy: 1.0, information_gain: 0.5, step: {gate: information_gain}}"
    (run / "config.yaml").write_text(f"format: 1\nmodel: builtin:calculator\nout: {run}\nrewards: {gated}\n")
    recorded = call(str(run), "--json")
    assert [p["name"] for p in recorded["parts"]] == ["accuracy", "reward"]
    assert "information_gain" not in next(p for p in recorded["probes"] if p["name"] == "empty")["parts"]
    refused = call(str(run / "config.yaml"))
    assert refused.exit_code == 2 and "name a model as `path`" in " ".join(refused.output.split())


def test_the_tables_show_parts_pairs_and_probes(run: Path) -> None:
    shown = call(str(run), "rewards.planted_anywhere=1").output
    assert "4 episodes in 2 groups" in shown
    for words in (
        "accuracy",
        "planted_anywhere",
        "flat",
        "pull",
        "correlation",
        "many answers",
        "two answers",
        "half of the",
    ):
        assert words in shown


def test_a_rollouts_file_alone_has_no_probes_and_mistakes_are_told(run: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone.jsonl.zst"
    alone.write_bytes((run / "rollouts" / "step_000001.jsonl.zst").read_bytes())
    assert call(str(alone), "--json")["probes"] == []
    for args, words in [
        ((str(alone), "rewards.step=1"), "name a CONFIG.yaml"),
        ((str(run), "train.steps=1"), "override rewards"),
        ((str(run), "rewards.stepp=1"), "did you mean 'step'"),
        ((str(tmp_path / "none.yaml"),), "does not exist"),
    ]:
        result = call(*args)
        assert (result.exit_code, words in result.output) == (2, True), result.output
