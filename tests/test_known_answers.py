# SPDX-License-Identifier: Apache-2.0
"""Known answers from public bug reports that no other file holds, by their ids, and properties of all estimators."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import make_model, sample

from palestra.config import load
from palestra.errors import ConfigError
from palestra.learn.advantage import ADVANTAGES, AdvantageConfig, score, whiten
from palestra.learn.batch import Rows, pack, token_weights
from palestra.learn.policy import Policy, frozen_copy
from palestra.model.lora import LoraConfig, add_lora
from palestra.reward.sandbox import SandboxLimits, run_python
from palestra.selfcheck.kinds import make_sample
from palestra.selfcheck.run import Case, check
from palestra.train.config import RLConfig

TINY = {"model": "builtin:calculator", "data": "calculator", "env": "calculator"}

DATA: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    (
        "ls-004",
        "loss",
        {
            "ranks": [{"sum_loss": 6.0, "tokens": 2}, {"sum_loss": 6.0, "tokens": 6}],
            "gradient_sync": "average over ranks",
            "reduction": "token_mean",
        },
        {
            "effective_loss": 1.5,
            "local_divisor_formula": "global_tokens / world_size",
            "local_losses": [1.5, 1.5],
        },
    ),
    (
        "nm-001",
        "numeric",
        {"start": 1.0, "update": -0.0005, "steps": 120, "storage": ["bf16 only", "bf16 with float32 master"]},
        {"bf16_only": 1.0, "with_master": 0.941406},
    ),
    (
        "cf-004",
        "config",
        {"prompts": 100, "prompts_per_step": 8, "num_generations": 4, "epochs": 2, "drop_last": [False, True]},
        {"optimizer_steps": [26, 24], "completions_total": [800, 768]},
    ),
    (
        "rw-013",
        "reward",
        {"response_mask": [1, 1, 1, 0, 0], "scalar_reward": 1.0, "place": "token_level"},
        {"token_rewards": [0, 0, 1.0, 0, 0]},
    ),
    (
        "mk-010",
        "masking",
        {
            "completions": [{"ids": 5, "ended": True}, {"ids": 4, "ended": False}],
            "env_masks": [[1, 1, 0, 0, 1], [1, 1, 0, 1]],
            "drop_truncated": True,
        },
        {"loss_mask": [[1, 1, 0, 0, 1], [0, 0, 0, 0]], "mean_trained_len": 1.5, "num_trained_tokens": 3},
    ),
    ("ev-003", "eval", {"metric": "pass@k", "n": 200, "c": 17, "k": 100}, {"value": 0.999996, "finite": True}),
    ("ev-004", "eval", {"metric": "pass@k", "n": 3, "c": 0, "k": 7}, {"value": None, "must_not": 1.0}),
]


@pytest.mark.parametrize(("case", "area", "given_", "expected"), DATA, ids=[d[0] for d in DATA])
def test_known_answers(case: str, area: str, given_: dict[str, Any], expected: dict[str, Any]) -> None:
    result = check(Case(case, area, given_, expected))
    assert (result.status, result.said) == ("passed", "")


def test_kl_008_from_an_sft_adapter_the_reference_is_a_copy_of_it() -> None:
    model = add_lora(make_model(dtype=torch.float64), LoraConfig(r=4))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(generator=torch.Generator().manual_seed(1))
    rows = Rows((sample([3, 4, 5, 6], [0, 1, 1, 1]),))
    batch = pack(rows, token_weights(rows.samples, "token_mean"), [0], dtype=torch.float64)
    policy = Policy(model, reference=frozen_copy(model))
    assert torch.equal(policy.current_logprobs(batch), policy.reference_logprobs(batch))
    switched_off = Policy(model, reference=True)
    assert (switched_off.current_logprobs(batch) - switched_off.reference_logprobs(batch)).abs().max() > 1e-3


def test_cf_003_a_step_is_tasks_times_group_size_so_no_number_of_completions_can_fail_to_divide() -> None:
    with pytest.raises(ConfigError, match="completions_per_step"):
        load({**TINY, "train": {"completions_per_step": 6}}, [], RLConfig)
    config = load({**TINY, "train": {"tasks_per_step": 6}, "algorithm": {"num_generations": 4}}, [], RLConfig)
    assert config.train.tasks_per_step * config.algorithm.group_size == 24


def test_cf_010_gae_goes_on_from_one_row_of_an_episode_to_the_next() -> None:
    # δ of the last row is 1 − 0.5; the first row sees it through γλ = 1 and V = 0.5 of the state between them
    first = make_sample([1], turn_rewards=(0.0,))
    last = make_sample([1], turn_rewards=(1.0,))
    values = (np.array([0.0, 0.25]), np.array([0.0, 0.5]))
    rows = Rows((first, last), values=values, after=(0.0, 0.0))
    got = ADVANTAGES["gae"](rows, AdvantageConfig(gamma=1.0, gae_lambda=1.0))
    assert [a[1] for a in got] == [pytest.approx(0.75), pytest.approx(0.5)]


def test_cf_010_rows_that_do_not_say_what_their_turns_earned_are_refused() -> None:
    silent = sample([3, 4], [0, 1], reward=1.0)
    with pytest.raises(ValueError, match="0 rewards for"):
        ADVANTAGES["gae"](Rows((silent,), values=(np.zeros(2),), after=(0.0,)), AdvantageConfig())


def test_et_008_the_memory_of_generated_code_is_bounded() -> None:
    ended = run_python("x = 'a' * (8 * 1024**3)", limits=SandboxLimits(memory_mb=256, timeout_s=30.0))
    assert (ended.ended, ended.exit_code) == (None, 1) and "MemoryError" in ended.stderr


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
def test_et_007_a_timeout_ends_what_generated_code_has_started_too() -> None:
    mark = "sleep(61.007)"
    child = f"import time; time.{mark}"
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])\nwhile True: pass"
    began = time.monotonic()
    assert run_python(code, limits=SandboxLimits(timeout_s=1.0)).ended == "timeout"
    assert time.monotonic() - began < 30, "and not the minute that the child would take"
    assert not any(mark in line for line in command_lines())


def command_lines() -> list[str]:
    """Of every process there is."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            lines.append(file.read_text(errors="replace"))
    return lines


# Properties ------------------------------------------------------------------------------------------------

ALONE = {"reinforce", "distill", "gae", "gae_turns"}
"""Estimators that compare nothing with siblings or the step's mean."""
COMPARING = sorted(n for n in ADVANTAGES if ADVANTAGES[n].__module__.startswith("palestra.") and n not in ALONE)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(reward=st.floats(-1e3, 1e3), size=st.integers(1, 9))
def test_equal_rewards_give_exactly_zero_in_every_precision(dtype: torch.dtype, reward: float, size: int) -> None:
    rounded = torch.full((size,), reward, dtype=torch.float64).to(dtype).double()
    rows = Rows(tuple(make_sample([1, 0, 1], episode=str(i), reward=float(r)) for i, r in enumerate(rounded)))
    for name in COMPARING:
        assert not np.concatenate(ADVANTAGES[name](rows, AdvantageConfig(eps=0.0))).any(), name


@settings(max_examples=50, deadline=None)
@given(rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=8))
def test_what_is_centred_sums_to_zero(rewards: list[float]) -> None:
    for baseline, scale in (("mean", "none"), ("mean", "std"), ("leave_one_out", "none")):
        assert abs(score(rewards, baseline, scale, eps=1e-4).sum()) < 1e-9  # type: ignore[arg-type]
    (whitened,) = whiten([np.array(rewards)], [np.ones(len(rewards), bool)])
    assert abs(whitened.sum()) < 1e-6
