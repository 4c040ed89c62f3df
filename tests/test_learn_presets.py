# SPDX-License-Identifier: Apache-2.0
"""Algorithms as data: what a preset expands to, what may be overridden, what is refused and with which words."""

from __future__ import annotations

from typing import Any

import pytest

from palestra.config import dump, load
from palestra.errors import ConfigError
from palestra.learn.update import UpdateConfig
from palestra.train.config import PRESETS, AlgorithmConfig, RLConfig

RL: dict[str, Any] = {"model": "builtin:calculator", "data": "arithmetic", "env": "calculator"}


def taught(preset: str) -> dict[str, Any]:
    """A config with a teacher where the preset learns from one."""
    return RL | ({"teacher": "builtin:calculator"} if preset.startswith("distill") else {})


def algorithm(*overrides: str, **base: Any) -> AlgorithmConfig:
    named = next((o.removeprefix("preset=") for o in overrides if o.startswith("preset=")), base.get("algorithm", ""))
    return load(taught(named) | base, [f"algorithm.{o}" for o in overrides], RLConfig).algorithm


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        algorithm(*overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_expands_to_its_parts_and_each_can_be_overridden(name: str) -> None:
    made = algorithm(f"preset={name}")
    assert made.preset == name
    for part, value in PRESETS[name].items():
        assert getattr(made, part) == value, part
    assert made == algorithm(algorithm=name), "the name alone is enough"
    changed = algorithm("clip_high=0.9", "max_grad_norm=0.5", algorithm=name)
    assert (changed.clip_high, changed.max_grad_norm, changed.advantage) == (0.9, 0.5, made.advantage)


@pytest.mark.parametrize("name", PRESETS)
def test_the_resolved_config_reads_back_as_itself_and_names_every_part(name: str, tmp_path: Any) -> None:
    config = load(taught(name), [f"algorithm.preset={name}"], RLConfig)
    text = dump(config)
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    assert load(tmp_path / "config.yaml", [], RLConfig) == config
    for part in ("advantage", "loss", "clip_low", "clip_high", "kl_coef", "kl_in", "reduction", "divisor_tokens"):
        assert f"  {part}: " in text


def test_what_the_papers_say() -> None:
    parts = {name: algorithm(f"preset={name}") for name in PRESETS}
    dapo = parts["dapo"]
    assert (dapo.clip_low, dapo.clip_high, dapo.reduction, dapo.kl_coef) == (0.2, 0.28, "token_mean", 0.0)
    assert (parts["gspo"].clip_low, parts["gspo"].clip_high) == (3e-4, 4e-4)
    assert (parts["cispo"].clip_low, 1 + parts["cispo"].clip_high) == (1.0, 5.0)
    assert (parts["dr_grpo"].advantage, parts["dr_grpo"].kl_coef) == ("group_mean", 0.0)
    assert {n for n, p in parts.items() if p.kl_in_reward} == {"rloo", "reinforce_pp", "ppo"}
    pulled = {"grpo", "grpo_no_std", "reinforce_pp_baseline", "distill_full"}
    assert {n for n, p in parts.items() if p.kl_in_loss} == pulled
    assert parts["grpo"].kl_coef == parts["rloo"].kl_coef == 0.05


def test_an_unknown_preset_names_the_nearest() -> None:
    said = refusal("preset=dappo")
    assert "did you mean 'dapo'" in said and "reinforce_pp_baseline" in said
    assert "did you mean 'rloo'" in refusal("advantage=rlo")
    assert "did you mean 'gspo'" in refusal("loss=gsp")


def test_a_constant_divisor_comes_from_the_limits_of_an_episode() -> None:
    limits = {"limits": {"max_turns": 3, "max_tokens": 2048}, "sampling": {"max_new_tokens": 100}}
    assert algorithm("preset=dr_grpo", **limits).divisor_tokens == 300
    limits["limits"]["max_tokens"] = 250
    assert algorithm("preset=dr_grpo", **limits).divisor_tokens == 250
    assert algorithm("preset=dr_grpo", "divisor_tokens=64", **limits).divisor_tokens == 64
    assert algorithm("preset=dapo", **limits).divisor_tokens is None
    assert "divisor_tokens" in refusal("preset=dapo", "divisor_tokens=64")


def test_one_episode_is_enough_where_nothing_is_compared_within_a_group() -> None:
    for name, least in (("reinforce", 1), ("reinforce_pp", 1), ("rloo", 2), ("reinforce_pp_baseline", 2)):
        assert algorithm(f"preset={name}").min_group == least
    assert algorithm("preset=reinforce_pp", "group_size=1").group_size == 1
    assert "at least 2" in refusal("preset=rloo", "group_size=1")
    assert "group_size" in refusal("preset=reinforce", "group_size=0")


def test_a_kl_term_that_would_not_pull_back_is_refused() -> None:
    assert "kl=k2" in refusal("preset=grpo", "kl=k1")
    assert "kl=k1" in refusal("preset=grpo", "kl_in=reward")
    assert algorithm("preset=grpo", "kl_in=reward", "kl=k1").kl_in_reward
    assert algorithm("preset=grpo", "kl=k1", "kl_importance=true").kl_in_loss
    assert algorithm("preset=grpo", "kl=k1", "kl_coef=0").kl_coef == 0, (
        "where there is no term there is nothing to refuse"
    )


def test_options_that_nothing_would_read_are_refused() -> None:
    assert "dual_clip" in refusal("preset=cispo", "dual_clip=6")
    assert "old_logprobs=recompute" in refusal("importance=token_truncate")
    assert "importance_floor" in refusal("old_logprobs=recompute", "importance=token_truncate", "importance_floor=0.5")
    assert "kl_control" in refusal("preset=dapo", "kl_control=steps")


def test_a_loss_without_a_ratio_takes_one_update_per_batch() -> None:
    said = refusal("preset=reinforce", "updates_per_batch=2")
    assert "updates_per_batch=1" in said and "loss=clip" in said
    assert algorithm("preset=reinforce", "updates_per_batch=2", "loss=clip").updates_per_batch == 2


def test_the_kl_coefficient_may_follow_the_kl() -> None:
    made = algorithm("kl_control=proportional", "kl_control.target=0.02")
    assert made.kl_control is not None
    assert (made.kl_control.kind, made.kl_control.target, made.kl_control.highest) == ("proportional", 0.02, 1.0)
    assert algorithm("preset=grpo").kl_control is None
    assert "nonsense" in refusal("kl_control=nonsense")


def test_the_same_rules_hold_without_a_file() -> None:
    for bad in ({"kl": "k1"}, {"loss": "nonsense"}, {"importance": "token_mask"}, {"clip_low": 1.5}):
        with pytest.raises(ValueError):
            UpdateConfig.model_validate(bad)
