# SPDX-License-Identifier: Apache-2.0
"""``palestra reward-model``: what it learns, that it comes back as it was saved, and that a rubric can ask it."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_preference_train import DATA, HELD_OUT, Listening, rows_of, weights_in
from typer.testing import CliRunner

import palestra.reward.reward_model  # noqa: F401  the reward of that name
from palestra import cli
from palestra.chat import PlainRenderer
from palestra.data.preferences import arithmetic_pairs, encode
from palestra.engine.scripted import ScriptedEngine
from palestra.env import make_env
from palestra.errors import ConfigError, DataError, ModelError
from palestra.learn.preference_step import reply_rewards
from palestra.model.reward_head import load_reward_model
from palestra.model.tiny import calculator_tokenizer
from palestra.reward.build import make_rubric
from palestra.rollout.episode import Limits, SamplingConfig, run_episode
from palestra.train.plan import describe
from palestra.train.prefer import comparisons
from palestra.train.preference_config import RewardModelConfig
from palestra.train.reward_model import train_reward_model
from palestra.types import Episode, Group, StopReason, Task, Trajectory

PLAIN = PlainRenderer(calculator_tokenizer())


def config(out: Path, **more: Any) -> RewardModelConfig:
    settings: dict[str, Any] = {"data": DATA, "batch_size": 3, "steps": 4, "learning_rate": 1e-3, "held_out": HELD_OUT}
    given = {"model": "builtin:calculator", "renderer": "plain", "out": str(out)}
    root = {k: more.pop(k) for k in ("lora", "save_every", "model") if k in more}
    return RewardModelConfig.model_validate(given | {"reward_model": settings | more} | root)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a short run."""
    out = tmp_path_factory.mktemp("runs") / "r"
    return Path(train_reward_model(config(out, steps=2), progress=Listening())["checkpoint"])


def test_a_run_writes_what_it_did(tmp_path: Path) -> None:
    summary = train_reward_model(config(tmp_path / "r"), progress=Listening())
    rows = rows_of(tmp_path / "r")
    assert [r["step"] for r in rows] == [0, 1, 2, 3, 4]
    names = ("loss", "margin", "accuracy", "ties", "chosen_reward", "rejected_reward", "grad_norm", "epoch")
    assert all(f"reward_model/{name}" in rows[-1] for name in names)
    assert summary["accuracy_after"] == rows[-1]["eval/accuracy"] and summary["pairs"] == 12
    files = {p.name for p in Path(summary["checkpoint"]).iterdir()}
    assert {"reward_head.safetensors", "reward_head.json", "model.safetensors", "COMPLETE"} <= files
    sealed = json.loads((Path(summary["checkpoint"]) / "COMPLETE").read_text())["files"]
    assert "reward_head.safetensors" in sealed


@pytest.mark.slow  # the quick suite kills and resumes reward models in test_resume_matrix.py
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_resumed_run_ends_with_the_very_weights_of_an_uninterrupted_one(tmp_path: Path, lora: bool) -> None:
    more: dict[str, Any] = {"lora": {"r": 2, "dropout": 0.2}} if lora else {}
    train_reward_model(config(tmp_path / "whole", **more), progress=Listening())
    with pytest.raises(KeyboardInterrupt):
        train_reward_model(config(tmp_path / "cut", **more), progress=Listening(stop_at=2))
    train_reward_model(config(tmp_path / "cut", **more), progress=Listening(), resume=True)
    for name in ("adapter_model.safetensors" if lora else "model.safetensors", "reward_head.safetensors"):
        assert weights_in(tmp_path / "cut", 4, name) == weights_in(tmp_path / "whole", 4, name)
        assert weights_in(tmp_path / "cut", 4, name) != weights_in(tmp_path / "cut", 2, name)


def test_a_reward_model_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    summary = train_reward_model(config(tmp_path / "r", lora={"r": 2}), progress=Listening())
    model, loaded = load_reward_model(summary["checkpoint"], device="cpu")
    assert model.renderer == {"name": "plain"} and not model.training
    held_out = arithmetic_pairs(seed=0, count=4, max_operand=9, split="test")
    data = comparisons(encode(held_out, PLAIN, max_length=200)[0])
    with torch.no_grad():
        rewards = reply_rewards(model, data.rows, range(len(data.rows)))
    assert float((rewards[0::2] - rewards[1::2]).mean()) == pytest.approx(summary["margin_after"], rel=1e-4)
    assert loaded.tokenizer.decode([2]) == "<eos>"


# As a reward -----------------------------------------------------------------------------------------------


def episodes() -> Group:
    """One problem, done right, done wrong, and failed for want of a network."""
    pair = arithmetic_pairs(seed=0, count=1)[0]
    task = Task("t", pair.prompt[0]["content"], 148)
    played = []
    for member, reply in enumerate(pair.replies):
        turns = [m["content"] for m in reply if m["role"] == "assistant"]
        play = run_episode(
            task,
            env=make_env("calculator")(),
            engine=ScriptedEngine(turns, calculator_tokenizer()),
            renderer=PLAIN,
            limits=Limits(),
            sampling=SamplingConfig(),
            seed=0,
            member=member,
        )
        played.append(asyncio.run(play))
    return Group(task, 0, (*played, Episode(task, error="no network", member=2)))


def test_as_a_reward_it_gives_each_episode_what_the_model_gives_its_tokens(trained: Path) -> None:
    group = episodes()
    rubric = make_rubric({"reward_model": {"path": str(trained), "weight": 0.5, "device": "cpu"}}, chat=False)
    scored = asyncio.run(rubric.score(group)).episodes
    model, _ = load_reward_model(trained, device="cpu")
    data = comparisons(encode(arithmetic_pairs(seed=0, count=1), PLAIN, max_length=200)[0])
    for episode, sample in zip(group.episodes, data.rows.samples, strict=False):
        assert np.array_equal(episode.trajectories[0].tokens, sample.tokens), "the dialogue of the pair, played again"
    with torch.no_grad():
        wanted = [float(r) for r in reply_rewards(model, data.rows, range(2))]
    found = [e.trajectories[0].rewards["reward_model"].value for e in scored[:2]]
    assert found == pytest.approx(wanted, abs=1e-6) and found[0] != found[1]
    assert scored[0].reward == pytest.approx(0.5 * wanted[0], abs=1e-6)
    assert scored[2].reward is None


def test_an_episode_longer_than_the_models_context_is_not_scored(trained: Path) -> None:
    rubric = make_rubric({"reward_model": {"path": str(trained), "device": "cpu"}}, chat=False)
    short, *_ = episodes().episodes
    turn = short.trajectories[0].turns[0]
    long = Episode(short.task, (Trajectory((turn,) * 20, StopReason.MAX_TURNS),), member=1)
    empty = Episode(short.task, (Trajectory((), StopReason.MAX_TURNS),), member=2)
    scored = asyncio.run(rubric.score(Group(short.task, 0, (short, long, empty)))).episodes
    assert scored[0].reward is not None and scored[1].reward is None and scored[2].reward is None


def test_a_path_that_holds_no_reward_model_is_told(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"reward model 'nowhere' .* which `palestra reward-model` writes"):
        make_rubric({"reward_model": {"path": "nowhere"}}, chat=False)
    run = trained.parent.parent
    with pytest.raises(ModelError, match=f"did you mean {trained}"):
        make_rubric({"reward_model": {"path": str(run)}}, chat=False)
    with pytest.raises(ConfigError, match="needs the option 'path'"):
        make_rubric({"reward_model": {"weight": 1.0}}, chat=False)
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    (copy / "reward_head.safetensors").write_bytes(b"no")
    with pytest.raises(ModelError, match="the reward head cannot be loaded"):
        load_reward_model(copy, device="cpu")
    (copy / "reward_head.json").write_text('{"format": 9}')
    with pytest.raises(ModelError, match="has format 9; this version reads format 1"):
        load_reward_model(copy, device="cpu")


def test_labelled_replies_are_no_pairs(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "1+1\n", "completion": "2", "label": True}))
    with pytest.raises(DataError, match="is a reply with a label, and this training compares pairs"):
        describe(config(tmp_path / "r", data={"name": "table", "path": str(tmp_path / "a.jsonl")}))


def test_the_verb_shows_its_plan(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        f"model: builtin:calculator\nrenderer: plain\nreward_model: {{data: {json.dumps(DATA)}}}\n"
    )
    result = CliRunner().invoke(cli.app, ["reward-model", str(tmp_path / "a.yaml"), "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "12 pairs, 0 held out; 1 optimiser steps of 16" in result.output
    assert "−log σ(r_chosen − r_rejected) + 0.01·(r_chosen + r_rejected)²" in result.output


# Learning --------------------------------------------------------------------------------------------------


@pytest.mark.slow  # about half a minute of one CPU core: the built-in model learns to look at the last operation
def test_held_out_accuracy_rises_well_above_chance(tmp_path: Path) -> None:
    data = {"name": "arithmetic", "count": 2000}
    more: dict[str, Any] = {
        "data": data,
        "held_out": data | {"count": 200, "split": "test"},
        "steps": 60,
        "batch_size": 32,
    }
    summary = train_reward_model(config(tmp_path / "r", **more), progress=Listening())
    assert 0.35 < summary["accuracy_before"] < 0.65
    assert summary["accuracy_after"] > 0.8 and summary["margin_after"] > 1.0
