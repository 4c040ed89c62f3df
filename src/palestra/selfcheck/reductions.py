# SPDX-License-Identifier: Apache-2.0
"""Known answers about means: which tokens divide, and that no cut of a batch changes a gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from palestra.learn.batch import Rows, Sample, pack, token_weights
from palestra.learn.loss import LossConfig, LossInputs, clip, cross_entropy
from palestra.learn.update import trained_indices
from palestra.selfcheck.given import Given, NotData
from palestra.selfcheck.kinds import kind, make_sample
from palestra.selfcheck.losses import divisor_of, reduction_of


@kind("loss", "mask", "per_token_loss")
def of_table(given: Given) -> dict[str, Any]:
    """A loss per token under a mask, rows = sequences. → token_mean, sequence_mean, constant and constant_divisor
    (with ``divisor``, or ``max_length`` per row), loss (of ``reduction``), grad (its norm), optimizer_step"""
    values, masks = given.table("per_token_loss"), given.table("mask")
    episodes = given.get("episodes") or [str(i) for i in range(len(masks))]
    samples = [make_sample(m, episode=str(e)) for m, e in zip(masks, episodes, strict=True)]
    divisor = divisor_of(given)
    if divisor is None and "max_length" in given:
        divisor = given.number("max_length") * len({s.episode for s in samples})
    found: dict[str, Any] = {}
    for name in ("token_mean", "sequence_mean", "constant"):
        if name == "constant" and not divisor:
            continue
        weights = token_weights(samples, name, divisor=divisor)
        found[name] = float(sum(w[1:] @ v for w, v in zip(weights, values, strict=True)))
    if "constant" in found:
        found["constant_divisor"] = found["constant"]
    reduction = reduction_of(given)
    if reduction not in found:
        raise NotData("reduction constant needs a divisor")
    slopes = np.concatenate(token_weights(samples, reduction, divisor=divisor))
    idle = not trained_indices(Rows(tuple(samples)))
    found |= {"loss": found[reduction], "grad": float(np.linalg.norm(slopes))}
    return found | {"optimizer_step": "skipped" if idle else "taken"}


@kind("loss", "tokens_total", "tokens_in_truncated")
def of_truncated(given: Given) -> dict[str, Any]:
    """Every token has the same loss; those of truncated episodes are dropped (``drop_truncated``). → loss"""
    total, cut = given.integer("tokens_total"), given.integer("tokens_in_truncated")
    dropped = given.flag("drop_truncated", True)
    samples = [
        make_sample(np.ones(total - cut), episode="whole"),
        make_sample(np.ones(cut), episode="cut", trained=not dropped),
    ]
    weights = token_weights(samples, reduction_of(given), divisor=divisor_of(given))
    each = given.number("per_token_loss", 1.0)
    return {"loss": float(sum(each * w.sum() for w, s in zip(weights, samples, strict=True) if s.trained))}


@kind("loss", "per_token_loss")
def of_ragged_table(given: Given) -> dict[str, Any]:
    """As with ``mask``, rows that hold what the model wrote and nothing else."""
    rows = given.table("per_token_loss")
    whole = Given({**given.data, "mask": [[1] * len(row) for row in rows]})
    found = of_table(whole)
    given.seen |= whole.seen
    return found


@kind("loss", "logprobs", "labels")
def of_supervised(given: Given) -> dict[str, Any]:
    """Supervised learning: log-probs of the labels, a list or rows; where a label is -100 nothing trains. → loss (of
    ``reduction``), token_mean, sequence_mean, num_trained_tokens"""
    given.get("loss")
    alone = not any(isinstance(r, list) for r in given.get("logprobs"))
    rows, labels = ([given.numbers(k)] if alone else given.table(k) for k in ("logprobs", "labels"))
    samples = [make_sample(label != -100, episode=str(i)) for i, label in enumerate(labels)]
    found: dict[str, Any] = {}
    for name in ("token_mean", "sequence_mean"):
        weights = token_weights(samples, name)
        pairs = ((torch.tensor(r), torch.tensor(w[1:])) for r, w in zip(rows, weights, strict=True))
        found[name] = float(sum(cross_entropy(r[w > 0], w[w > 0]) for r, w in pairs))
    if (reduction := reduction_of(given)) not in found:
        raise NotData(f"supervised learning has no reduction {reduction}")
    return found | {"loss": found[reduction], "num_trained_tokens": sum(s.trained_tokens for s in samples)}


@kind("loss", "ranks")
def of_ranks(given: Given) -> dict[str, Any]:
    """Summed losses and token counts of each rank, whose gradients are averaged. → effective_loss, local_losses,
    local_divisor (tokens)"""
    parts = _parts(given, "ranks")
    given.get("gradient_sync")
    samples = [make_sample(np.ones(n), episode=str(i)) for i, (_, n) in enumerate(parts)]
    weights = token_weights(samples, reduction_of(given), divisor=divisor_of(given))
    # Averaging over ranks divides by their number, so each rank's loss is its share of the global one times that.
    shares = [w[1:].mean() * total if n else 0.0 for w, (total, n) in zip(weights, parts, strict=True)]
    return {
        "effective_loss": float(sum(shares)),
        "local_losses": [float(s * len(parts)) for s in shares],
        "local_divisor": sum(n for _, n in parts) / len(parts),
        "local_divisor_formula": bool(
            np.allclose(
                [s * len(parts) for s in shares], [t / (sum(n for _, n in parts) / len(parts)) for t, _ in parts]
            )
        ),
    }


@kind("loss", "micro_batches")
def of_micro_batches(given: Given) -> dict[str, Any]:
    """Summed losses and token counts of micro-batches, whose gradients are added up before one step. → loss,
    effective_loss (the same), local_losses (what each adds)"""
    parts = _parts(given, "micro_batches")
    samples = [make_sample(np.ones(n), episode=str(i)) for i, (_, n) in enumerate(parts)]
    weights = token_weights(samples, reduction_of(given), divisor=divisor_of(given))
    shares = [float(w[1:].mean() * total) if n else 0.0 for w, (total, n) in zip(weights, parts, strict=True)]
    return {"loss": sum(shares), "effective_loss": sum(shares), "local_losses": shares}


@kind("loss", "rollout_split_into_samples")
def of_split_rollout(given: Given) -> dict[str, Any]:
    """Rows with a summed loss and a token count: those of one rollout, and ``other_rollouts`` of a row each. → loss"""
    own, others = _parts(given, "rollout_split_into_samples"), _parts(given, "other_rollouts")
    samples = [make_sample(np.ones(n), episode="split") for _, n in own]
    samples += [make_sample(np.ones(n), episode=str(i)) for i, (_, n) in enumerate(others)]
    weights = token_weights(samples, reduction_of(given, "sequence_mean"), divisor=divisor_of(given))
    sums = [total for total, _ in (*own, *others)]
    return {"loss": float(sum(w[1:].mean() * total for w, total in zip(weights, sums, strict=True)))}


@kind("loss", "same_8_samples_split_as")
def of_splits(given: Given) -> dict[str, Any]:
    """Ways to cut eight samples into micro-batches (``2x4`` = two of four). → property: the gradient of a clipped
    surrogate is the same for each, under each of ``reductions``"""
    ways = given.get("same_8_samples_split_as")
    if not isinstance(ways, list):
        raise NotData("same_8_samples_split_as is not a list")
    cuts = [tuple(int(n) for n in str(way).split("x")) for way in ways]
    samples, table, advantages = _eight()
    worst = 0.0
    for named in given.get("reductions", ["sequence_mean", "token_mean", "constant_divisor"]):
        reduction = reduction_of(Given({"reduction": named}))
        weights = token_weights(samples, reduction, divisor=64.0)
        data = Rows(samples, advantages=advantages, old=tuple(s.logprobs for s in samples))
        found = []
        for count, size in cuts:
            leaf = table.clone().requires_grad_()
            for start in range(0, count * size, size):
                batch = pack(data, weights, range(start, start + size), dtype=torch.float64)
                assert batch.old is not None and batch.advantages is not None
                new = leaf[batch.targets].log_softmax(-1)[:, 0]
                inputs = LossInputs(new, batch.old, batch.advantages, batch.weights, batch.sequence)
                clip(inputs, LossConfig()).loss.backward()  # type: ignore[no-untyped-call]
            found.append(leaf.grad)
        worst = max(
            [worst, *(float((g - found[0]).abs().max()) for g in found if g is not None and found[0] is not None)]
        )
    return {"property": worst <= 1e-9, "worst_difference": worst}


def _eight() -> tuple[tuple[Sample, ...], torch.Tensor, tuple[Any, ...]]:
    """Eight samples of unequal length, a table of logits that stands for the model, and advantages."""
    rng = np.random.default_rng(0)
    made, advantages = [], []
    for i, length in enumerate((3, 5, 2, 7, 4, 6, 1, 8)):
        mask = np.concatenate([[1], rng.integers(0, 2, length)])
        made.append(make_sample(mask, episode=str(i), logprobs=rng.normal(-1, 0.3, length + 1)))
        advantages.append(np.full(length + 2, rng.normal()))
    return tuple(made), torch.tensor(rng.normal(size=(16, 3))), tuple(advantages)


def _parts(given: Given, key: str) -> list[tuple[float, int]]:
    listed = given.get(key, [])
    if not isinstance(listed, list) or not all(isinstance(p, dict) for p in listed):
        raise NotData(f"{key} is not a list of {{sum_loss, tokens}}")
    return [(float(p["sum_loss"]), int(p["tokens"])) for p in listed]
