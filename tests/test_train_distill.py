# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation as a run: a student comes closer to its teacher on its own episodes, with no reward at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_models import make_model

from palestra.config import load
from palestra.errors import ConfigError, ModelError
from palestra.model.loading import LoadedModel
from palestra.rollout.dump import read_rollouts
from palestra.run.progress import Progress
from palestra.train import setup
from palestra.train.config import ModelConfig, RLConfig, SFTConfig
from palestra.train.plan import describe
from palestra.train.reference import check_vocabulary
from palestra.train.replay import replay
from palestra.train.rl import train_rl
from palestra.train.sft import train_sft

DEMONSTRATIONS = {"name": "arithmetic", "count": 256, "noise": "clean"}
SFT: dict[str, Any] = {
    "model": "builtin:calculator",
    "renderer": "plain",
    "sft": {"data": DEMONSTRATIONS, "steps": 30, "batch_size": 16, "learning_rate": 3e-3},
    "save_every": 8,
    "keep_last": 9,
}
BASE: dict[str, Any] = {
    "model": "builtin:calculator",
    "renderer": "plain",
    "env": {"name": "calculator", "max_steps": 2},
    "data": "arithmetic",
    "sampling": {"max_new_tokens": 12},
    "algorithm": {"preset": "distill", "group_size": 1},
    "train": {"steps": 10, "tasks_per_step": 16, "learning_rate": 1e-3, "warmup_ratio": 0.0, "save_every": 0},
    "eval": {"size": 0},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student, eight steps into its demonstrations, and a teacher, thirty steps in."""
    out = tmp_path_factory.mktemp("models") / "sft"
    train_sft(load(SFT | {"out": str(out)}, [], SFTConfig), progress=Progress(quiet=True))
    return out / "checkpoints" / "step_000008", out / "checkpoints" / "step_000030"


def kl_by_step(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [r["train/kl"] for r in rows if "train/kl" in r]


@pytest.mark.parametrize("preset", ["distill", pytest.param("distill_full", marks=pytest.mark.slow)])
def test_a_warm_student_comes_closer_to_its_teacher(models: tuple[Path, Path], tmp_path: Path, preset: str) -> None:
    student, teacher = models
    before = (teacher / "model.safetensors").read_bytes()
    given = BASE | {"model": str(student), "teacher": str(teacher), "out": str(tmp_path / "run")}
    train_rl(load(given, [f"algorithm.preset={preset}"], RLConfig), progress=Progress(quiet=True))
    kl = kl_by_step(tmp_path / "run")
    assert len(kl) == 10 and kl[0] > 0.1
    assert sum(kl[-2:]) / 2 < 0.6 * kl[0], "nats per token of the student's own episodes"
    (played, *_) = read_rollouts(tmp_path / "run" / "rollouts" / "step_000001.jsonl.zst")
    paid = [term.value for e in played.episodes for t in e.trajectories for term in t.rewards.values()]
    assert not any(paid), "nothing paid for anything"
    assert replay(tmp_path / "run", 1, drift=True).exact
    assert (teacher / "model.safetensors").read_bytes() == before
    assert not (tmp_path / "run" / "reference").exists(), "the teacher is the reference, and lies where it lay"


def test_a_plan_names_the_teacher() -> None:
    plan = describe(load(BASE | {"teacher": "builtin:calculator"}, [], RLConfig))
    assert "teacher: builtin:calculator" in plan and "loss: distill, clip" in plan


def test_what_compares_no_siblings_is_not_told_that_its_groups_are_small_or_alike() -> None:
    from palestra.learn.advantage import WITHOUT_SIBLINGS
    from palestra.run.health import Monitor
    from palestra.run.health_checks import ALONE

    assert ALONE == WITHOUT_SIBLINGS
    row = {"rollout/groups": 4, "rollout/groups_zero_variance": 4, "train/reward": 0.5, "train/kl": 2.0}
    rung = {}
    for preset, teacher in (("grpo", None), ("distill", "builtin:calculator"), ("distill_full", "builtin:calculator")):
        given = BASE | {
            "model": "Qwen/Qwen3-0.6B",
            "algorithm": {"preset": preset, "group_size": 2},
            "teacher": teacher,
        }
        monitor = Monitor(load(given, [], RLConfig).model_dump(mode="json"))
        for step in range(1, 10):
            monitor.observe(step, row, phase="rl")
        rung[preset] = {alarm.rule for alarm in monitor.alarms}
    assert {"kl_high", "group_collapse", "small_group"} <= rung["grpo"]
    assert not rung["distill"] and not rung["distill_full"]


# What is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"algorithm": "distill"}, "set teacher: PATH"),
        ({"algorithm": "distill_full"}, "set teacher: PATH"),
        ({"algorithm": "dapo", "teacher": "builtin:calculator"}, "compares the policy with nobody"),
    ],
)
def test_a_teacher_is_there_exactly_when_it_is_asked(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load(BASE | given, [], RLConfig)


def test_a_kl_term_may_pull_towards_a_teacher() -> None:
    made = load(BASE | {"algorithm": "grpo", "teacher": "builtin:calculator"}, [], RLConfig)
    assert made.teacher == ModelConfig(path="builtin:calculator") and made.algorithm.needs_reference


class Vocabulary:
    """The part of a tokenizer that is compared."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}


def test_a_teacher_reads_the_same_tokens_or_is_refused_in_one_line() -> None:
    model: Any = make_model()
    student = LoadedModel(model, Vocabulary("a", "b", "c"), "student", ())  # type: ignore[arg-type]
    check_vocabulary(replace(student, source="teacher"), student)
    for tokens, told in ((("a", "c", "b"), "'b' is id 2 .* and id 1"), (("a", "b", "x"), "'c' is unknown .* and id 2")):
        other = replace(student, tokenizer=Vocabulary(*tokens), source="teacher")  # type: ignore[arg-type]
        with pytest.raises(ModelError, match=told) as caught:
            check_vocabulary(other, student)
        assert "\n" not in str(caught.value) and "'teacher'" in str(caught.value)


def test_a_teacher_may_have_more_logits_than_its_student_and_not_fewer() -> None:
    small, large = (setup.load(ModelConfig(path="builtin:calculator")) for _ in range(2))
    large.model.resize_token_embeddings(len(large.tokenizer) + 8)  # type: ignore[operator]
    check_vocabulary(large, small)
    with pytest.raises(ModelError, match="cannot score every token"):
        check_vocabulary(small, large)
