# SPDX-License-Identifier: Apache-2.0
"""``palestra prefer``: configs, runs that go on where they were, and that the margin rises where it should."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from listening import Listening
from typer.testing import CliRunner

from palestra import cli
from palestra.chat import PlainRenderer
from palestra.config import load
from palestra.data.preferences import arithmetic_pairs, encode, unpaired
from palestra.errors import ConfigError, DataError, ModelError
from palestra.model.loading import LoadedModel
from palestra.model.tiny import calculator_tokenizer, tiny_llama
from palestra.train import setup
from palestra.train.config import ModelConfig
from palestra.train.plan import describe
from palestra.train.prefer import comparisons, train_prefer
from palestra.train.preference_config import PreferConfig

DATA = {"name": "arithmetic", "count": 12, "max_operand": 9}
HELD_OUT = {"name": "arithmetic", "count": 4, "max_operand": 9, "split": "test"}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One narrow layer in place of the built-in model."""

    def narrow(config: ModelConfig) -> LoadedModel:
        tokenizer = calculator_tokenizer()
        model = tiny_llama(tokenizer, hidden=24, layers=1, heads=2, intermediate=24)
        return LoadedModel(model, tokenizer, config.path, (2,))

    monkeypatch.setattr(setup, "load", narrow)


def config(out: Path, **more: Any) -> PreferConfig:
    settings: dict[str, Any] = {"data": DATA, "batch_size": 3, "steps": 4, "learning_rate": 1e-3, "held_out": HELD_OUT}
    given = {"model": "builtin:calculator", "renderer": "plain", "out": str(out)}
    root = {k: more.pop(k) for k in ("lora", "save_every", "model") if k in more}
    return PreferConfig.model_validate(given | {"prefer": settings | more} | root)


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights_in(run: Path, step: int, name: str = "model.safetensors") -> bytes:
    return (run / "checkpoints" / f"step_{step:06d}" / name).read_bytes()


# Rows ------------------------------------------------------------------------------------------------------


def test_both_replies_of_a_pair_are_one_group_and_only_the_replies_train() -> None:
    plain = PlainRenderer(calculator_tokenizer())
    data = comparisons(encode(arithmetic_pairs(seed=0, count=2), plain, max_length=200)[0])
    assert [s.group for s in data.rows.samples] == ["0", "0", "1", "1"] and len(data) == 2
    first = data.rows.samples[0]
    assert plain.decode(first.tokens).startswith("<bos>63*(44+47)\n<call>add(44,47)</call><obs>91</obs>")
    assert plain.decode(first.tokens[first.loss_mask]).startswith("<call>add(44,47)</call><call>mul(63,91)</call>")


def test_each_mismatched_reply_was_written_for_another_prompt() -> None:
    plain = PlainRenderer(calculator_tokenizer())
    data = comparisons(encode(unpaired(arithmetic_pairs(seed=0, count=3)), plain, max_length=200)[0])
    assert data.labels is not None and data.labels.tolist() == [True, False] * 3
    assert data.mismatched is not None
    for own, mixed in zip(data.rows.samples, data.mismatched.samples, strict=True):
        start = int(own.loss_mask.argmax())
        assert np.array_equal(own.tokens[:start], mixed.tokens[:start])
        others = [s for s in data.rows.samples if not np.array_equal(s.tokens[:start], own.tokens[:start])]
        assert any(plain.decode(s.tokens[s.loss_mask]) == plain.decode(mixed.tokens[mixed.loss_mask]) for s in others)


# A run -----------------------------------------------------------------------------------------------------


def test_a_run_writes_what_it_did(small: None, tmp_path: Path) -> None:
    summary = train_prefer(config(tmp_path / "r", eval_every=2), progress=Listening())
    rows = rows_of(tmp_path / "r")
    assert [r["step"] for r in rows] == [0, 1, 2, 3, 4]
    assert [r["step"] for r in rows if "eval/accuracy" in r] == [0, 2, 4]
    assert rows[0]["eval/loss"] == pytest.approx(math.log(2)) and rows[0]["eval/ties"] == 1.0
    assert rows[1]["prefer/loss"] == pytest.approx(math.log(2), abs=1e-6), "before any weight has moved"
    names = ("loss", "margin", "accuracy", "ties", "chosen_logprob", "rejected_logprob", "chosen_reward", "log_ratio")
    assert all(f"prefer/{name}" in rows[-1] for name in (*names, "grad_norm", "learning_rate", "epoch", "tokens"))
    assert rows[-1]["prefer/epoch"] == 4 * 3 / 12
    assert summary["pairs"] == 12 and summary["margin_before"] == 0.0
    assert summary["margin_after"] == rows[-1]["eval/margin"]
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["steps"] == 4


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"lora": {"r": 4}},
        {"precompute_reference": True},
        {"loss": "kto"},
    ],
    ids=["full", "lora", "precomputed", "kto"],
)
def test_a_resumed_run_ends_with_the_very_weights_of_an_uninterrupted_one(
    small: None, tmp_path: Path, more: dict[str, Any]
) -> None:
    whole = train_prefer(config(tmp_path / "whole", **more), progress=Listening())
    with pytest.raises(KeyboardInterrupt):
        train_prefer(config(tmp_path / "cut", **more), progress=Listening(stop_at=2))
    resumed = train_prefer(config(tmp_path / "cut", **more), progress=Listening(), resume=True)
    name = "adapter_model.safetensors" if "lora" in more else "model.safetensors"
    assert weights_in(tmp_path / "cut", 4, name) == weights_in(tmp_path / "whole", 4, name)
    assert weights_in(tmp_path / "cut", 4, name) != weights_in(tmp_path / "cut", 2, name)
    assert [r["step"] for r in rows_of(tmp_path / "cut")] == [0, 1, 2, 3, 4]
    for key in ("final_loss", "margin_before", "margin_after"):
        assert resumed[key] == whole[key]


def test_a_run_that_never_came_to_a_checkpoint_begins_anew(small: None, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_prefer(config(tmp_path / "r", steps=1), progress=Interrupting())
    train_prefer(config(tmp_path / "r", steps=1), progress=Listening(), resume=True)
    assert [r["step"] for r in rows_of(tmp_path / "r")] == [0, 1]


class Interrupting(Listening):
    """Ctrl-C before the first step."""

    def phase(self, name: str, total: int, *, done: int = 0) -> None:
        raise KeyboardInterrupt


def test_from_an_sft_adapter_the_first_loss_is_log_2_and_the_adapter_goes_on(tmp_path: Path) -> None:
    first = train_prefer(
        config(tmp_path / "sft", lora={"r": 4}, loss="orpo", steps=2, learning_rate=1e-2), progress=Listening()
    )
    train_prefer(config(tmp_path / "dpo", model=first["checkpoint"], steps=1), progress=Listening())
    rows = rows_of(tmp_path / "dpo")
    assert rows[1]["prefer/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert (rows[0]["eval/log_ratio"], rows[0]["eval/ties"]) == (0.0, 1.0)
    one, two = (weights_in(tmp_path / run, step, "adapter_model.safetensors") for run, step in (("sft", 2), ("dpo", 1)))
    assert one != two and len(one) == len(two)


def test_what_is_left_out_and_what_does_not_count_is_told(small: None, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        "\n".join(
            json.dumps({"prompt": "1+1\n", "completion": text, "label": label})
            for text, label in (("2", True), ("3" * 300, False), ("4", False), ("5", False), ("6", False))
        )
    )
    heard = Listening()
    data = {"name": "table", "path": str(tmp_path / "a.jsonl")}
    more: dict[str, Any] = {"lora": {"dropout": 0.5}, "loss": "kto", "data": data, "held_out": None, "steps": 1}
    train_prefer(config(tmp_path / "r", **more), progress=heard)
    told = "\n".join(heard.told)
    assert f"table: 1 of 5 left out, 1 longer than 256 tokens (first: {tmp_path / 'a.jsonl'}:2)" in told
    assert "lora.dropout is held at 0" in told
    assert "1 of 4 replies are desirable" in told


# Mistakes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("loss=dop", "unknown preference loss 'dop': did you mean 'dpo'"),
        ("loss={name: dpo, bet: 1}", "unknown option of preference loss 'dpo': 'bet': did you mean 'beta'"),
        ("loss={name: ipo, label_smoothing: 0.1}", "unknown option of preference loss 'ipo': 'label_smoothing'"),
        ("loss={name: dpo, beta: -1}", "loss dpo: beta = -1 (config): should be greater than 0"),
        ("eval_every=5", "eval_every needs held_out"),
    ],
)
def test_a_mistake_in_the_config_is_one_line(given: str, said: str) -> None:
    base = {"model": "builtin:calculator", "prefer": {"data": "arithmetic"}}
    with pytest.raises(ConfigError) as error:
        load(base, [f"prefer.{given}"], PreferConfig)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_kto_needs_more_than_one_reply_a_step_and_reference_free_losses_no_reference() -> None:
    base = {"model": "builtin:calculator", "prefer": {"data": "arithmetic"}}
    with pytest.raises(ConfigError, match="batch_size is 1: kto compares a reply with the others"):
        load(base, ["prefer.loss=kto", "prefer.batch_size=1"], PreferConfig)
    with pytest.raises(ConfigError, match="precompute_reference: the loss 'simpo' has no reference"):
        load(base, ["prefer.loss=simpo", "prefer.precompute_reference=true"], PreferConfig)


def test_labelled_replies_are_no_pairs_and_nothing_is_written_then(small: None, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "1+1\n", "completion": "2", "label": True}))
    with pytest.raises(DataError, match=r"a\.jsonl:1 is a reply with a label, .* or choose the loss kto"):
        train_prefer(
            config(tmp_path / "r", data={"name": "table", "path": str(tmp_path / "a.jsonl")}), progress=Listening()
        )
    assert not (tmp_path / "r").exists()


def test_a_second_adapter_on_an_adapter_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    first = train_prefer(config(tmp_path / "a", lora={"r": 2}, steps=1, held_out=None), progress=Listening())
    with pytest.raises(ModelError, match="already carries an adapter"):
        train_prefer(config(tmp_path / "b", model=first["checkpoint"], lora={"r": 2}), progress=Listening())
    assert not (tmp_path / "b").exists()


# The command line ------------------------------------------------------------------------------------------


def test_the_plan_says_what_is_trained_against_what(small: None, tmp_path: Path) -> None:
    plan = describe(config(tmp_path / "r"))
    assert "12 pairs, 4 held out; 4 optimiser steps of 3 at learning rate 0.001" in plan
    assert (
        "loss: dpo (beta 0.1, label_smoothing 0.0), mean over the step; the reference is a copy of what trains" in plan
    )
    assert "the base under the adapter" in describe(config(tmp_path / "r", lora={"r": 4}))
    assert "computed once, before training" in describe(config(tmp_path / "r", precompute_reference=True))
    kto = describe(config(tmp_path / "r", loss="kto"))
    assert "24 labelled replies, 8 held out" in kto
    assert "simpo (beta 2.0, gamma 1.0), mean over the step; no reference" in describe(
        config(tmp_path / "r", loss="simpo")
    )


def test_the_verb_trains_and_tells_its_numbers(small: None, tmp_path: Path) -> None:
    text = f"""
model: builtin:calculator
renderer: plain
out: {tmp_path / "r"}
prefer: {{data: {json.dumps(DATA)}, batch_size: 3}}
"""
    (tmp_path / "a.yaml").write_text(text)
    dry = CliRunner().invoke(cli.app, ["prefer", str(tmp_path / "a.yaml"), "--dry-run"])
    assert dry.exit_code == 0 and "12 pairs" in dry.output and not (tmp_path / "r").exists()
    done = CliRunner().invoke(cli.app, ["prefer", str(tmp_path / "a.yaml"), "prefer.steps=2"])
    assert done.exit_code == 0, done.output
    assert "final loss" in done.output and (tmp_path / "r" / "summary.json").exists()


# Learning --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dpo", "ipo", "kto", "orpo", "simpo"])
def test_each_loss_learns_to_tell_the_replies_of_its_pairs_apart(small: None, tmp_path: Path, name: str) -> None:
    more: dict[str, Any] = {"steps": 30, "batch_size": 12, "learning_rate": 1e-2, "held_out": DATA, "loss": name}
    summary = train_prefer(config(tmp_path / "r", **more), progress=Listening())
    assert summary["loss_after"] < 0.7 * summary["loss_before"]
    assert summary["accuracy_after"] >= 0.9 and summary["margin_after"] > max(0.0, summary["margin_before"])


@pytest.mark.slow  # about half a minute of one CPU core: the built-in model learns to look at the last operation
def test_dpo_raises_the_margin_on_problems_that_it_never_saw(tmp_path: Path) -> None:
    data = {"name": "arithmetic", "count": 1000}
    more: dict[str, Any] = {
        "data": data,
        "held_out": data | {"count": 200, "split": "test"},
        "steps": 30,
        "batch_size": 32,
    }
    summary = train_prefer(config(tmp_path / "r", **more), progress=Listening())
    assert summary["margin_before"] == 0.0
    assert summary["margin_after"] > 1.0 and summary["accuracy_after"] > 0.8
