# SPDX-License-Identifier: Apache-2.0
"""The whole loop on the built-in model: what a run leaves behind, that it repeats, and that it can be interrupted."""

from __future__ import annotations

import itertools
import json
import signal
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palestra.config import load
from palestra.errors import ConfigError, RunError, UserError
from palestra.eval.evaluate import EvalResult, result_of
from palestra.learn.batch import rows
from palestra.run.metrics import check
from palestra.run.progress import Progress
from palestra.train import setup
from palestra.train.checkpoint import best_checkpoint, latest_checkpoint, load_checkpoint
from palestra.train.config import EvalConfig, OptimConfig, RLConfig, SFTConfig, learning_rate
from palestra.train.metrics import rollout_metrics
from palestra.train.plan import describe
from palestra.train.rl import RLTrainer, train_rl
from palestra.types import Author, Episode, Group, RewardTerm, Span, StopReason, Task, Trajectory, Turn

BASE: dict[str, Any] = {
    "model": "builtin:calculator",
    "renderer": "plain",
    "env": {"name": "calculator", "max_steps": 2},
    "data": "arithmetic",
    "rewards": {
        "accuracy": {"function": "calculator_accuracy", "weight": 1.0},
        "length": {"function": "calculator_format", "weight": 0.1},
    },
    "sampling": {"max_new_tokens": 4},
    "algorithm": {"group_size": 2, "kl_coef": 0.05, "updates_per_batch": 2},
    "train": {"steps": 3, "tasks_per_step": 2, "learning_rate": 1e-3, "warmup_ratio": 0.0, "save_every": 1},
    "eval": {"size": 2, "curve_size": 2},
}
WARMUP = {"data": {"name": "arithmetic", "count": 8}, "steps": 2, "batch_size": 4, "learning_rate": 1e-3}


def config(out: Path | str = "runs/a", *overrides: str, **more: Any) -> RLConfig:
    return load(BASE | {"out": str(out)} | more, overrides, RLConfig)


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config("runs/a", *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def quiet() -> Progress:
    return Progress(quiet=True)


def rewarded(trainer: RLTrainer) -> None:
    """A random model never answers: let it be paid for short sampled text instead, so that there is a gradient."""

    class ByTokens:
        async def score(self, group: Group, *state: object) -> Group:
            def paid(e: Episode) -> Episode:
                value = float(np.mean([t % 7 for v in e.trajectories for t in v.tokens[v.loss_mask]]))
                terms = {"accuracy": RewardTerm(value), "format": RewardTerm(0.0, 0.0)}
                return replace(e, trajectories=tuple(replace(v, rewards=terms) for v in e.trajectories))

            return replace(group, episodes=tuple(map(paid, group.episodes)))

    trainer.world = replace(trainer.world, rubric=ByTokens())  # type: ignore[arg-type]
    trainer.run_dir.strict = True


def train(settings: RLConfig, *, progress: Progress | None = None, resume: bool = False) -> dict[str, Any]:
    return train_rl(settings, progress=progress or quiet(), resume=resume, on_ready=rewarded)


def weights_in(run: Path, step: int) -> bytes:
    folder = run / "checkpoints" / f"step_{step:06d}"
    return next(f for f in folder.iterdir() if f.suffix == ".safetensors").read_bytes()


def logged(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


class Interrupted(Progress):
    """Ctrl-C after a certain step of the loop."""

    def __init__(self, at: int) -> None:
        super().__init__(quiet=True)
        self.at, self.name = at, ""

    def phase(self, name: str, total: int, *, done: int = 0) -> None:
        self.name = name
        super().phase(name, total, done=done)

    def update(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        if self.name.startswith("RL") and step == self.at:
            raise KeyboardInterrupt
        super().update(step, metrics)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run with a warm-up."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(config(out, warmup=WARMUP))
    return out


# What a run is ---------------------------------------------------------------------------------------------


def test_a_run_leaves_its_numbers_rollouts_checkpoints_and_a_report(whole: Path) -> None:
    names = {p.name for p in whole.iterdir()}
    assert names == {"config.yaml", "run.json", "metrics.jsonl", "tensorboard", "checkpoints", "rollouts", "reference",
                     "summary.json", "report.html"}  # fmt: skip
    assert sorted(p.name for p in (whole / "rollouts").iterdir()) == [f"step_00000{n}.jsonl.zst" for n in (1, 2, 3)]
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == ["step_000002", "step_000003"]
    assert load(whole / "config.yaml", [], RLConfig) == config(whole, warmup=WARMUP)
    summary = json.loads((whole / "summary.json").read_text())
    assert {"format", "seed", "steps", "seconds", "checkpoint"} <= set(summary)
    for when in ("before", "after"):
        assert summary[f"accuracy_{when}"] == summary[f"eval_{when}"]["accuracy"]
        assert summary[f"eval_{when}"]["examples"] == 2
    assert "<html" in (whole / "report.html").read_text()


def test_every_step_is_logged_under_registered_names(whole: Path) -> None:
    log = logged(whole)
    check((n for row in log for n in row if n not in ("step", "phase", "time")), strict=True)
    assert [r["step"] for r in log if r["phase"] == "sft"] == [1, 2]
    steps = [r for r in log if "train/updates" in r]
    assert [r["step"] for r in steps] == [1, 2, 3]
    for row in steps:
        assert (row["rollout/episodes"], row["rollout/groups"], row["train/updates"]) == (4, 2, 2)
        assert row["train/ratio_first_step_max"] < 1e-4 and row["rollout/staleness_max"] == 0
        assert row["train/reward_std"] > 0
    assert [r["step"] for r in log if "eval/accuracy" in r] == [0, 3]


def test_the_same_seed_gives_the_same_weights_with_or_without_evaluation_in_between(  # ev-009
    whole: Path, tmp_path: Path
) -> None:
    train(config(tmp_path / "again", "eval.every=1", warmup=WARMUP))
    assert weights_in(tmp_path / "again", 3) == weights_in(whole, 3)
    assert sum("eval/accuracy" in r for r in logged(tmp_path / "again")) == 4


def test_a_clock_that_jumps_to_and_fro_changes_no_weight_and_no_duration(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody sets it, or it is set over the network: stamps follow it, and nothing else does."""
    jumps = itertools.cycle([0.0, 4e9, 1.7e9, -1.0])
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: next(jumps))
        train(config(tmp_path / "a", warmup=WARMUP))
    assert weights_in(tmp_path / "a", 3) == weights_in(whole, 3)
    durations = [value for row in logged(tmp_path / "a") for name, value in row.items() if name.startswith("time/")]
    assert durations and all(0 <= value < 300 for value in durations)


def test_a_resumed_run_ends_with_the_very_weights_of_an_uninterrupted_one(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        train(config(out, warmup=WARMUP), progress=Interrupted(2))
    summary = train(config(out, warmup=WARMUP), resume=True)
    assert weights_in(out, 3) == weights_in(whole, 3)
    assert [(r["phase"], r["step"]) for r in logged(out)] == [(r["phase"], r["step"]) for r in logged(whole)]
    want = json.loads((whole / "summary.json").read_text())
    assert (summary["steps"], summary["eval_before"]["examples"]) == (3, 2)
    assert summary["accuracy_before"] == want["accuracy_before"]


class Impatient(Progress):
    """Ctrl-C, by a signal, in the evaluation of this name."""

    def __init__(self, during: str) -> None:
        super().__init__(quiet=True)
        self.during = during

    def phase(self, name: str, total: int, *, done: int = 0) -> None:
        if name == self.during:
            np.random.rand()  # an environment of the user's may draw, too
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("during", "step"), [("evaluation before", 0), ("evaluation after", 3)])
def test_ctrl_c_in_an_evaluation_leaves_a_checkpoint_and_resumes_to_the_very_end(
    tmp_path: Path, unwarmed: Path, during: str, step: int
) -> None:
    settings = config(tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        train(settings, progress=Impatient(during))
    found = latest_checkpoint(tmp_path / "cut" / "checkpoints")
    assert found is not None and found.name == f"step_{step:06d}"
    train(settings, resume=True)
    assert weights_in(tmp_path / "cut", 3) == weights_in(unwarmed, 3)
    rows_cut, rows_whole = (
        [{k: v for k, v in row.items() if not timing(k)} for row in logged(run)] for run in (tmp_path / "cut", unwarmed)
    )
    assert rows_cut == rows_whole, "every row once, with the same numbers"


def timing(name: str) -> bool:
    return name == "time" or name.startswith(("time/", "speed/", "memory/", "engine/"))


@pytest.fixture(scope="module")
def unwarmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run without a warm-up."""
    out = tmp_path_factory.mktemp("runs") / "unwarmed"
    train(config(out))
    return out


@pytest.mark.parametrize("warmup", [None, WARMUP], ids=["fresh adapter", "warmed-up adapter"])
def test_an_adapter_run_is_pulled_towards_where_it_began_and_resumes(
    tmp_path: Path, warmup: dict[str, Any] | None
) -> None:
    lora = {"r": 2}
    options = ["train.steps=2", "eval.size=0", "train.gradient_checkpointing=true", "algorithm.updates_per_batch=1"]
    train(config(tmp_path / "a", *options, lora=lora, warmup=warmup))
    with pytest.raises(KeyboardInterrupt):
        train(config(tmp_path / "b", *options, lora=lora, warmup=warmup), progress=Interrupted(1))
    train(config(tmp_path / "b", *options, lora=lora, warmup=warmup), resume=True)
    assert weights_in(tmp_path / "b", 2) == weights_in(tmp_path / "a", 2)
    first, second = (r for r in logged(tmp_path / "a") if "train/kl" in r)
    assert first["train/kl"] == 0.0 < second["train/kl"], "it starts on the reference"
    assert first["train/ratio_first_step_max"] < 1e-4


def scores(run: Path) -> dict[str, float | None]:
    """The score of each checkpoint that is left."""
    return {p.name: load_checkpoint(p).score for p in sorted((run / "checkpoints").glob("step_*"))}


def test_a_checkpoint_has_the_score_of_its_own_weights_on_the_tasks_of_the_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best of four steps is the second; the evaluations before and after see more tasks than the curve does."""
    played = {0: [0.3, 0.9], 2: [0.8], 4: [0.2, 0.6]}

    async def known(self: RLTrainer, size: int) -> EvalResult:
        task = Task("t", "?")
        values = played[self.steps_done]
        assert size == len(values)
        groups = [Group(task, i, (scored(value),)) for i, value in enumerate(values)]
        return result_of(groups, "accuracy", seconds=0.0)

    monkeypatch.setattr(RLTrainer, "_play_held_out", known)
    kept = ["train.steps=4", "train.save_every=3", "train.keep_last=1", "train.keep_best=1"]
    settings = config(tmp_path / "a", *kept, "eval.every=2", "eval.curve_size=1")
    train(settings)
    assert scores(tmp_path / "a") == {"step_000002": 0.8, "step_000004": 0.2}
    train(settings, resume=True)
    assert scores(tmp_path / "a") == {"step_000002": 0.8, "step_000004": 0.2}, "a resume behind the end loses none"
    assert best_checkpoint(tmp_path / "a" / "checkpoints") == tmp_path / "a" / "checkpoints" / "step_000002"


def scored(value: float) -> Episode:
    said = Span(np.zeros(1), Author.MODEL, "assistant", "", np.zeros(1), 0)
    turn = Turn((said,), (), {"role": "assistant"}, "eos")
    rewards = {"accuracy": RewardTerm(value)}
    return Episode(Task("t", "?"), (Trajectory((turn,), StopReason.ENV_TERMINATED, rewards=rewards),))


def test_the_best_of_nothing_measured_is_refused() -> None:
    said = refusal("train.keep_best=1")
    assert "train.keep_best is 1 and eval.every 0" in said and "set eval.every" in said


class Telling(Progress):
    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.told: list[str] = []

    def note(self, text: str, *, warning: bool = False) -> None:
        self.told.append(text)


def test_the_first_step_with_nothing_to_learn_is_told_and_no_other(tmp_path: Path) -> None:
    progress = Telling()
    train_rl(config(tmp_path / "a"), progress=progress)  # a random model never answers
    (said,) = [text for text in progress.told if "every advantage" in text]
    assert said.startswith("every advantage of step 1 is 0, for the reward is always 0")


def test_a_step_whose_rollouts_cannot_be_written_is_in_the_checkpoint_with_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise RunError("the disk is full")

    with monkeypatch.context() as patch, pytest.raises(RunError, match="disk is full"):
        patch.setattr("palestra.train.rl.write_rollouts", full)
        train(config(tmp_path / "a"))
    train(config(tmp_path / "a"), resume=True)
    assert [r["step"] for r in logged(tmp_path / "a") if "train/updates" in r] == [1, 2, 3]


def test_ev_014_a_step_without_signal_still_is_a_step(tmp_path: Path) -> None:
    settings = config(tmp_path / "a", "algorithm.kl_coef=0", "train.steps=2", "eval.size=0", "train.save_every=0")
    summary = train_rl(settings, progress=quiet())  # a random model never answers: all rewards are 0
    steps = [r for r in logged(tmp_path / "a") if "train/updates" in r]
    assert [(r["step"], r["train/updates"], r["train/updates_skipped"]) for r in steps] == [(1, 0, 1), (2, 0, 1)]
    assert [r["rollout/groups_zero_variance"] for r in steps] == [2, 2]
    assert summary["steps"] == 2
    assert weights_in(tmp_path / "a", 0) == weights_in(tmp_path / "a", 2)
    assert not (tmp_path / "a" / "reference").exists(), "cf-005"


def test_a_failure_halfway_through_an_update_does_not_overwrite_the_last_whole_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from palestra.train import rl

    def torn(policy: Any, *_: Any, **__: Any) -> Any:
        with torch.no_grad():
            policy.parameters()[0].add_(1.0)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(rl, "train_step", torn)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(config(tmp_path / "a", "eval.size=0"))
    monkeypatch.undo()
    train(config(tmp_path / "b", "eval.size=0", "train.steps=1", "train.keep_last=9"))
    assert weights_in(tmp_path / "a", 0) == weights_in(tmp_path / "b", 0)
    kept = tmp_path / "b" / "reference" / "step_000000" / "model.safetensors"
    assert kept.read_bytes() == weights_in(tmp_path / "b", 0), "the reference is the policy before the first step"


def test_a_group_without_a_reward_is_dropped_and_counted() -> None:
    said = Span(np.array([5]), Author.MODEL, "assistant", logprobs=np.array([-1.0]), version=0)
    view = Trajectory((Turn((said,), (), {"role": "assistant"}, "eos"),), StopReason.ENV_TERMINATED)

    def group(draw: int, value: float | None) -> Group:
        paid = replace(view, rewards={"accuracy": RewardTerm(value)})
        task = Task("t", "?")
        return Group(task, draw, tuple(Episode(task, (paid,), member=i) for i in range(2)))

    groups = [group(0, None), group(1, 1.0)]
    made = rows(groups)
    metrics = rollout_metrics(groups, made, "accuracy", {})
    assert (metrics["rollout/groups_dropped"], metrics["rollout/rewards_missing"]) == (1, 2)
    assert metrics["train/reward"] == 1.0 and {s.group for s in made.samples} == {"1:t"}


# Configs ---------------------------------------------------------------------------------------------------


def test_cf_001_an_unknown_key_names_the_right_one() -> None:
    said = refusal("train.learning_rte=1e-6")
    assert "learning_rte" in said and "learning_rate" in said


def test_cf_002_a_group_needs_two_episodes() -> None:
    assert "at least 2" in refusal("algorithm.group_size=1")


def test_cf_006_greedy_sampling_is_refused_for_training() -> None:
    assert "greedy" in refusal("sampling.temperature=0")


@pytest.mark.parametrize("cut", ["top_p=0.9", "top_k=5", "min_p=0.1"])
def test_truncated_sampling_is_refused_for_training(cut: str) -> None:
    assert cut.partition("=")[0] in refusal(f"sampling.{cut}")


@pytest.mark.parametrize("part", ["advantage", "loss", "kl", "preset", "reduction", "old_logprobs"])
def test_an_unknown_part_of_the_algorithm_is_refused(part: str) -> None:
    assert "nonsense" in refusal(f"algorithm.{part}=nonsense")


def test_a_constant_divisor_is_named_exactly_when_it_is_used() -> None:
    assert config("a", "algorithm.reduction=constant").algorithm.divisor_tokens
    assert "divisor_tokens" in refusal("algorithm.divisor_tokens=64")
    algorithm = config("a", "algorithm.reduction=constant", "algorithm.divisor_tokens=64").algorithm
    assert (algorithm.reduction, algorithm.divisor_tokens) == ("constant", 64)


def test_a_clip_range_without_effect_is_refused() -> None:
    assert "clip_low" in refusal("algorithm.clip_low=1.5")


@pytest.mark.parametrize(
    "precision",
    [["engine.dtype=bfloat16"], ["train.compute_dtype=bfloat16"], ["model.dtype=bfloat16", "engine.dtype=float32"]],
)
def test_recorded_log_probs_of_another_precision_are_refused(precision: list[str]) -> None:
    assert "old_logprobs=recompute" in refusal(*precision)
    config("a", *precision, "algorithm.old_logprobs=recompute")


def test_sampler_and_trainer_of_one_precision_are_fine() -> None:
    config("a", "engine.dtype=bfloat16", "train.compute_dtype=bfloat16")
    config("a", "model.dtype=bfloat16")


def test_products_that_a_processor_lacks_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    monkeypatch.setattr(setup, "bfloat16_products", lambda: False)
    with pytest.warns(UserWarning, match="no products in bfloat16.*engine.dtype=bfloat16 alone does not"):
        assert setup.torch_dtype("bfloat16", model) is torch.bfloat16
    monkeypatch.setattr(setup, "bfloat16_products", lambda: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert setup.torch_dtype("bfloat16", model) is torch.bfloat16
        assert setup.torch_dtype("float32", model) is None


def test_group_size_has_a_second_name() -> None:
    assert config("a", algorithm={"num_generations": 6}).algorithm.group_size == 6


def test_a_preset_is_its_parts_and_a_part_can_be_replaced() -> None:
    assert config("a", algorithm="grpo_no_std").algorithm.advantage == "group_mean"
    mixed = config("a", algorithm={"preset": "grpo_no_std", "kl": "k2"}).algorithm
    assert (mixed.advantage, mixed.kl, mixed.loss) == ("group_mean", "k2", "clip")


@pytest.mark.parametrize(
    ("kind", "lora", "default", "too_high"),
    [("sft", False, 5e-5, 1e-3), ("sft", True, 1e-4, 2e-3), ("rl", False, 1e-6, 5e-5), ("rl", True, 1e-5, 1e-3)],
)
def test_learning_rates_have_defaults_and_rails(kind: Any, lora: bool, default: float, too_high: float) -> None:
    assert learning_rate(OptimConfig(), kind, lora=lora, from_scratch=False) == (default, None)
    high = OptimConfig(learning_rate=too_high)
    rate, warning = learning_rate(high, kind, lora=lora, from_scratch=False)
    assert rate == too_high and warning is not None and f"{too_high:g}" in warning
    assert learning_rate(high, kind, lora=lora, from_scratch=True)[1] is None
    assert learning_rate(high.model_copy(update={"guard": "off"}), kind, lora=lora, from_scratch=False)[1] is None
    with pytest.raises(ConfigError, match="outside"):
        learning_rate(high.model_copy(update={"guard": "error"}), kind, lora=lora, from_scratch=False)


# Plans -----------------------------------------------------------------------------------------------------


def test_a_dry_run_tells_what_an_rl_config_amounts_to() -> None:
    plan = describe(config("runs/a", warmup=WARMUP))
    for line in (
        "model: 339,360 of 339,360 parameters trainable (100.00%)",
        "tasks: endless for training, 2 held out for evaluation",
        "a step: 2 tasks × 2 episodes = 4 episodes, each up to 32 sampled tokens over 8 turns",
        "8 dialogues, 2 optimiser steps of 4 dialogues at learning rate 0.001",
        "the run: 3 steps, 12 episodes, 6 optimiser steps at learning rate 0.001",
        "divided by each episode's own trained tokens, then the number of episodes; KL k3 × 0.05",
    ):
        assert line in plan
    assert load(_yaml(plan), [], RLConfig) == config("runs/a", warmup=WARMUP)
    assert "no reference in memory" in describe(config("runs/a", "algorithm.kl_coef=0"))


def test_a_plan_says_which_policy_plays_and_what_the_copies_cost() -> None:
    plan = describe(config("a", "train.max_staleness=2"))
    gib = 2 * 339_360 * 4 / 2**30
    assert f"by the policy 2 versions older: 2 more copies of the weights that train, {gib:.3f} GiB of" in plan
    assert "older" not in describe(config("a"))


def test_a_dry_run_tells_what_supervised_training_and_evaluation_amount_to() -> None:
    supervised = SFTConfig.model_validate({"model": "builtin:calculator", "renderer": "plain", "sft": WARMUP})
    assert "8 dialogues, 2 optimiser steps of 4 dialogues" in describe(supervised)
    shared = {k: BASE[k] for k in ("model", "renderer", "env", "data", "rewards", "sampling")}
    played = EvalConfig.model_validate(shared | {"eval": {"size": 7}})
    assert "7 held-out tasks, temperature 0, accuracy by 'accuracy'" in describe(played)


def _yaml(text: str) -> dict[str, Any]:
    import yaml

    data: dict[str, Any] = yaml.safe_load(text)
    return data


@pytest.mark.parametrize(
    "wrong", [{"env": "calculater"}, {"model": "/nowhere"}, {"rewards": {"acuracy": 1.0}}, {"data": "arithmetik"}]
)
def test_a_mistake_in_the_config_is_told_before_anything_is_written(tmp_path: Path, wrong: dict[str, object]) -> None:
    given = {"model": "builtin:calculator", "renderer": "plain", "env": "calculator", "data": "arithmetic"}
    config = RLConfig.model_validate(given | {"out": str(tmp_path / "run")} | wrong)
    with pytest.raises(UserError):
        train_rl(config, progress=Progress(quiet=True))
    assert not (tmp_path / "run").exists()
