# SPDX-License-Identifier: Apache-2.0
"""DAPO as a whole: what the name expands to, what a plan says of it, and a run that draws again and resumes exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_train_rl import Interrupted, config, logged, quiet, refusal, weights_in

from palestra.config import load
from palestra.reward.build import make_rubric
from palestra.rollout.dump import read_rollouts
from palestra.run.metrics import check
from palestra.train.config import EvalConfig, RLConfig
from palestra.train.plan import describe
from palestra.train.rl import RLTrainer, train_rl
from palestra.types import Group, RewardTerm

LIMITS: dict[str, Any] = {"sampling": {"max_new_tokens": 50}, "limits": {"max_turns": 2}}
PLAIN: dict[str, Any] = {"model": "builtin:calculator", "data": "arithmetic", "env": "calculator"}


def rewards_of(rewards: Any, *overrides: str, **more: Any) -> Any:
    return load(PLAIN | LIMITS | more | {"rewards": rewards}, overrides, RLConfig).rewards


# Configs ---------------------------------------------------------------------------------------------------


def test_dapo_is_its_four_parts() -> None:
    made = config("a", algorithm="dapo").algorithm
    assert (made.clip_low, made.clip_high, made.reduction) == (0.2, 0.28, "token_mean")
    assert (made.dynamic_sampling, made.max_gen_batches, made.overlong_shaping) == (True, 4, True)
    part = config("a", algorithm="dapo").rewards
    assert part is not None and part["soft_overlong"] == {"weight": 1.0, "max_len": 32, "cache": 6}
    plain = config("a").algorithm
    assert (plain.dynamic_sampling, plain.max_gen_batches, plain.overlong_shaping) == (False, 1, False)


def test_each_part_of_dapo_can_be_switched_off() -> None:
    off = ["dynamic_sampling=false", "max_gen_batches=1", "overlong_shaping=false"]
    made = config("a", *(f"algorithm.{o}" for o in off), algorithm="dapo")
    assert made.rewards == config("a").rewards
    assert made.algorithm.clip_high == 0.28 and not made.algorithm.dynamic_sampling


def test_overlong_shaping_is_a_part_of_the_reward_within_the_limits_of_an_episode() -> None:
    added = {"weight": 1.0, "max_len": 100, "cache": 20}
    assert rewards_of({"accuracy": 1.0}, algorithm="dapo") == {"accuracy": 1.0, "soft_overlong": added}
    assert rewards_of(None, algorithm="dapo") == {"env": 1.0, "soft_overlong": added}, "what the env pays still counts"
    assert rewards_of({"accuracy": 1.0}) == {"accuracy": 1.0} and rewards_of(None) is None


@pytest.mark.parametrize(
    ("given", "filled"),
    [
        ({"soft_overlong": 0.5}, {"weight": 0.5, "max_len": 100, "cache": 20}),
        ({"soft_overlong": {"cache": 10}}, {"max_len": 100, "cache": 10}),
        ({"soft_overlong": {"max_len": 60}}, {"max_len": 60, "cache": 12}),
        ({"soft_overlong": {"max_len": 60, "cache": 9, "weight": 2.0}}, {"max_len": 60, "cache": 9, "weight": 2.0}),
    ],
)
@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_limits_that_are_given_stay_and_those_left_out_are_filled(given: Any, filled: Any, algorithm: str) -> None:
    assert rewards_of(given, algorithm=algorithm) == {"soft_overlong": filled}


def test_a_part_of_another_name_is_found_by_its_function() -> None:
    made = rewards_of({"brief": {"function": "soft_overlong", "weight": 0.1}}, algorithm="dapo")
    assert made == {"brief": {"function": "soft_overlong", "weight": 0.1, "max_len": 100, "cache": 20}}
    scored = load(PLAIN | LIMITS | {"rewards": {"soft_overlong": 1.0}}, [], EvalConfig).rewards
    assert scored == {"soft_overlong": {"weight": 1.0, "max_len": 100, "cache": 20}}, "evaluation scores alike"


def test_what_is_filled_in_is_what_the_rubric_takes() -> None:
    rubric = make_rubric(rewards_of({"accuracy": 1.0}, algorithm="dapo"), chat=True)
    function, weight = rubric.functions["soft_overlong"]
    assert (function(completion_ids=[[0] * 80, [0] * 85, [0] * 100]), weight) == ([0.0, -0.25, -1.0], 1.0)


def test_settings_that_cannot_work_are_refused() -> None:
    said = refusal("algorithm.preset=reinforce_pp", "algorithm.dynamic_sampling=true")
    assert "dynamic_sampling" in said and "reinforce_pp" in said
    assert "max_gen_batches" in refusal("algorithm.max_gen_batches=0")
    assert config("a", "algorithm.preset=reinforce_pp", "algorithm.max_gen_batches=2").algorithm.max_gen_batches == 2


def test_a_plan_says_what_dapo_draws_and_rewards() -> None:
    plan = describe(config("a", "algorithm.mask_truncated=true", algorithm={"preset": "dapo", "group_size": 2}))
    for line in (
        "# dynamic sampling: groups of equal rewards are left out of the update",
        "# refill: groups left out or failed are replaced by fresh tasks, drawn at most 4 times a step: "
        "at most 8 tasks × 2 = 16 episodes",
        "# episodes that a limit ends have no gradient",
        "  soft_overlong:\n    weight: 1.0\n    max_len: 32\n    cache: 6\n",
    ):
        assert line in plan
    assert "# refill" not in describe(config("a"))


# A run -----------------------------------------------------------------------------------------------------


def some_flat(trainer: RLTrainer) -> None:
    """Pays the members of every other draw differently, those of the rest alike."""

    class EveryOther:
        async def score(self, group: Group, *state: object) -> Group:
            episodes = []
            for e in group.episodes:
                paid = {"accuracy": RewardTerm(float(e.member) if group.draw % 2 else 1.0)}
                episodes.append(replace(e, trajectories=tuple(replace(t, rewards=paid) for t in e.trajectories)))
            return replace(group, episodes=tuple(episodes))

    trainer.world = replace(trainer.world, rubric=EveryOther())  # type: ignore[arg-type]
    trainer.run_dir.strict = True


def dapo(out: Path, *overrides: str) -> RLConfig:
    return config(out, "eval.size=0", "train.dump_every=1", *overrides, algorithm={"preset": "dapo", "group_size": 2})


def test_a_run_draws_again_never_the_same_twice_and_resumes_exactly(tmp_path: Path) -> None:
    train_rl(dapo(tmp_path / "whole"), progress=quiet(), on_ready=some_flat)
    steps = [r for r in logged(tmp_path / "whole") if "train/updates" in r]
    check((n for row in steps for n in row if n not in ("step", "phase", "time")), strict=True)
    # Draws 0 and 1: one is flat, so 2 (flat) and 3 follow. Then 4, 5, 6, 7 and so on: four draws, two kept, every step.
    for row in steps:
        seen = [row[f"rollout/{n}"] for n in ("gen_batches", "groups", "episodes", "groups_missing")]
        assert seen == [3, 4, 8, 0]
        assert row["rollout/groups_discarded"] == row["rollout/groups_zero_variance"] == 2
        assert row["train/updates"] == 1 and row["train/reward"] == pytest.approx(0.75), "of all that was played"
    files = sorted((tmp_path / "whole" / "rollouts").iterdir())
    drawn = [group.draw for file in files for group in read_rollouts(file)]
    assert drawn == list(range(12))
    with pytest.raises(KeyboardInterrupt):
        train_rl(dapo(tmp_path / "cut"), progress=Interrupted(2), on_ready=some_flat)
    train_rl(dapo(tmp_path / "cut"), progress=quiet(), resume=True, on_ready=some_flat)
    assert weights_in(tmp_path / "cut", 3) == weights_in(tmp_path / "whole", 3)


def test_da_004_a_model_that_never_succeeds_ends_its_steps_without_an_update(tmp_path: Path) -> None:
    more = ["train.steps=2", "algorithm.max_gen_batches=3", "algorithm.overlong_shaping=false"]
    train_rl(dapo(tmp_path / "a", *more), progress=quiet())  # a random model never answers: all rewards are 0
    for row in (r for r in logged(tmp_path / "a") if "train/updates" in r):
        assert (row["rollout/gen_batches"], row["rollout/groups_missing"], row["rollout/groups"]) == (3, 2, 6)
        assert (row["train/updates"], row["train/updates_skipped"], row["train/tokens"]) == (0, 1, 0)
