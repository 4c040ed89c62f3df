# SPDX-License-Identifier: Apache-2.0
"""Every health rule on a run that is sick in just that way, and silence on runs that are well."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from demo_metrics import demo_rows

from palestra.config import load
from palestra.run.health import Alarm, Monitor
from palestra.train.config import RAILS, RLConfig, SFTConfig

Row = dict[str, float]
Curve = Callable[[int], float]

BASE: dict[str, Any] = {
    "model": "org/model",
    "data": "arithmetic",
    "env": "calculator",
    "rewards": {
        "accuracy": {"function": "calculator_accuracy", "weight": 1.0},
        "format": {"function": "calculator_format", "weight": 0.1},
    },
    "algorithm": {"kl_coef": 0.05, "updates_per_batch": 2},
    "train": {"steps": 100},
    "sampling": {"max_new_tokens": 100},
}
WARMUP = {"data": {"name": "arithmetic", "count": 3200}, "steps": 200, "batch_size": 32}
SFT: dict[str, Any] = {"model": "org/model", "sft": {"data": "arithmetic", "epochs": 3}}


def rl_config(*overrides: str, **more: Any) -> dict[str, Any]:
    return load(BASE | more, overrides, RLConfig).model_dump(mode="json")


def sft_config(*overrides: str) -> dict[str, Any]:
    return load(SFT, overrides, SFTConfig).model_dump(mode="json")


def to(start: float, end: float, by: int = 60) -> Curve:
    """A straight line from ``start`` at step 1 to ``end`` at step ``by``, level from there."""
    return lambda step: start + (end - start) * min(step - 1, by - 1) / (by - 1)


def level(value: float) -> Curve:
    return lambda step: value


# A run that is well, with the noise that real ones have ---------------------------------------------------


HEALTHY: dict[str, Curve] = {
    "train/reward": to(0.35, 0.85),
    "train/reward_std": level(0.4),
    "reward/accuracy": to(0.3, 0.75),
    "reward/format": to(0.9, 0.97),
    "rollout/success_rate": to(0.3, 0.75),
    "train/grad_norm": level(1.0),
    "train/kl": to(0.0, 0.05),
    "train/entropy": to(0.5, 0.3),
    "train/clip_fraction": level(0.03),
    "train/ratio_first_step_max": level(2e-5),
    "train/updates": level(2),
    "train/updates_skipped": level(0),
    "rollout/episodes": level(128),
    "rollout/errors": level(0),
    "rollout/groups": level(16),
    "rollout/groups_zero_variance": to(2, 8),
    "rollout/sampled_tokens_mean": to(80, 90),
    "rollout/turns_mean": level(2),
    "rollout/truncated_share": level(0.05),
    "rollout/stop/env_terminated": level(0.95),
    "rollout/stop/env_truncated": level(0.05),
    "rollout/staleness_max": level(0),
}
EXACT = {n for n in HEALTHY if n.startswith(("rollout/episodes", "rollout/groups", "train/updates", "rollout/stale"))}


def rl_rows(steps: int = 60, *, seed: int = 0, noise: float = 0.08, **changed: Curve | None) -> list[tuple[int, Row]]:
    """A healthy run of ``steps`` with some of its curves replaced; ``a__b`` stands for ``a/b``, None leaves one out."""
    curves = HEALTHY | {name.replace("__", "/"): curve for name, curve in changed.items()}
    dice = np.random.default_rng(seed)
    rows = []
    for step in range(1, steps + 1):
        row = {}
        for name, curve in sorted(curves.items()):
            shake = 1 + noise * dice.standard_normal()
            if curve is not None:
                row[name] = curve(step) * (1.0 if name in EXACT else shake)
        for name in ("reward/format", "reward/accuracy", "rollout/success_rate"):
            row[name] = min(row.get(name, 0.0), 1.0)
        rows.append((step, row))
    return rows


def evaluated(rows: list[tuple[int, Row]], every: int, **curves: Curve) -> list[tuple[int, Row]]:
    named = {f"eval/{name}": curve for name, curve in curves.items()}
    first = (0, {name: curve(1) for name, curve in named.items()})
    return [first, *((s, r | {n: c(s) for n, c in named.items()}) if s % every == 0 else (s, r) for s, r in rows)]


def heard(rows: list[tuple[int, Row]], config: Mapping[str, Any] | None = None, *, phase: str = "rl") -> list[Alarm]:
    monitor = Monitor(rl_config() if config is None else config, RAILS)
    for step, row in rows:
        monitor.observe(step, row, phase=phase)
    return monitor.alarms


def rung(*args: Any, **options: Any) -> list[str]:
    return [alarm.rule for alarm in heard(*args, **options)]


@pytest.mark.parametrize("seed", range(12))
def test_a_healthy_run_rings_no_alarm(seed: int) -> None:
    assert rung(evaluated(rl_rows(100, seed=seed), 10, accuracy=to(0.3, 0.75), format=to(0.9, 0.97))) == []
    assert rung(rl_rows(100, seed=seed, noise=0.2)) == []


def test_the_metrics_of_a_real_demo_ring_no_alarm() -> None:
    config = rl_config("algorithm.kl_coef=0", "train.steps=50", "train.learning_rate=5e-4", model="builtin:calculator")
    assert rung(demo_rows(), config) == []


def test_a_run_that_has_solved_its_tasks_is_well_though_nothing_is_left_to_learn() -> None:
    solved = to(0.5, 1.0, by=30)
    rows = rl_rows(
        120,
        noise=0.02,
        train__reward=to(0.6, 1.1, by=30),
        rollout__success_rate=solved,
        reward__accuracy=solved,
        rollout__groups_zero_variance=to(2, 16, by=30),
        train__entropy=to(0.5, 0.01, by=40),
    )
    assert rung(rows) == []


def test_what_is_left_out_or_not_finite_is_no_sign_of_anything() -> None:
    rows = rl_rows(60)
    for step, row in rows:
        row["train/grad_norm"], row["train/kl"] = math.nan, math.inf
        if step % 2:
            row.pop("train/entropy")
    assert rung(rows) == []


# Each rule -------------------------------------------------------------------------------------------------


def after(step: int, before: Curve, then: Curve) -> Curve:
    return lambda s: before(s) if s < step else then(s)


SICK: dict[str, tuple[list[tuple[int, Row]], Mapping[str, Any]]] = {
    "grad_norm_high": (rl_rows(train__grad_norm=after(20, level(2), level(400))), rl_config()),
    "grad_norm_low": (rl_rows(train__grad_norm=level(0.002)), rl_config()),
    "kl_high": (rl_rows(train__kl=after(30, level(0.05), level(0.9))), rl_config()),
    "kl_low": (rl_rows(35, train__kl=level(0.0002), train__reward=level(0.4)), rl_config()),
    "group_collapse": (
        rl_rows(30, noise=0.0, rollout__groups_zero_variance=level(16), train__reward=level(0.1)),
        rl_config(),
    ),
    "reward_flat": (
        rl_rows(train__reward=level(0.4), reward__accuracy=level(0.35), rollout__success_rate=level(0.35)),
        rl_config(),
    ),
    "reward_falls": (rl_rows(train__reward=after(35, to(0.4, 0.7, 30), level(0.1))), rl_config()),
    "format_over_accuracy": (
        rl_rows(
            reward__format=to(0.3, 0.95),
            reward__accuracy=level(0.3),
            rollout__success_rate=level(0.3),
            train__reward=to(0.33, 0.395),
        ),
        rl_config(),
    ),
    "format_falls": (rl_rows(reward__format=after(20, level(0.95), to(1.1, 0.5))), rl_config()),
    "reward_hacking": (
        evaluated(rl_rows(reward__accuracy=to(0.3, 0.6)), 10, accuracy=level(0.3)),
        rl_config(),
    ),
    "small_group": (rl_rows(), rl_config("algorithm.group_size=2")),
    "length_explosion": (
        rl_rows(rollout__sampled_tokens_mean=to(40, 130), rollout__success_rate=level(0.3)),
        rl_config(),
    ),
    "truncation": (rl_rows(rollout__truncated_share=level(0.6), rollout__stop__max_turns=level(0.6)), rl_config()),
    "clip_inactive": (rl_rows(train__clip_fraction=level(0.0)), rl_config()),
    "clip_saturated": (rl_rows(train__clip_fraction=after(10, level(0.1), level(0.6))), rl_config()),
    "entropy_collapse": (
        rl_rows(
            train__entropy=after(20, level(0.5), level(0.01)),
            train__reward=to(0.35, 0.6, 25),
            rollout__success_rate=to(0.3, 0.5, 25),
        ),
        rl_config(),
    ),
    "sampler_differs": (rl_rows(train__ratio_first_step_max=level(0.2)), rl_config()),
    "stale_sampler": (rl_rows(train__ratio_first_step_max=after(2, level(1e-5), level(0.3))), rl_config()),
    "episodes_fail": (rl_rows(rollout__errors=after(30, level(0), level(60))), rl_config()),
    "updates_skipped": (rl_rows(train__updates_skipped=after(30, level(0), level(2))), rl_config()),
}


@pytest.mark.parametrize("rule", SICK)
def test_a_sick_run_rings_the_alarm_of_its_sickness_and_no_other(rule: str) -> None:
    rows, config = SICK[rule]
    assert rung(rows, config) == [rule]


SINCE = {"grad_norm_high": 20, "kl_high": 30, "clip_saturated": 10, "stale_sampler": 2, "episodes_fail": 30,
         "updates_skipped": 30, "entropy_collapse": 20, "sampler_differs": 1}  # fmt: skip


@pytest.mark.parametrize("rule", SINCE)
def test_an_alarm_says_since_when(rule: str) -> None:
    (alarm,) = heard(*SICK[rule])
    assert alarm.since == SINCE[rule]
    assert alarm.since <= alarm.step <= alarm.since + 12


def test_an_alarm_says_what_was_seen_what_causes_it_and_what_to_change() -> None:
    (alarm,) = heard(*SICK["kl_high"])
    assert alarm.seen.startswith("the KL to the reference is 0.") and "0.01 to 0.1 is usual" in alarm.seen
    assert alarm.cause.startswith("the policy runs away from the reference")
    overrides = [change.override for change in alarm.changes]
    # RL of a full pretrained model starts at 1e-6; a fifth of it is inside the rails.
    assert overrides[:2] == ["train.learning_rate=2e-07", "algorithm.kl_coef=0.1"]
    assert alarm.line().startswith(f"kl_high since step {alarm.since}: the KL to the reference")
    assert "try train.learning_rate=2e-07 (smaller steps, now 1e-06) or algorithm.kl_coef=0.1" in alarm.line()
    assert "\n" not in alarm.line()


# One noisy point is none, and a rule that cannot apply is silent -------------------------------------------


@pytest.mark.parametrize("rule", sorted(SICK.keys() - {"small_group", "reward_hacking", "group_collapse"}))
def test_three_sick_steps_in_between_ring_nothing(rule: str) -> None:
    rows, config = SICK[rule]
    sick = dict(rows)
    well = rl_rows(60)
    mixed = [(s, sick[s] if s in (31, 32, 33) and s in sick else row) for s, row in well]
    assert rung(mixed, config) == []


SILENT = {
    "no KL term": (rl_rows(train__kl=level(0.9)), rl_config("algorithm.kl_coef=0")),
    "KL of a model from scratch": (rl_rows(train__kl=level(0.9)), rl_config(model="builtin:calculator")),
    "no KL in the first steps": (rl_rows(19, train__kl=level(0.0)), rl_config()),
    "no clipping with one update per batch": (
        rl_rows(train__clip_fraction=level(0.0)),
        rl_config("algorithm.updates_per_batch=1"),
    ),
    "no gradient where no group has a difference": (
        rl_rows(
            40,
            noise=0.0,
            train__grad_norm=after(20, level(1.0), level(0.0)),
            rollout__groups_zero_variance=after(20, level(2), level(16)),
            rollout__success_rate=level(1.0),
            reward__accuracy=level(1.0),
        ),
        rl_config(),
    ),
    "length that pays off": (rl_rows(rollout__sampled_tokens_mean=to(40, 130)), rl_config()),
    "truncation on its way out": (rl_rows(40, rollout__truncated_share=to(0.95, 0.0, 15)), rl_config()),
    "a gap that bfloat16 explains": (
        rl_rows(train__ratio_first_step_max=level(0.1)),
        rl_config("model.dtype=bfloat16"),
    ),
    "a single failure now and then": (rl_rows(rollout__errors=level(6)), rl_config()),
    "a skipped update where there was nothing to learn": (
        rl_rows(
            noise=0.02,
            train__updates_skipped=level(1),
            rollout__groups_zero_variance=after(3, level(4), level(16)),
            rollout__success_rate=level(1.0),
            reward__accuracy=level(1.0),
        ),
        rl_config(),
    ),
    "staleness within the bound": (
        rl_rows(rollout__staleness_max=level(1), train__ratio_first_step_max=after(2, level(1e-5), level(0.3))),
        rl_config("train.max_staleness=1"),
    ),
}


@pytest.mark.parametrize("what", SILENT)
def test_a_rule_that_cannot_apply_stays_silent(what: str) -> None:
    rows, config = SILENT[what]
    assert rung(rows, config) == []


def test_versions_tell_a_stale_sampler_at_once() -> None:
    alarms = heard(rl_rows(10, rollout__staleness_max=level(2)))
    assert [a.rule for a in alarms] == ["stale_sampler"]
    assert alarms[0].seen == "tokens are trained on up to 2 versions after they were sampled; 0 is allowed"
    (beyond,) = heard(rl_rows(10, rollout__staleness_max=level(2)), rl_config("train.max_staleness=1"))
    assert beyond.seen.endswith("1 is allowed")


def test_a_policy_that_breaks_in_its_first_step_is_told_so_and_not_that_its_limits_are_short() -> None:
    rows = rl_rows(
        20,
        train__reward=after(2, level(0.6), level(0.0)),
        rollout__groups_zero_variance=after(2, level(1), level(16)),
        rollout__truncated_share=after(2, level(0.0), level(1.0)),
        rollout__sampled_tokens_mean=after(2, level(30), level(190)),
        train__updates_skipped=after(2, level(0), level(1)),
    )
    (alarm,) = heard(rows)
    assert (alarm.rule, alarm.since) == ("reward_falls", 2)


def test_format_that_weighs_more_than_accuracy_is_told_before_it_does_harm() -> None:
    (alarm,) = heard(rl_rows(20), rl_config("rewards.format.weight=10"))
    assert (alarm.rule, alarm.step) == ("format_over_accuracy", 5)
    assert alarm.seen == "the part format weighs 10, accuracy only 1"
    assert [c.override for c in alarm.changes] == ["rewards.format.weight=0.1", None]


def test_a_limit_that_cuts_is_the_one_whose_key_is_named() -> None:
    cut = {"rollout__truncated_share": level(0.6)}
    for end, key in (("max_tokens", "limits.max_tokens"), ("timeout", "limits.timeout_s"), ("context", "engine.")):
        (alarm,) = heard(rl_rows(20, **cut, **{f"rollout__stop__{end}": level(0.6)}))
        assert [c.key.startswith(key) for c in alarm.changes] == [True]
    (alarm,) = heard(rl_rows(20, rollout__sampled_tokens_mean=level(200)))
    assert alarm.seen.startswith("replies fill max_new_tokens=100")
    assert alarm.changes[0].override == "sampling.max_new_tokens=200"


# Supervised training ---------------------------------------------------------------------------------------


def sft_rows(loss: Curve, steps: int = 200, *, grad: float = 1.0, epoch: float = 3.0, seed: int = 0) -> list[Any]:
    dice = np.random.default_rng(seed)
    return [
        (
            step,
            {
                "sft/loss": loss(step) * (1 + 0.05 * dice.standard_normal()),
                "sft/grad_norm": grad * (1 + 0.1 * dice.standard_normal()),
                "sft/epoch": epoch * step / steps,
                "sft/learning_rate": 1e-5,
            },
        )
        for step in range(1, steps + 1)
    ]


def decay(start: float, end: float, half: float = 20) -> Curve:
    return lambda step: end + (start - end) * 0.5 ** (step / half)


@pytest.mark.parametrize("seed", range(6))
def test_healthy_supervised_training_rings_no_alarm(seed: int) -> None:
    for config in (sft_config(), rl_config(warmup=WARMUP)):
        assert rung(sft_rows(decay(2.0, 0.6), seed=seed), config, phase="sft") == []
        # By heart, but with three passes over data of which the model had never seen the like.
        assert rung(sft_rows(decay(4.5, 0.03), 600, grad=0.3, seed=seed), config, phase="sft") == []
    rows = evaluated(sft_rows(decay(2.0, 0.6), seed=seed), 50, accuracy=to(0.0, 0.6, 150))
    assert rung(rows, rl_config(warmup=WARMUP), phase="sft") == []


SICK_SFT = {
    "sft_grad_norm_high": (sft_rows(decay(2.0, 0.6), grad=300), sft_config()),
    "sft_grad_norm_low": (sft_rows(decay(2.0, 1.5), 25, grad=0.001), sft_config()),
    "sft_loss_flat": (sft_rows(level(2.0), 100), sft_config()),
    "sft_loss_rises": (sft_rows(after(60, decay(2.0, 0.6), to(0.7, 2.5, 200)), 200), sft_config()),
    "sft_overfitting": (
        evaluated(sft_rows(decay(2.0, 0.1)), 40, accuracy=after(81, to(0.2, 0.7, 80), level(0.3))),
        rl_config(warmup=WARMUP),
    ),
}


@pytest.mark.parametrize("rule", SICK_SFT)
def test_sick_supervised_training_rings_the_alarm_of_its_sickness_and_no_other(rule: str) -> None:
    rows, config = SICK_SFT[rule]
    alarms = heard(rows, config, phase="sft")
    assert [alarm.rule for alarm in alarms] == [rule]
    section = "warmup" if "algorithm" in config else "sft"
    assert any(change.key.startswith((f"{section}.", "lora")) for change in alarms[0].changes)


def test_a_loss_near_nothing_after_many_passes_is_overfitting_where_nothing_is_held_out() -> None:
    rows = sft_rows(decay(2.0, 0.02), epoch=15)
    assert rung(rows, sft_config(), phase="sft") == ["sft_overfitting"]
    assert rung(rows, sft_config("model=builtin:calculator"), phase="sft") == []
    assert rung(sft_rows(decay(2.0, 0.02), epoch=9), sft_config(), phase="sft") == []


def test_a_loss_that_was_low_from_the_start_has_nowhere_to_go() -> None:
    assert rung(sft_rows(level(0.05), 100, grad=0.005), sft_config(), phase="sft") == ["sft_grad_norm_low"]
    assert rung(sft_rows(level(0.05), 100, grad=0.5), sft_config(), phase="sft") == []


def test_a_reward_that_stays_where_it_is_has_no_alarm_of_its_own_where_another_says_why() -> None:
    flat = {"train__reward": level(0.4), "reward__accuracy": level(0.35), "rollout__success_rate": level(0.35)}
    rung = [alarm.rule for alarm in heard(rl_rows(**flat, train__kl=after(10, level(0.05), level(0.9))), rl_config())]
    assert "kl_high" in rung and "reward_flat" not in rung
