# SPDX-License-Identifier: Apache-2.0
"""``algorithm: ppo`` through the whole loop: what it logs, that its critic is kept, and that it goes on exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_rl import Interrupted, config, logged, refusal, train, weights_in

from palestra.errors import RunError
from palestra.run.metrics import check
from palestra.train import setup
from palestra.train.checkpoint import load_checkpoint
from palestra.train.learner import make_learner

PPO: dict[str, Any] = {"preset": "ppo", "group_size": 2, "updates_per_batch": 2, "minibatches": 2}
QUICK = ("eval.size=0", "train.steps=2")


def critic_in(run: Path, step: int) -> dict[str, torch.Tensor]:
    critic: dict[str, torch.Tensor] = load_checkpoint(run / "checkpoints" / f"step_{step:06d}").trainer["critic"]
    return critic


@pytest.mark.parametrize(
    ("critic", "lora"), [("shared", None), ("separate", {"r": 2})], ids=["shared, full", "separate, adapter"]
)
def test_a_resumed_run_ends_with_the_very_weights_of_an_uninterrupted_one(
    tmp_path: Path, critic: str, lora: dict[str, Any] | None
) -> None:
    more: dict[str, Any] = {"algorithm": PPO | {"critic": critic}, "lora": lora}
    train(config(tmp_path / "a", *QUICK, **more))
    with pytest.raises(KeyboardInterrupt):
        train(config(tmp_path / "b", *QUICK, **more), progress=Interrupted(1))
    train(config(tmp_path / "b", *QUICK, **more), resume=True)
    assert weights_in(tmp_path / "a", 2) == weights_in(tmp_path / "b", 2)
    whole, cut = critic_in(tmp_path / "a", 2), critic_in(tmp_path / "b", 2)
    assert whole.keys() == cut.keys() and all(torch.equal(t, cut[name]) for name, t in whole.items())
    assert whole["head.weight"].any() and (len(whole) > 2) == (critic == "separate")
    for row in (rows := [r for r in logged(tmp_path / "b") if "train/updates" in r]):
        check((n for n in row if n not in ("step", "phase", "time")), strict=True)
        assert row["train/updates"] == 4 and row["train/value_loss"] > 0 and row["train/explained_variance"] <= 1
    assert rows[0]["train/value_mean"] == 0.0, "a fresh head says 0"
    assert rows[0]["train/ratio_first_step_max"] < 1e-4


def test_a_run_without_a_critic_does_not_go_on_as_one_with(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(config(tmp_path / "a", *QUICK), progress=Interrupted(1))
    told = pytest.warns(UserWarning, match="algorithm.preset grpo → ppo")
    with told, pytest.raises(RunError, match="no critic") as caught:
        train(config(tmp_path / "a", *QUICK, algorithm=PPO), resume=True)
    assert "\n" not in str(caught.value)


def test_presets_with_a_critic_need_no_siblings() -> None:
    ppo = config("a", algorithm={"preset": "ppo", "group_size": 1}).algorithm
    assert (ppo.gamma, ppo.gae_lambda, ppo.updates_per_batch, ppo.whiten_advantages) == (1.0, 0.95, 4, True)
    assert ppo.kl_in_reward and ppo.needs_critic and ppo.min_group == 1
    a2c = config("a", algorithm="a2c").algorithm
    assert (a2c.loss, a2c.updates_per_batch, a2c.value_clip, a2c.kl_coef) == ("reinforce", 1, None, 0.0)
    assert a2c.gamma == 0.99  # with 1, a value that continues itself where a limit cut is never proved wrong
    assert "updates_per_batch=1" in refusal("algorithm.preset=a2c", "algorithm.updates_per_batch=4")
    assert "critic_learning_rate" in refusal("algorithm.critic_learning_rate=1e-3")
    assert config("a", algorithm={"preset": "ppo", "advantage": "group_zscore"}).algorithm.vf_coef == 0.5


@pytest.mark.parametrize(("given", "want"), [(None, 1e-2), (5e-3, 5e-3)])
def test_the_critic_has_a_learning_rate_of_its_own(given: float | None, want: float) -> None:
    settings = config("a", algorithm=PPO | {"critic_learning_rate": given})
    policy, optimizer, scheduler = make_learner(settings, setup.load(settings.model).model, reference=False, rate=1e-3)
    critic = {id(p) for p in policy.critic_parameters()}
    rates = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    assert len(rates) == len(policy.parameters()) and critic < set(rates)
    assert all(rate == pytest.approx(want if i in critic else 1e-3) for i, rate in rates.items())
    optimizer.step()
    scheduler.step()  # 2 of 3 steps are left
    assert sorted({g["lr"] for g in optimizer.param_groups}) == pytest.approx([2 / 3 * 1e-3, 2 / 3 * want])
