# SPDX-License-Identifier: Apache-2.0
"""``train.max_staleness`` above 0: playing and learning go on side by side; what that costs, and what is refused."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ahead_runs import HOOKS, PATIENCE_S, STEPS, lagging, no_hooks, rows_of, step_of  # noqa: F401
from test_resume_matrix import KINDS, PLAYED, check, one_thread, small, uninterrupted  # noqa: F401
from test_train_rl import config, logged, refusal, train
from torch import nn

from palestra.data.source import Cursor
from palestra.learn.batch import rows
from palestra.model.lora import LoraConfig, add_lora
from palestra.model.tiny import calculator_tokenizer, tiny_llama
from palestra.train import rl, setup
from palestra.train.ahead import Ahead
from palestra.train.groups import Collected
from palestra.types import Author, Episode, Group, RewardTerm, Span, StopReason, Task, Trajectory, Turn

# One beside the other --------------------------------------------------------------------------------------


def test_a_step_is_learned_from_while_the_next_one_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other to have begun: in turns, neither would ever end."""
    last, learn = STEPS - 1, rl.train_step
    learning, playing = ([threading.Event() for _ in range(last + 1)] for _ in range(2))

    def learned(*args: Any, seed: Any, **options: Any) -> Any:
        step = sum(e.is_set() for e in learning)
        learning[step].set()
        assert threading.current_thread() is not threading.main_thread()
        assert step == last or playing[step + 1].wait(PATIENCE_S), "nothing is played meanwhile"
        return learn(*args, seed=seed, **options)

    def played(task: Task) -> None:
        step = step_of(task)
        playing[step].set()
        assert step == 0 or learning[step - 1].wait(PATIENCE_S), "nothing is learned meanwhile"

    monkeypatch.setattr(rl, "train_step", learned)
    HOOKS["step"] = played
    train(lagging(tmp_path / "a", 1))
    steps = [r for r in logged(tmp_path / "a") if "train/updates" in r]
    assert [(r["step"], r["rollout/errors"], r["rollout/episodes"]) for r in steps] == [
        (n + 1, 0, 4) for n in range(STEPS)
    ]


def test_the_reward_rises_with_a_policy_one_version_behind(tmp_path: Path) -> None:
    """Paid is the mean of token mod 7: about 3 for whoever draws at random, 6 at most."""
    more = ["train.steps=20", "train.learning_rate=5e-2", "train.tasks_per_step=4", "train.save_every=0"]
    train(lagging(tmp_path / "a", 1, *more, "train.dump_every=0", "algorithm.group_size=4", "algorithm.kl_coef=0"))
    rewards = [r["train/reward"] for r in logged(tmp_path / "a") if "train/updates" in r]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2]) + 1.0


def test_a_batch_comes_back_from_a_checkpoint_to_the_last_bit() -> None:
    rng = np.random.default_rng(0)

    def episode(task: Task, member: int) -> Episode:
        spans = (
            Span(rng.integers(0, 9, 3), Author.ENV, "user", "é\ud83d"),
            Span(rng.integers(0, 9, 5), Author.MODEL, "assistant", "x", rng.normal(size=5).astype(np.float32), 7),
        )
        turn = Turn(spans, (), {"role": "assistant"}, "eos", rewards={"env": 0.1 + 0.2}, info={"seen": {1}})
        terms = {"accuracy": RewardTerm(1 / 3, 0.7), "missing": RewardTerm(None)}
        view = Trajectory((turn, turn), StopReason.MAX_TURNS, rewards=terms)
        return Episode(task, (view,), member=member, info={"stale": member == 1, "staleness": 1})

    task = Task("t", ({"role": "user", "content": "?"},), answer=4, meta={"odd": {2}})
    batch = Collected(
        (Group(task, 3, (episode(task, 0), episode(task, 1))),), Cursor(1, 4), {"rollout/gen_batches": 2.0},
        {"time/rollout_s": 0.1}, {"novelty": {"a": 1}},
    )  # fmt: skip
    again = Collected.from_dict(json.loads(json.dumps(batch.to_dict())))
    assert (again.cursor, again.metrics, again.timings, again.remembered) == (
        batch.cursor, batch.metrics, batch.timings, batch.remembered,
    )  # fmt: skip
    for one, other in zip(rows(batch.groups).samples, rows(again.groups).samples, strict=True):
        for name in ("tokens", "loss_mask", "logprobs", "versions"):
            a, b = getattr(one, name), getattr(other, name)
            assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes())
        plain = ("group", "episode", "reward", "turn_ends", "trained", "turn_rewards", "truncated")
        assert [getattr(one, n) for n in plain] == [getattr(other, n) for n in plain]
    assert again.to_dict() == batch.to_dict(), "what is written again is the same"


def test_only_what_trains_is_copied_for_the_engine() -> None:
    model = add_lora(tiny_llama(calculator_tokenizer(), hidden=16, layers=1, heads=2, intermediate=16), LoraConfig(r=2))
    world: Any = type("World", (), {"decode": staticmethod(lambda ids: "")})
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    for apart in (False, True):
        engine = setup.make_engine(config(), model, world, apart=apart)
        mine, own = dict(model.named_parameters()), dict(engine._model.named_parameters())
        assert {n for n in own if own[n] is not mine[n]} == (trained if apart else set())
        name, values = next((n, own[n].clone()) for n in own if "lora_B" in n)
        with torch.no_grad():
            mine[name].add_(1.0)
        assert torch.equal(own[name], values) == apart
        engine.load_weights(model, 1)
        assert torch.equal(own[name], mine[name])
        kept = engine.weights([name])
        with torch.no_grad():
            mine[name].sub_(1.0)
        engine.load_weights(model, 2)
        engine.load_weights(kept, 3)
        assert torch.equal(own[name], mine[name] + 1.0) if apart else torch.equal(own[name], kept[name])
        with torch.no_grad():
            mine[name].copy_(values)
        engine.close()


# What is told before ---------------------------------------------------------------------------------------


def test_what_would_be_learned_without_a_ratio_to_the_sampler_is_refused() -> None:
    stale, low = "train.max_staleness=1", "algorithm.old_logprobs=recompute"
    assert "algorithm.loss=clip" in refusal(stale, "algorithm.loss=reinforce", "algorithm.updates_per_batch=1")
    assert "algorithm.importance=token_truncate" in refusal(stale, low)
    weighed = config("a", stale, low, "algorithm.importance=token_truncate").train
    assert weighed.max_staleness == 1
    config("a", stale, algorithm="rft")  # what is imitated may come from anyone
    config("a", stale, algorithm="gspo")


# Batches and weights, by hand ------------------------------------------------------------------------------


class Paper:
    """An engine that only writes down which weights it was given: (number in the weights, version)."""

    def __init__(self) -> None:
        self.version, self.value = 0, 0.0
        self.loaded: list[tuple[float, int]] = []

    def load_weights(self, policy: Any, version: int) -> None:
        if policy is not None:
            source = policy if isinstance(policy, Mapping) else dict(policy.named_parameters())
            self.value = float(source["weight"].detach().sum())
        self.version = version
        self.loaded.append((self.value, version))

    def weights(self, names: Any) -> dict[str, torch.Tensor]:
        return {name: torch.full((1, 1), self.value) for name in names}


def on_paper(lag: int, steps: int, *, quick: str) -> tuple[list[tuple[float, int]], int]:
    """Steps that add 1 to the only weight; who is quick, the player or the learner? Returns what each batch was sampled
    by and how many copies of weights were put aside at most."""
    engine, model = Paper(), nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    sampled: list[tuple[float, int]] = []
    most = 0

    async def collect(step: int, cursor: Cursor) -> Collected:
        assert cursor == Cursor(0, step)
        before = (engine.value, engine.version)
        await asyncio.sleep(0.0 if quick == "player" else 0.01)
        assert before == (engine.value, engine.version), "weights do not change within a batch"
        sampled.append(before)
        return Collected((), Cursor(0, step + 1), {}, {}, {})

    ahead = Ahead(lag, steps, collect, engine, model)  # type: ignore[arg-type]

    def learn() -> None:
        if quick == "player":
            time.sleep(0.01)
        with torch.no_grad():
            model.weight.add_(1.0)

    async def go() -> None:
        nonlocal most
        for step in range(steps):
            assert (await ahead.take(step, Cursor(0, step))).cursor == Cursor(0, step + 1)
            await ahead.learn(step, learn)
            most = max(most, len(ahead._held))

    asyncio.run(go())
    return sampled, most


@pytest.mark.parametrize("quick", ["player", "learner"])
@pytest.mark.parametrize("lag", [1, 2, 3])
def test_whoever_is_quicker_a_batch_is_sampled_by_the_weights_of_its_version(lag: int, quick: str) -> None:
    sampled, most = on_paper(lag, 7, quick=quick)
    assert sampled == [(max(0.0, n - lag), max(0, n - lag)) for n in range(7)]
    assert most <= lag - 1, "besides the engine's copy"


def test_a_second_cancellation_strikes_at_once_and_the_model_counts_as_changing() -> None:
    release, begun = threading.Event(), threading.Event()

    def learn() -> None:
        begun.set()
        release.wait(PATIENCE_S)

    async def collect(step: int, cursor: Cursor) -> Collected:
        return Collected((), cursor, {}, {}, {})

    async def go() -> None:
        ahead = Ahead(1, 1, collect, Paper(), nn.Linear(1, 1, bias=False))  # type: ignore[arg-type]
        await ahead.take(0, Cursor())
        work = asyncio.create_task(ahead.learn(0, learn))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        work.cancel()
        await asyncio.sleep(0.01)
        assert not work.done() and ahead.learning
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert ahead.learning

    try:
        asyncio.run(go())
    finally:
        release.set()
