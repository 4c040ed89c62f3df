# SPDX-License-Identifier: Apache-2.0
"""The flat file, checked with numbers worked out by hand."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def nano() -> Iterator[ModuleType]:
    """The example as a module. One thread: its matrices are small, and a second one mostly waits."""
    path = Path(__file__).parents[1] / "examples" / "nano_agent_rl.py"
    spec = importlib.util.spec_from_file_location("nano_agent_rl", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield module
    torch.set_num_threads(threads)


def tensor(rows: list[object]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_advantages_are_z_scores_with_the_sample_deviation(nano: ModuleType) -> None:
    # mean 0.5; squares 4 · 0.25 = 1, over n - 1 = 3: deviation sqrt(1/3)
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    got = nano.grpo_advantages(tensor([[1.0, 0.0, 1.0, 0.0], [0.3, 0.3, 0.3, 0.3]]))
    assert torch.allclose(got, tensor([[expected, -expected, expected, -expected], [0, 0, 0, 0]]), atol=1e-12)


def test_loss_on_policy_is_minus_the_mean_advantage(nano: ModuleType) -> None:
    logprobs, mask = tensor([[-1.0, -2.0], [-0.5, 0.0]]), tensor([[1, 1], [1, 0]])
    loss = nano.grpo_loss(logprobs, logprobs, logprobs, mask, tensor([0.8, -0.2]), kl_coef=0.5)
    assert loss.item() == pytest.approx(-(0.8 - 0.2) / 2, abs=1e-12)


def test_loss_clips_what_would_still_be_won_and_never_what_would_be_lost(nano: ModuleType) -> None:
    # ratios 2 and 0.5, clip 0.2. A = +1: min(2, 1.2) = 1.2 and min(0.5, 0.8) = 0.5.
    #                             A = -1: min(-2, -1.2) = -2 and min(-0.5, -0.8) = -0.8.
    old, two, half = tensor([[0.0]]), tensor([[math.log(2)]]), tensor([[math.log(0.5)]])
    for new, advantage, surrogate in ((two, 1.0, 1.2), (half, 1.0, 0.5), (two, -1.0, -2.0), (half, -1.0, -0.8)):
        loss = nano.grpo_loss(new, old, new, tensor([[1]]), tensor([advantage]), clip=0.2, kl_coef=0.1)
        assert loss.item() == pytest.approx(-surrogate, abs=1e-12)


def test_kl_is_k3_of_the_reference_over_the_policy(nano: ModuleType) -> None:
    # π_ref / π = 2: k3 = 2 - log 2 - 1
    new, ref = tensor([[math.log(0.25)]]), tensor([[math.log(0.5)]])
    loss = nano.grpo_loss(new, new, ref, tensor([[1]]), tensor([0.0]), kl_coef=0.1)
    assert loss.item() == pytest.approx(0.1 * (1 - math.log(2)), abs=1e-12)


def test_sequences_weigh_the_same_whatever_their_length_and_observations_weigh_nothing(nano: ModuleType) -> None:
    # first row: ratios 1.1 and, masked, e^5; second row: three ratios of 1. (1.1 · 1 + 1 · 2) / 2
    new = tensor([[math.log(1.1), 5.0, 0.0], [0.0, 0.0, 0.0]])
    old = torch.zeros_like(new)
    loss = nano.grpo_loss(new, old, new, tensor([[1, 0, 0], [1, 1, 1]]), tensor([1.0, 2.0]))
    assert loss.item() == pytest.approx(-(1.1 + 2.0) / 2, abs=1e-12)


def test_environment_answers_calls_and_an_answer_wins(nano: ModuleType) -> None:
    env = nano.CalculatorEnv(max_steps=4)
    assert env.step("<call>add(3,4)</call>") == ("<obs>7</obs>", False)
    assert env.step("<call>sub(3,4)</call>") == ("<obs>error: no call or answer</obs>", False)
    assert env.step("<call>mul(3)</call>") == ("<obs>error: no call or answer</obs>", False)
    assert env.step("well") == ("<obs>error: no call or answer</obs>", True), "the fourth step is the last"
    env = nano.CalculatorEnv()
    assert env.step("<call>add(1,1)</call><answer>\\boxed{-35}</answer>") == ("", True)
    assert env.final == -35


def test_gold_earns_the_reward_and_garbage_does_not(nano: ModuleType) -> None:
    problem = nano.Problem("(3+4)*5\n", ["add", "mul"], [3, 4, 5], 35)

    def earns(said: str) -> float:
        episode = nano.Episode(problem)
        episode.env.step(said)
        return nano.reward(episode)

    assert earns("<answer>\\boxed{35}</answer>") == 1.1
    assert earns("<answer>\\boxed{36}</answer>") == 0.1
    assert earns("35") == earns("<answer>35</answer>") == earns("") == 0.0


def test_a_problem_says_what_its_answer_answers(nano: ModuleType) -> None:
    problems = [nano.make_problem(random.Random(i)) for i in range(40)]
    # Python reads the same arithmetic in the text: "(3+4)*5".
    assert all(eval(p.text) == p.answer for p in problems)
    assert {p.text.startswith("(") for p in problems} == {True, False}, "the bracket stands on either side"


def test_the_file_is_short_enough_to_be_read_in_one_sitting(nano: ModuleType) -> None:
    assert nano.__file__ is not None
    assert len(Path(nano.__file__).read_text(encoding="utf-8").splitlines()) <= 270


def test_clean_demonstrations_solve_their_problem_and_noise_is_in_the_choices(nano: ModuleType) -> None:
    rng = random.Random(0)
    wrong = 0
    for noise in (0.0, 1.0):
        for _ in range(200):
            problem = nano.make_problem(rng)
            env = nano.CalculatorEnv()
            pieces = nano.demonstration(problem, rng, noise)
            assert nano.decode(nano.encode("".join(text for _, text in pieces))) == "".join(text for _, text in pieces)
            said = [text for ours, text in pieces if ours]
            shown = [text for ours, text in pieces if not ours][1:]
            for text, observation in zip(said[:-1], shown, strict=True):
                assert env.step(text) == (observation, False), "even a noisy demonstration computes what it calls"
            env.step(said[-1])
            assert env.final == problem.answer or noise == 1.0
            wrong += env.final != problem.answer
    assert wrong > 150


def test_recorded_logprobs_are_those_of_the_trainer_and_only_of_the_model_s_tokens(
    nano: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(nano, "TEMPERATURE", 0.7)
    model = nano.TinyGPT(width=24, layers=2, heads=2)
    problems = [nano.make_problem(random.Random(i)) for i in range(6)]
    episodes = nano.rollout(model, problems, torch.Generator().manual_seed(1), max_turn=5)
    assert all(e.done for e in episodes)
    ids, mask = nano.pad([e.ids for e in episodes]), nano.pad([e.mask for e in episodes])
    recorded = nano.pad([e.logprobs for e in episodes], torch.float32)
    with torch.no_grad():
        computed = nano.token_logprobs(model, ids)
    assert torch.allclose(recorded[:, 1:], computed * mask[:, 1:], atol=1e-5)
    for episode in episodes:
        assert len(episode.ids) == len(episode.mask) == len(episode.logprobs)
        assert 4 <= sum(episode.mask) <= 4 * 5, "an untrained model babbles through its four turns of five tokens"
        theirs = [i for i, ours in zip(episode.ids, episode.mask, strict=True) if not ours]
        assert nano.decode(theirs) == episode.problem.text + 3 * "<obs>error: no call or answer</obs>"


def test_one_step_of_the_whole_loop_runs(nano: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    curve = nano.main(seed=0, steps=1, warm_up_steps=2, groups=2, group_size=2)
    assert curve == [0.0]
    assert "step   0  right 0.00" in capsys.readouterr().out
