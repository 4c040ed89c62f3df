# SPDX-License-Identifier: Apache-2.0
"""Optimiser steps under faults: memory that runs out, numbers that are not finite, weights too short for an update."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from small_models import eight_samples, make_model
from torch import nn

from palestra.learn.batch import Rows, micro_batches, pack, token_weights
from palestra.learn.loss import cross_entropy
from palestra.learn.masters import MasterAdamW
from palestra.learn.optim import make_optimizer
from palestra.learn.policy import Policy
from palestra.learn.robust import Guard, TrainingError, Update
from palestra.learn.update import UpdateConfig, annotate, train_step

ROWS = Rows(tuple(eight_samples()))
CPU_SAYS = (
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
)


class Full:
    """A model whose memory holds so many tokens; ``failures`` counts how often it was too small."""

    def __init__(self, model: nn.Module, tokens: int, error: type[RuntimeError] = torch.OutOfMemoryError) -> None:
        self.failures = 0

        def refuse(_: Any, args: Any, given: dict[str, Any]) -> None:
            if given["input_ids"].numel() > tokens:
                self.failures += 1
                raise error(CPU_SAYS)

        model.register_forward_pre_hook(refuse, with_kwargs=True)


def optimizer_of(policy: Policy) -> torch.optim.AdamW:
    return make_optimizer(policy.parameters(), learning_rate=1e-2, weight_decay=0.0, betas=(0.9, 0.999))


def rl_step(policy: Policy, guard: Guard, *, advantage: float = 1.0) -> dict[str, float]:
    config = UpdateConfig(kl_coef=0.0, reduction="token_mean", updates_per_batch=2)
    rows = annotate(policy, ROWS, config, temperature=1.0)
    assert rows.advantages is not None
    rows = rows.with_(advantages=tuple(advantage * (a + 1) for a in rows.advantages))
    optimizer = optimizer_of(policy)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return train_step(policy, optimizer, schedule, rows, config, temperature=1.0, guard=guard)


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def weights(policy: Policy) -> list[torch.Tensor]:
    return [p.detach().clone() for p in policy.parameters()]


# Memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError], ids=["an error of its own", "by its text"])
def test_a_step_that_ran_out_of_memory_is_that_of_a_smaller_budget_to_the_bit(error: type[RuntimeError]) -> None:
    """The first attempt leaves nothing behind: no gradient, no metric, no update."""
    said: list[str] = []
    full, small = Policy(make_model()), Policy(make_model())
    memory = Full(full.model, 45, error)
    guard = Guard(1 << 20, tell=said.append)
    metrics = rl_step(full, guard)
    assert memory.failures == 2 and guard.tokens == 32
    assert untimed(metrics) == untimed(rl_step(small, Guard(guard.tokens)))
    assert all(map(torch.equal, weights(full), weights(small)))
    assert len(said) == memory.failures and f"passes of {guard.tokens} tokens" in said[-1]


def test_the_budget_stays_lowered_and_is_part_of_a_checkpoint() -> None:
    policy, guard = Policy(make_model()), Guard(1 << 20, tell=lambda _: None)
    memory = Full(policy.model, 60)
    rl_step(policy, guard)
    failures = memory.failures
    rl_step(policy, guard)
    assert memory.failures == failures, "the second step begins with what fitted"
    resumed, changed = Guard(1 << 20), Guard(50)
    resumed.load_state_dict(guard.state_dict())
    changed.load_state_dict(guard.state_dict())
    assert (resumed.tokens, changed.tokens) == (guard.tokens, 50), "another micro_batch_tokens is another decision"


def test_one_sample_that_does_not_fit_is_an_error_with_remedies() -> None:
    policy = Policy(make_model())
    before = weights(policy)
    config = UpdateConfig(kl_coef=0.0)
    rows = annotate(policy, ROWS, config, temperature=1.0)
    Full(policy.model, 20)
    optimizer = optimizer_of(policy)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    with pytest.raises(TrainingError, match=r"one sample alone .* gradient_checkpointing=true .*lora"):
        train_step(policy, optimizer, schedule, rows, config, temperature=1.0, guard=Guard(4096, tell=lambda _: None))
    assert all(map(torch.equal, weights(policy), before)) and not optimizer.state


def test_memory_that_runs_out_in_the_optimiser_is_an_error_with_remedies_and_nothing_is_whole() -> None:
    guard, weight = Guard(8, remedies="lower sft.max_length"), nn.Parameter(torch.ones(()))
    sgd = torch.optim.SGD([weight], lr=1.0)

    def full(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    sgd.step = full  # type: ignore[method-assign,assignment]
    with pytest.raises(TrainingError, match=r"^out of memory in the optimiser's own step; lower sft\.max_length$"):
        guard.update(sgd, [weight], lambda _: [[0]], lambda _: 0.0, rows=Rows(()), max_grad_norm=1.0)
    assert not guard.whole


def test_another_error_is_not_taken_for_a_lack_of_memory() -> None:
    def broken(_: Sequence[int]) -> float:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        Guard(8).in_parts(lambda _: [[0, 1]], broken)


def test_dropout_draws_the_same_after_a_retry() -> None:
    """From the random state at the beginning of the step, not from where the failed attempt had come."""

    def drawn(fits: int, tokens: int) -> list[float]:
        torch.manual_seed(7)

        def work(part: Sequence[int]) -> float:
            noise = float(torch.rand(()))
            if len(part) > fits:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return noise

        def cut(most: int) -> Iterator[list[int]]:
            yield from (list(range(i, min(i + most, 6))) for i in range(0, 6, most))

        return Guard(tokens, tell=lambda _: None).in_parts(cut, work)

    assert drawn(fits=3, tokens=6) == drawn(fits=6, tokens=3)


# Numbers that are not finite -------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_skipped_counted_and_its_batch_handed_out(junk: float) -> None:
    policy, guard = Policy(make_model()), Guard(4096)
    before = weights(policy)
    metrics = rl_step(policy, guard, advantage=junk)
    assert all(map(torch.equal, weights(policy), before))
    assert (metrics["train/updates"], metrics["train/updates_skipped"], metrics["train/updates_not_finite"]) == (
        0,
        2,
        1,
    )
    assert guard.in_a_row == 1 and len(guard.faults) == 1
    fault = guard.faults[0]
    assert "loss is" in fault.reason and [len(s.tokens) for s in fault.rows.samples] == [
        len(s.tokens) for s in ROWS.samples
    ]
    assert fault.rows.advantages is not None and not np.isfinite(fault.rows.advantages[0][-1])


def test_only_failures_in_a_row_end_a_training() -> None:
    policy, guard = Policy(make_model()), Guard(4096, max_nonfinite=2)
    rl_step(policy, guard, advantage=float("nan"))
    guard.check()
    rl_step(policy, guard)
    rl_step(policy, guard, advantage=float("nan"))
    guard.check()
    rl_step(policy, guard, advantage=float("nan"))
    with pytest.raises(TrainingError, match="2 optimiser steps in a row"):
        guard.check()


def test_a_loss_that_is_not_finite_counts_even_where_its_gradient_is() -> None:
    weight = nn.Parameter(torch.ones(()))
    sgd = torch.optim.SGD([weight], lr=1.0)

    def backward(_: Sequence[int]) -> float:
        weight.backward()  # type: ignore[no-untyped-call]
        return float("inf")

    guard = Guard(1)
    assert guard.update(sgd, [weight], lambda _: [[0]], backward, rows=ROWS, max_grad_norm=9.0) == Update(
        float("inf"), 1.0, taken=False
    )
    assert weight.item() == 1.0


# Masters ---------------------------------------------------------------------------------------------------


def short(weight: float = 1.0, rate: float = 1e-5, masters: bool = True) -> tuple[nn.Parameter, torch.optim.AdamW]:
    parameter = nn.Parameter(torch.full((2, 2), weight, dtype=torch.bfloat16))
    kind = MasterAdamW if masters else torch.optim.AdamW
    return parameter, kind([{"params": [parameter]}], lr=rate, weight_decay=0.0)


def push(parameter: nn.Parameter, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        parameter.float().sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def test_updates_far_below_the_grid_of_bfloat16_add_up() -> None:
    """Adam moves by the rate when gradients are equal: after 400 steps of 1e-5 the weight stands at 0.996, next to the
    grid point 0.99609375. Without masters each single update is rounded away."""
    parameter, optimizer = short()
    push(parameter, optimizer, 400)
    assert isinstance(optimizer, MasterAdamW)
    assert optimizer.master(parameter)[0, 0].item() == pytest.approx(1 - 400e-5, abs=2e-5)
    assert parameter[0, 0].item() == 0.99609375
    lost, plain = short(masters=False)
    push(lost, plain, 400)
    assert lost[0, 0].item() == 1.0


def test_gradients_of_many_passes_add_up_in_float32() -> None:
    """256 + 1 is not a number of bfloat16: the sum of both passes would be 256."""
    parameter, optimizer = short()
    assert isinstance(optimizer, MasterAdamW)
    for factor in (256.0, 1.0):
        (factor * parameter.float().sum()).backward()
    held = optimizer.master(parameter)
    assert held.grad is not None and held.grad[0, 0].item() == 257.0 and parameter.grad is None


def test_a_resumed_training_goes_on_from_the_masters_to_the_bit() -> None:
    whole, optimizer = short()
    push(whole, optimizer, 30)
    cut, first = short()
    push(cut, first, 11)
    state = copy.deepcopy(first.state_dict())
    resumed, second = short(weight=0.0)
    second.load_state_dict(state)
    resumed.data.copy_(cut.data)
    push(resumed, second, 19)
    assert isinstance(optimizer, MasterAdamW) and isinstance(second, MasterAdamW)
    assert torch.equal(second.master(resumed), optimizer.master(whole)) and torch.equal(resumed, whole)


def test_cp_009_after_weights_are_loaded_the_first_step_starts_from_them() -> None:
    parameter, optimizer = short(rate=1e-3)
    push(parameter, optimizer, 3)
    with torch.no_grad():
        parameter[0].fill_(5.0)
    push(parameter, optimizer, 1)
    assert parameter[0, 0].item() == 5.0 and parameter[1, 0].item() == pytest.approx(1.0, abs=5e-3)
    assert isinstance(optimizer, MasterAdamW)
    assert optimizer.master(parameter)[0, 0].item() == pytest.approx(5.0 - 1e-3, abs=2e-4)


def test_bfloat16_weights_train_through_masters_and_float32_ones_as_ever() -> None:
    policy = Policy(make_model(dtype=torch.bfloat16))
    optimizer, guard = optimizer_of(policy), Guard(4096)
    assert isinstance(optimizer, MasterAdamW) and type(optimizer_of(Policy(make_model()))) is torch.optim.AdamW
    token_weight = token_weights(ROWS.samples, "token_mean")

    def backward(part: Sequence[int]) -> float:
        batch = pack(ROWS, token_weight, part)
        loss = cross_entropy(policy.logprobs(batch)[0], batch.weights.float())
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def step() -> Update:
        cut = lambda tokens: micro_batches(ROWS.samples, range(len(ROWS)), tokens)  # noqa: E731
        return guard.update(optimizer, policy.parameters(), cut, backward, rows=ROWS, max_grad_norm=1.0)

    losses = [step().loss for _ in range(8)]
    assert losses[-1] < losses[0]
    for p in policy.parameters():
        assert torch.equal(p, optimizer.master(p).to(torch.bfloat16)), "the weight is its master, rounded"
