# SPDX-License-Identifier: Apache-2.0
"""Known answers about preferences and reward models."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.learn.preference import PREFERENCE_LOSSES, LabelScores, PairScores, pairwise
from palestra.selfcheck.given import Given, NotData
from palestra.selfcheck.kinds import kind


@kind("loss", "batch_pairs")
def of_reward_model(given: Given) -> dict[str, Any]:
    """Pairs of rewards (chosen, rejected); ``center``. → mean_loss, accuracy (strict), ties, margin (mean), loss (the
    same as mean_loss)"""
    given.get("loss")
    pairs = np.stack(given.table("batch_pairs"))
    return _pairwise(torch.tensor(pairs[:, 0]), torch.tensor(pairs[:, 1]), given.number("center", 0.0))


@kind("loss", "chosen", "rejected")
def of_rewards(given: Given) -> dict[str, Any]:
    """As ``batch_pairs``, the rewards of both sides as a number or a list each."""
    if given.text("loss", "reward_model") != "reward_model":
        raise NotData("chosen and rejected stand alone for a reward model only; others need policy")
    chosen, rejected = (torch.tensor(given.numbers(side)) for side in ("chosen", "rejected"))
    return _pairwise(chosen, rejected, given.number("center", 0.0))


@kind("loss", "chosen_reward", "rejected_reward")
def of_named_rewards(given: Given) -> dict[str, Any]:
    """As ``chosen`` and ``rejected``."""
    given.get("loss")
    chosen, rejected = (torch.tensor(given.numbers(f"{side}_reward")) for side in ("chosen", "rejected"))
    return _pairwise(chosen, rejected, given.number("center", 0.0))


def _pairwise(chosen: Tensor, rejected: Tensor, center: float) -> dict[str, Any]:
    out = pairwise(chosen, rejected, center)
    return {
        "mean_loss": float(out.loss.mean()),
        "loss": float(out.loss.mean()),
        "accuracy": float((out.gap > 0).double().mean()),
        "ties": int((out.gap == 0).sum()),
        "margin": float(out.gap.mean()),
    }


@kind("loss", "loss", "policy")
def of_pair(given: Given) -> dict[str, Any]:
    """Log-probs of a chosen and a rejected reply (each summed, or a list over its tokens) under policy and reference;
    for kto ``policy``, ``reference`` and ``desirable`` of labelled replies. → loss, margin, chosen_reward,
    rejected_reward, accuracy"""
    name = given.text("loss")
    loss = PREFERENCE_LOSSES["simpo" if name == "cpo_simpo" else name]
    config = loss.config(**{k: given.get(k) for k in loss.config.model_fields if k in given})
    if not loss.paired:
        return _labelled(given, loss.function, config)
    policy, reference = _sides(given, "policy"), _sides(given, "reference") if loss.reference else None
    counts = [_tokens(given, side) for side in ("chosen", "rejected")]
    scores = PairScores(*policy, *counts, *(reference or ()))
    out = loss.function(scores, config)
    return {
        "loss": float(out.loss.mean()),
        "margin": float(out.gap.mean()),
        "chosen_reward": float(out.chosen.mean()),
        "rejected_reward": float(out.rejected.mean()),
        "accuracy": float((out.gap > 0).double().mean()),
    }


@kind("loss", "loss", "chosen_logps", "rejected_logps")
def of_flat_pair(given: Given) -> dict[str, Any]:
    """As ``loss`` and ``policy``, the sides under names of their own, with ref_chosen_logps and ref_rejected_logps."""
    sides = {side: given.get(f"{side}_logps") for side in ("chosen", "rejected")}
    nested = {**given.data, "policy": sides}
    if "ref_chosen_logps" in given:
        nested["reference"] = {side: given.get(f"ref_{side}_logps") for side in ("chosen", "rejected")}
    inner = Given(nested)
    found = of_pair(inner)
    given.seen |= inner.seen
    return found


def _labelled(given: Given, function: Any, config: Any) -> dict[str, Any]:
    label = torch.tensor(given.numbers("desirable").astype(np.bool_))
    policy, ref = torch.tensor(given.numbers("policy")), torch.tensor(given.numbers("reference"))
    baseline = torch.tensor(given.number("baseline", 0.0), dtype=torch.float64)
    out = function(LabelScores(policy, ref, label, baseline), config)
    return {"loss": float(out.loss.mean()), "per_reply_loss": out.loss.tolist()}


def _sides(given: Given, key: str) -> tuple[Tensor, Tensor]:
    value = given.get(key)
    if not isinstance(value, dict):
        raise NotData(f"{key} is no mapping of chosen and rejected to log-probs")
    return tuple(  # type: ignore[return-value]
        torch.tensor([float(np.sum(Given(value).numbers(side)))], dtype=torch.float64)
        for side in ("chosen", "rejected")
    )


def _tokens(given: Given, side: str) -> Tensor:
    """How many tokens a side has: as given, or as many as its list of log-probs."""
    listed = given.get("policy")[side]
    named = next((k for k in (f"{side}_tokens", f"{side}_len", f"{side}_length") if k in given), f"{side}_tokens")
    count = given.number(named, float(len(listed) if isinstance(listed, list) else 1))
    return torch.tensor([count], dtype=torch.float64)
