# SPDX-License-Identifier: Apache-2.0
"""One step of learning from preferences: rows in, changed weights and honest numbers out.

A step's loss is the mean over all its pairs (or labelled replies), however it is cut into forward passes. A pair is
never cut apart: both replies go through the model together, and their shared prompt once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from palestra.config import Config
from palestra.learn.batch import Batch, PerToken, Rows, Sample, pack
from palestra.learn.policy import Policy
from palestra.learn.preference import LabelScores, Outcome, PairScores, PreferenceLoss, pairwise
from palestra.learn.robust import Guard
from palestra.learn.update import Sums
from palestra.model.reward_head import RewardModel
from palestra.types import BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class Comparisons:
    """What is compared, in units: pairs or labelled replies.

    Pairs: samples 2p and 2p+1 are the chosen and the rejected reply of pair p and one group, so that their prompt is
    computed once. Labelled: sample i has label i (True = desirable), and sample i of ``mismatched`` is its prompt with
    another prompt's reply; ``baseline`` is KTO's z₀ on those, once it has been estimated.
    """

    rows: Rows
    labels: BoolArray | None = None
    mismatched: Rows | None = None
    baseline: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows) if self.labels is not None else len(self.rows) // 2

    def members(self, unit: int) -> tuple[int, ...]:
        """The samples of one unit."""
        return (unit,) if self.labels is not None else (2 * unit, 2 * unit + 1)

    def take(self, units: Sequence[int]) -> Comparisons:
        """Some of them, in this order; a unit that is named twice is there twice."""
        chosen = [i for unit in units for i in self.members(unit)]
        labels = None if self.labels is None else self.labels[list(units)]
        mismatched = None if self.mismatched is None else _some(self.mismatched, units)
        return Comparisons(_some(self.rows, chosen), labels, mismatched)


class Objective(Protocol):
    """What is learned from comparisons."""

    def ready(self, data: Comparisons, guard: Guard | None = None) -> Comparisons:
        """``data`` with what must be known about all of it before it is cut. guard: knows how many tokens fit."""
        ...

    def outcome(self, data: Comparisons, units: Sequence[int], *, gradient: bool) -> Outcome:
        """The loss of these units, in one forward pass of the model that learns."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PreferenceObjective:
    """A policy under a preference loss; ``config`` holds the loss's options."""

    policy: Policy
    loss: PreferenceLoss
    config: Config
    max_tokens: int

    def ready(self, data: Comparisons, guard: Guard | None = None) -> Comparisons:
        if self.loss.paired:
            return data
        return replace(data, baseline=kto_baseline(self.policy, data, self.max_tokens, guard))

    def outcome(self, data: Comparisons, units: Sequence[int], *, gradient: bool) -> Outcome:
        members = [i for unit in units for i in data.members(unit)]
        scored = _scored(self.policy, data.rows, members, gradient=gradient, reference=self.loss.reference)
        if self.loss.paired:
            pairs = [side for values in scored for side in (values[members[0::2]], values[members[1::2]])]
            result = self.loss.function(PairScores(*pairs), self.config)
            sides, facts = (pairs[0], pairs[1]), {}
        else:
            assert data.labels is not None and data.baseline is not None
            label = torch.as_tensor(data.labels[members], device=self.policy.device)
            logprobs, ref = scored[0][members], scored[2][members]
            result = self.loss.function(LabelScores(logprobs, ref, label, data.baseline), self.config)
            sides, facts = (logprobs[label], logprobs[~label]), {"baseline_kl": (float(data.baseline), 1.0)}
        for name, side in zip(("chosen_logprob", "rejected_logprob"), sides, strict=True):
            facts[name] = (float(side.detach().sum()), float(len(side)))
        if self.loss.reference:
            ratio = float((scored[0].detach() - scored[2]).sum())  # samples that are not among the members add 0
            facts["log_ratio"] = (ratio, float(scored[1].sum()))
        return replace(result, facts=facts)


@dataclass(frozen=True, slots=True, eq=False)
class RewardObjective:
    """A reward model under −log σ(r_c − r_r), with ``center`` the weight of the term that keeps rewards around 0."""

    model: RewardModel
    center: float

    def ready(self, data: Comparisons, guard: Guard | None = None) -> Comparisons:
        return data

    def outcome(self, data: Comparisons, units: Sequence[int], *, gradient: bool) -> Outcome:
        members = [i for unit in units for i in data.members(unit)]
        self.model.train(gradient)
        rewards = reply_rewards(self.model, data.rows, members)
        return pairwise(rewards[members[0::2]], rewards[members[1::2]], self.center)


def preference_step(
    objective: Objective,
    data: Comparisons,
    optimizer: torch.optim.Optimizer,
    *,
    max_tokens: int,
    max_grad_norm: float,
    guard: Guard | None = None,
) -> dict[str, float]:
    """One optimiser step on the mean over ``data``; a loss or gradient that is not finite is never applied. ``guard``,
    the run's own, hears of that, and knows how many tokens fit into memory."""
    guard = guard or Guard(max_tokens)
    data, sums = objective.ready(data, guard), Sums({})

    def backward(units: Sequence[int]) -> float:
        outcome = objective.outcome(data, units, gradient=True)
        loss = outcome.loss.sum() / len(data)
        loss.backward()  # type: ignore[no-untyped-call]
        _add(sums, outcome)
        return float(loss.detach())

    result = guard.update(
        optimizer,
        [p for group in optimizer.param_groups for p in group["params"]],
        lambda tokens: _cut(data, tokens),
        backward,
        rows=data.rows,
        max_grad_norm=max_grad_norm,
        begin=sums.values.clear,
    )
    tokens = float(sum(len(s.tokens) for s in data.rows.samples))
    return sums.means() | {"grad_norm": result.norm, "tokens": tokens, "updates_skipped": float(not result.taken)}


@torch.no_grad()
def measure(
    objective: Objective, data: Comparisons, *, max_tokens: int, guard: Guard | None = None
) -> dict[str, float]:
    """The same numbers, nothing learned."""
    guard = guard or Guard(max_tokens)
    data, sums = objective.ready(data, guard), Sums({})
    guard.in_parts(
        lambda tokens: _cut(data, tokens),
        lambda units: _add(sums, objective.outcome(data, units, gradient=False)),
        begin=sums.values.clear,
    )
    return sums.means()


def _cut(data: Comparisons, max_tokens: int) -> Iterator[list[int]]:
    return unit_batches(data.rows.samples, [data.members(u) for u in range(len(data))], max_tokens)


def unit_batches(samples: Sequence[Sample], units: Sequence[Sequence[int]], max_tokens: int) -> Iterator[list[int]]:
    """Runs of whole units (positions in ``units``) of at most ``max_tokens`` tokens; a longer unit goes alone. The
    prompt that a unit's samples share counts once."""
    batch: list[int] = []
    size = 0
    for at, members in enumerate(units):
        prompt = min(int(samples[i].loss_mask.argmax()) for i in members)
        cost = prompt + sum(len(samples[i].tokens) - prompt for i in members)
        if batch and size + cost > max_tokens:
            yield batch
            batch, size = [], 0
        batch.append(at)
        size += cost
    if batch:
        yield batch


@torch.no_grad()
def _add(sums: Sums, outcome: Outcome) -> None:
    count = float(len(outcome.gap))
    for name, values in (("loss", outcome.loss), ("margin", outcome.gap)):
        sums.add(name, float(values.sum()), count)
    sums.add("accuracy", float((outcome.gap > 0).sum()), count)
    sums.add("ties", float((outcome.gap == 0).sum()), count)
    for name, values in (("chosen_reward", outcome.chosen), ("rejected_reward", outcome.rejected)):
        sums.add(name, float(values.sum()), float(len(values)))
    for name, (total, number) in outcome.facts.items():
        sums.add(name, total, number)


# From rows to one number per reply -------------------------------------------------------------------------


@torch.no_grad()
def kto_baseline(policy: Policy, data: Comparisons, max_tokens: int, guard: Guard | None = None) -> Tensor:
    """z₀ = max(0, mean of log π/π_ref over replies under prompts that they were not written for), in nats. guard: how
    many tokens go through the model at once, in the place of ``max_tokens``."""
    assert data.mismatched is not None
    rows = data.mismatched

    def total(indices: Sequence[int]) -> Tensor:
        logprobs, _, ref = _scored(policy, rows, indices, gradient=False, reference=True)
        return (logprobs - ref).sum()

    totals = (guard or Guard(max_tokens)).in_parts(partial(_one_by_one, rows), total)
    return (torch.stack(totals).sum() / len(rows)).clamp(min=0)


@torch.no_grad()
def token_logprobs(policy: Policy, rows: Rows, *, max_tokens: int, guard: Guard | None = None) -> tuple[PerToken, ...]:
    """Per sample float32[T]: the policy's own log-probs of the trained tokens, 0 elsewhere. guard: as above."""
    out = [np.zeros(len(s.tokens), np.float32) for s in rows.samples]

    def write(indices: Sequence[int]) -> None:
        batch = _packed(rows, indices, policy.device)
        values, sequence = policy.current_logprobs(batch).cpu().numpy(), batch.sequence.cpu().numpy()
        for at, i in enumerate(batch.indices):
            out[i][rows.samples[i].loss_mask & (np.arange(len(out[i])) > 0)] = values[sequence == at]

    (guard or Guard(max_tokens)).in_parts(partial(_one_by_one, rows), write)
    return tuple(out)


def _one_by_one(rows: Rows, max_tokens: int) -> Iterator[list[int]]:
    return unit_batches(rows.samples, [(i,) for i in range(len(rows))], max_tokens)


def reply_rewards(model: RewardModel, rows: Rows, indices: Sequence[int]) -> Tensor:
    """(len(rows),): the reward at the last token of each of these samples, 0 for the others."""
    batch = _packed(Rows(tuple(_ended(s) for s in rows.samples)), indices, model.device)
    batch.dropout = model.training
    return _by_sample(batch, model(batch.tokens, batch.positions, batch.predict, batch), len(rows))


def _ended(sample: Sample) -> Sample:
    """One token more, as the only one that counts: the row that would predict it is that of the last real token."""
    n = len(sample.tokens) + 1
    return replace(
        sample,
        tokens=np.append(sample.tokens, np.int32(0)),
        loss_mask=np.arange(n) == n - 1,
        logprobs=np.zeros(n, np.float32),
        versions=np.zeros(n, np.int32),
    )


def _scored(policy: Policy, rows: Rows, indices: Sequence[int], *, gradient: bool, reference: bool) -> list[Tensor]:
    """[log π(y|x), number of tokens, log π_ref(y|x) where asked for], each (len(rows),)."""
    batch = _packed(rows, indices, policy.device)
    refs = []
    if reference:  # first, since it may be the very module with its adapter switched off
        refs = [batch.ref if batch.ref is not None else policy.reference_logprobs(batch)]
    if gradient:
        policy.train_mode(dropout=False)  # with dropout, policy and reference would differ before the first update
    logprobs = policy.logprobs(batch)[0] if gradient else policy.current_logprobs(batch)
    return [_by_sample(batch, values, len(rows)) for values in (logprobs, torch.ones_like(logprobs), *refs)]


def _packed(rows: Rows, indices: Sequence[int], device: torch.device) -> Batch:
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return pack(rows, [np.zeros(len(s.tokens)) for s in rows.samples], indices, dtype=dtype, device=device)


def _by_sample(batch: Batch, values: Tensor, count: int) -> Tensor:
    """(M,) per-token values → their sums by sample, (count,). In float64 where there is one: the log-probs of long
    replies are large and their differences small."""
    wide = values if values.device.type == "mps" else values.double()
    sample = torch.as_tensor(batch.indices, device=values.device)[batch.sequence]
    return wide.new_zeros(count).index_add(0, sample, wide)


def _some(rows: Rows, indices: Sequence[int]) -> Rows:
    ref = None if rows.ref is None else tuple(rows.ref[i] for i in indices)
    return Rows(tuple(rows.samples[i] for i in indices), ref=ref)


__all__ = [
    "Comparisons",
    "Objective",
    "PreferenceObjective",
    "RewardObjective",
    "kto_baseline",
    "measure",
    "preference_step",
    "reply_rewards",
    "token_logprobs",
    "unit_batches",
]
