# SPDX-License-Identifier: Apache-2.0
"""The flat example and the library compute the same losses and the same gradients on the same episodes."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from fakes import run
from small_models import double_norms, double_softmax
from torch import Tensor

from palestra.chat.plain import PlainRenderer
from palestra.engine.scripted import ScriptedEngine
from palestra.env.calculator import CalculatorEnv
from palestra.learn.batch import Rows, micro_batches, pack, rows, token_weights
from palestra.learn.policy import Policy
from palestra.learn.update import Sums, UpdateConfig, annotate, policy_loss, trained_indices
from palestra.model.tiny import calculator_tokenizer, tiny_llama
from palestra.rollout.episode import Limits, SamplingConfig, run_episode
from palestra.types import Episode, Group, RewardTerm, Task

CLIP, KL = 0.2, 0.02
TOKENIZER = calculator_tokenizer()
SCRIPTS = {
    "(3+4)*5\n": [
        [r"<call>add(3,4)</call>", r"<call>mul(7,5)</call>", r"<answer>\boxed{35}</answer>"],
        [r"<call>add(3,4)</call>", r"<answer>\boxed{7}</answer>"],
        [r"<call>mul(3)</call>", "well", "well", "well"],
        [r"<answer>\boxed{35}</answer>"],
    ],
    "2*(1+1)\n": [
        [r"<call>add(1,1)</call>", r"<answer>\boxed{4}</answer>"],
        [r"<answer>\boxed{5}</answer>"],
        [r"<answer>\boxed{4}</answer>"],
        [r"<call>mul(2,1)</call>", r"<call>add(2,1)</call>", r"<answer>\boxed{3}</answer>"],
    ],
}
REWARDS = ([1.1, 0.1, 0.0, 1.1], [1.1, 0.1, 1.1, 0.1])


@pytest.fixture(scope="module")
def nano() -> Iterator[ModuleType]:
    path = Path(__file__).parents[1] / "examples" / "nano_agent_rl.py"
    spec = importlib.util.spec_from_file_location("nano_for_equality", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def scripted_groups() -> list[Group]:
    """Real episodes: calls, their observations, failed calls and answers, with made-up sampling log-probs."""

    async def play() -> list[Group]:
        made = []
        for draw, (prompt, scripts) in enumerate(SCRIPTS.items()):
            task, episodes = Task(prompt, prompt), []
            for member, script in enumerate(scripts):
                episode = await run_episode(
                    task,
                    env=CalculatorEnv(),
                    engine=ScriptedEngine(script, TOKENIZER),
                    renderer=PlainRenderer(TOKENIZER),
                    limits=Limits(),
                    sampling=SamplingConfig(max_new_tokens=40),
                    seed=0,
                    draw=draw,
                    member=member,
                )
                episodes.append(paid(episode, REWARDS[draw][member]))
            made.append(Group(task, draw, tuple(episodes)))
        return made

    return run(play())


def paid(episode: Episode, reward: float) -> Episode:
    from dataclasses import replace

    assert episode.error is None
    views = tuple(replace(t, rewards={"total": RewardTerm(reward)}) for t in episode.trajectories)
    return replace(episode, trajectories=views)


def models() -> tuple[Any, Any]:
    """A policy and a reference that differ a little, in float64 throughout."""
    policy = double_norms(tiny_llama(TOKENIZER, hidden=24, layers=2, heads=2, intermediate=32).double())
    policy.set_attn_implementation("eager")
    reference = copy.deepcopy(policy)
    noise = torch.Generator().manual_seed(3)
    for p in policy.parameters():
        p.data.add_(0.02 * torch.randn(p.shape, generator=noise, dtype=torch.float64))
    return policy, reference


def near_policy(policy: Any, data: Rows) -> Rows:
    """The script's log-probs replaced by the policy's own, a fifth of a nat off: ratios on both sides of the clip."""
    from dataclasses import replace

    rng, samples = np.random.default_rng(5), []
    for s in data.samples:
        ids = torch.tensor(s.tokens[None], dtype=torch.long)
        with torch.no_grad(), double_softmax():
            logp = policy(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
        old = np.where(s.loss_mask, np.r_[0.0, logp] + rng.normal(0, 0.2, len(s.tokens)), 0.0)
        samples.append(replace(s, logprobs=old.astype(np.float32)))
    return replace(data, samples=tuple(samples))


def by_nano(nano: ModuleType, policy: Any, reference: Any, data: Rows) -> Tensor:
    """Padded (B, T), as the example's ``update`` does it."""
    ids = nano.pad([s.tokens.tolist() for s in data.samples])
    mask = nano.pad([s.loss_mask.astype(int).tolist() for s in data.samples])[:, 1:]
    old = nano.pad([s.logprobs.tolist() for s in data.samples], torch.float64)[:, 1:]

    def score(model: Any) -> Tensor:
        with double_softmax():
            scores: Tensor = nano.token_logprobs(lambda x: model(input_ids=x, use_cache=False).logits, ids)
        return scores

    with torch.no_grad():
        ref = score(reference)
    advantages = nano.grpo_advantages(torch.tensor(REWARDS, dtype=torch.float64)).flatten()
    loss: Tensor = nano.grpo_loss(score(policy), old, ref, mask, advantages, clip=CLIP, kl_coef=KL)
    return loss


@pytest.mark.parametrize("micro_batch_tokens", [8192, 120, 1])
def test_losses_and_gradients_are_those_of_the_flat_example(nano: ModuleType, micro_batch_tokens: int) -> None:
    plain, reference = models()
    model = copy.deepcopy(plain)
    data = rows(scripted_groups())
    data = near_policy(plain, data)
    assert [s.reward for s in data.samples] == [*REWARDS[0], *REWARDS[1]]
    assert data.samples[2].tokens.tolist().count(TOKENIZER.convert_tokens_to_ids("<obs>")) == 3

    want = by_nano(nano, plain, reference, data)
    want.backward()  # type: ignore[no-untyped-call]

    config = UpdateConfig(
        advantage="group_zscore", kl="k3", kl_coef=KL, clip_low=CLIP, clip_high=CLIP,
        reduction="sequence_mean", micro_batch_tokens=micro_batch_tokens,
    )  # fmt: skip
    # The policy's frozen copy is taken of the reference's weights; then the policy gets its own.
    own = copy.deepcopy(model.state_dict())
    model.load_state_dict(reference.state_dict())
    policy = Policy(model, reference=True)
    model.load_state_dict(own)
    data = annotate(policy, data, config, temperature=1.0)
    weights, sums, total = token_weights(data.samples, config.reduction), Sums({}), 0.0
    for chosen in micro_batches(data.samples, trained_indices(data), config.micro_batch_tokens):
        loss = policy_loss(policy, pack(data, weights, chosen, dtype=torch.float64), config, 1.0, sums, first=True)
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())

    assert total == pytest.approx(float(want.detach()), rel=1e-9)
    assert 0.05 < sums.means()["train/clip_fraction"] < 0.5, "the clip takes part in the comparison"
    assert sums.means()["train/kl"] > 1e-3, "and so does the reference"
    for (name, w), g in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert w.grad is not None and g.grad is not None
        assert float((g.grad - w.grad).norm()) <= 1e-9 * float(w.grad.norm()), name
