# SPDX-License-Identifier: Apache-2.0
"""Token weights are those of the whole step: processes that share it add up their gradients, and are done."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from small_models import eight_samples, make_model

from palestra.learn.batch import Reduction, Rows, micro_batches, pack, token_weights
from palestra.learn.policy import Policy
from palestra.learn.update import Sums, UpdateConfig, policy_loss

REDUCTIONS: tuple[Reduction, ...] = ("sequence_mean", "token_mean", "constant")
SHARES = (("A",), ("B", "C", "D"))
"""Groups by rank, never cut apart: 19 trained tokens in three episodes, 18 in five."""


def gradients(groups: tuple[str, ...], reduction: Reduction) -> list[torch.Tensor]:
    """Of these groups' part of the step's loss."""
    model, samples, rng = make_model(dtype=torch.float64), eight_samples(), np.random.default_rng(2)
    old = tuple(np.where(s.loss_mask, rng.normal(-3.0, 0.2, len(s.tokens)), 0.0) for s in samples)
    advantages = tuple(np.where(s.loss_mask, rng.normal(), 0.0) for s in samples)
    rows = Rows(tuple(samples), advantages=advantages, old=old)
    weights = token_weights(samples, reduction, divisor=100.0)
    own = [i for i, s in enumerate(samples) if s.group in groups]
    for chosen in micro_batches(samples, own, 40):
        batch = pack(rows, weights, chosen, dtype=torch.float64)
        loss = policy_loss(Policy(model), batch, UpdateConfig(kl_coef=0.0), 1.0, Sums({}), first=False)
        loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for reduction in REDUCTIONS:
        found = gradients(SHARES[rank], reduction)
        for gradient in found:
            dist.all_reduce(gradient)
        if rank == 0:
            torch.save(found, f"{folder}/{reduction}.pt")
    dist.destroy_process_group()


@pytest.mark.slow  # two processes, each of which imports torch
def test_two_processes_that_share_a_step_have_the_gradient_of_one(tmp_path: Path) -> None:
    mp.spawn(work, args=(str(tmp_path),), nprocs=2)
    for reduction in REDUCTIONS:
        want = gradients(("A", "B", "C", "D"), reduction)
        got = torch.load(tmp_path / f"{reduction}.pt")
        assert max(float((g - w).norm() / w.norm()) for g, w in zip(got, want, strict=True)) < 1e-9
        alone = gradients(SHARES[0], reduction)
        assert max(float((g - w).norm() / w.norm()) for g, w in zip(alone, want, strict=True)) > 0.1
