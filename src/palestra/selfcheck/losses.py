# SPDX-License-Identifier: Apache-2.0
"""Known answers about the loss of tokens: surrogates, ratios, importance weights, the critic's loss."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from palestra.learn.batch import Rows, token_weights
from palestra.learn.kl import bounded_exp
from palestra.learn.loss import LOSSES, LossConfig, LossInputs, sequence_mean, value_loss
from palestra.learn.offpolicy import Importance, importance_weights
from palestra.selfcheck.given import Bools, Floats, Given, NotData, one_or_all
from palestra.selfcheck.kinds import kind, make_sample
from palestra.train.config import PRESETS


@kind("loss", "values", "old_values", "returns")
def of_critic(given: Given) -> dict[str, Any]:
    """A critic's values, those at the start of the step, and returns. → per_token_loss, loss (token mean)"""
    values, old, returns = (given.numbers(k) for k in ("values", "old_values", "returns"))
    own = np.flatnonzero(given.mask("mask", len(values)))
    clip = given.get("clip")
    one = torch.ones(1, dtype=torch.float64)
    v, v_old, r = (torch.tensor(x) for x in (values, old, returns))
    per_token = [float(value_loss(v[[i]], v_old[[i]], r[[i]], one, clip=clip).loss) for i in own]
    found = np.zeros(len(values))
    found[own] = per_token
    return {"per_token_loss": found.tolist(), "loss": float(np.mean(per_token)) if per_token else 0.0}


@kind("loss", "values", "returns")
def of_free_critic(given: Given) -> dict[str, Any]:
    """As with ``old_values``, no value held near its old one."""
    inner = Given({**given.data, "old_values": given.get("values")})
    found = of_critic(inner)
    given.seen |= inner.seen - {"clip"}
    return found


@kind("loss", "log_ratio", "level")
def of_sequence_ratio(given: Given) -> dict[str, Any]:
    """Log-ratios of one sequence under a mask. → length_normalised, sum_form"""
    log_ratio = given.numbers("log_ratio")
    mask = given.mask("mask", len(log_ratio))
    given.text("level")
    own = torch.tensor(log_ratio[mask])
    mean = sequence_mean(own, torch.zeros(len(own), dtype=torch.long))
    return {
        "length_normalised": float(mean[0].exp()) if len(own) else 1.0,
        "sum_form": _episode_ratio(log_ratio, mask, math.inf)[1]["train/sampler_ratio_mean"],
    }


@kind("loss", "sequence_weights")
def mean_weight(given: Given) -> dict[str, Any]:
    """Importance weights, one per sequence. → mean"""
    weights = given.numbers("sequence_weights")
    valid = given.mask("valid", len(weights))
    given.get("metric")
    samples = tuple(make_sample([1], episode=str(i), trained=bool(v)) for i, v in enumerate(valid))
    old = tuple(np.array([0.0, math.log(w)]) for w in weights)
    metrics = importance_weights(Rows(samples, old=old), "sequence_truncate", cap=math.inf)[1]
    return {"mean": metrics["train/sampler_ratio_mean"]}


@kind("loss", "per_token_logp_gap", "tokens")
def of_gap(given: Given) -> dict[str, Any]:
    """The same gap between trainer and sampler on every token. → token_truncate, sequence_truncate (weights),
    sequence_sum_ratio, sequence_mean_ratio, token_mask_keeps, sequence_mask_keeps"""
    tokens, cap = given.integer("tokens"), given.number("cap", 3.0)
    gaps, mask = np.full(tokens, given.number("per_token_logp_gap")), np.ones(tokens, np.bool_)
    data = Rows((make_sample(mask),), old=(np.concatenate([[0.0], gaps]),))
    first = {
        how: float(importance_weights(data, how, cap=cap)[0][0][1])
        for how in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    }
    own = torch.tensor(gaps)
    return {
        "token_truncate": first["token_truncate"],
        "sequence_truncate": first["sequence_truncate"],
        "token_mask_keeps": first["token_mask"] > 0,
        "sequence_mask_keeps": first["sequence_mask"] > 0,
        "sequence_sum_ratio": _episode_ratio(gaps, mask, cap)[1]["train/sampler_ratio_mean"],
        "sequence_mean_ratio": float(sequence_mean(own, torch.zeros(tokens, dtype=torch.long)).exp()[0]),
    }


@kind("loss", "sampler_logp", "trainer_logp")
def of_both_logps(given: Given) -> dict[str, Any]:
    """Log-probs of one episode's tokens under sampler and trainer; ``importance`` token_truncate (the default),
    token_mask, sequence_truncate, sequence_mask or none, ``cap``, ``floor``. → weights (0 where the mask is),
    ratio_min, ratio_mean, ratio_max, ratio_cut"""
    sampler, trainer = given.numbers("sampler_logp"), given.numbers("trainer_logp")
    mask = given.mask("mask", len(sampler))
    importance = given.text("importance", "token_truncate")
    if importance not in get_args(Importance):
        raise NotData(f"no importance weight is called {importance!r}")
    data = Rows((make_sample(mask, logprobs=sampler),), old=(np.concatenate([[0.0], trainer]),))
    bounds = {"cap": given.number("cap", 3.0), "floor": given.number("floor", 0.0)}
    weights, metrics = importance_weights(data, importance, **bounds)  # type: ignore[arg-type]
    ratios = {name.removeprefix("train/sampler_"): value for name, value in metrics.items()}
    return {"weights": one_or_all(weights[0][1:], given.is_list("sampler_logp")), **ratios}


@kind("loss", "masked_logp", "mask")
def of_masked(given: Given) -> dict[str, Any]:
    """Log-probs (new, old) of one token that the mask leaves out. → contribution, ratio_used_anywhere"""
    logps = given.get("masked_logp")
    if not isinstance(logps, dict):
        raise NotData("masked_logp is not a mapping of new and old")
    mask = np.array([given.integer("mask"), 1])  # beside a token that counts and has not moved
    new = torch.tensor([float(logps["new"]), 0.0], dtype=torch.float64)
    old = torch.tensor([float(logps["old"]), 0.0], dtype=torch.float64)
    found = _per_token(new, old, np.ones(2), mask.astype(np.bool_), "clip", LossConfig(), np.zeros(2, np.int64))
    return {"contribution": abs(float(found["loss"][0])), "ratio_used_anywhere": bool(found["gradient"][0])}


@kind("loss", "ratio", "mask_lengths")
def of_rows(given: Given) -> dict[str, Any]:
    """One ratio and one advantage for each sequence, and how many tokens each has. → loss_value, grad_norm"""
    lengths = given.numbers("mask_lengths").astype(int)
    ratio, advantages = given.numbers("ratio"), given.numbers("advantages")
    samples = [make_sample(np.ones(n), episode=str(i)) for i, n in enumerate(lengths)]
    weights = np.concatenate([w[1:] for w in token_weights(samples, reduction_of(given), divisor=divisor_of(given))])
    new = torch.tensor(np.repeat(np.log(ratio), lengths)).requires_grad_()
    sequence = torch.tensor(np.repeat(np.arange(len(lengths)), lengths))
    inputs = LossInputs(
        new, torch.zeros_like(new), torch.tensor(np.repeat(advantages, lengths)), torch.tensor(weights), sequence
    )
    loss = LOSSES[loss_name(given)](inputs, loss_config(given)).loss
    (gradient,) = torch.autograd.grad(loss, new)
    return {"loss_value": loss.item(), "grad_norm": float(gradient.norm())}


@kind("loss", "ratio")
def of_tokens(given: Given) -> dict[str, Any]:
    """A ratio per token, as numbers, a list, or rows that are sequences; advantages (``advantage``, or only their
    ``advantage_sign``). → per_token_loss, without_dual_clip, gradient (with respect to log π), loss (token mean),
    clip_fraction and value (the same)"""
    return _surrogate(given, "ratio", np.log)


@kind("loss", "log_ratio")
def of_log_ratios(given: Given) -> dict[str, Any]:
    """As ``ratio``, with log π − log π_old in its place; what is computed also holds ratio."""
    rows = given.get("log_ratio")
    flat = (
        np.concatenate(rows) if given.is_list("log_ratio") and isinstance(rows[0], list) else given.numbers("log_ratio")
    )
    ratio = one_or_all(bounded_exp(torch.tensor(flat)), given.is_list("log_ratio"))
    return _surrogate(given, "log_ratio", lambda x: x) | {"ratio": ratio}


@kind("loss", "logprobs", "old_logprobs")
def of_logprobs(given: Given) -> dict[str, Any]:
    """As ``ratio``, from the log-probs of both policies."""
    new, old = given.numbers("logprobs"), given.numbers("old_logprobs")
    return _surrogate(given, "logprobs", lambda _: new - old, shift=new)


def _surrogate(given: Given, key: str, to_log: Any, shift: Floats | None = None) -> dict[str, Any]:
    rows = given.table(key) if given.is_list(key) and any(isinstance(r, list) for r in given.get(key)) else None
    flat = np.concatenate(rows) if rows is not None else given.numbers(key)
    log_ratio = to_log(flat)
    if rows is not None:
        mask = np.concatenate(given.table("mask")).astype(np.bool_) if "mask" in given else np.ones(len(flat), np.bool_)
        sequence = np.repeat(np.arange(len(rows)), [len(r) for r in rows])
    else:
        mask = given.mask("mask", len(flat))
        named = given.get("sequence")
        sequence = np.array(named) if named is not None else np.zeros(len(flat), np.int64)
    advantages = _advantages(given, len(flat), [len(r) for r in rows] if rows is not None else None)
    new = torch.tensor(log_ratio if shift is None else shift)
    old = torch.zeros_like(new) if shift is None else torch.tensor(shift - log_ratio)
    name, config = loss_name(given), loss_config(given)
    found = _per_token(new, old, advantages, mask, name, config, sequence)
    unbound = _per_token(new, old, advantages, mask, name, config.model_copy(update={"dual_clip": None}), sequence)
    given.get("metric")
    listed = given.is_list(key)
    return {
        "per_token_loss": one_or_all(found["loss"], listed),
        "without_dual_clip": one_or_all(unbound["loss"], listed),
        "gradient": one_or_all(found["gradient"], listed),
        "loss": float(found["loss"].sum() / max(1, mask.sum())),
        "clip_fraction": found["clip_fraction"],
        "value": found["clip_fraction"],
    }


def _per_token(
    new: Tensor, old: Tensor, advantages: Floats, mask: Bools, name: str, config: LossConfig, sequence: Any
) -> dict[str, Any]:
    """Each token's own share of the loss (a weight of 1 on it, 0 on the others), and the gradient of their sum. What
    the mask leaves out is never handed over."""
    own = np.flatnonzero(mask)
    at = torch.tensor(np.unique(np.asarray(sequence)[own], return_inverse=True)[1])
    a = torch.tensor(advantages[own])
    losses, gradient = np.zeros(len(new)), np.zeros(len(new))
    if not len(own):
        return {"loss": losses, "gradient": gradient, "clip_fraction": 0.0}
    for i, token in enumerate(own):
        weights = torch.zeros(len(own), dtype=torch.float64)
        weights[i] = 1.0
        losses[token] = float(LOSSES[name](LossInputs(new[own], old[own], a, weights, at), config).loss)
    leaf = new[own].clone().requires_grad_()
    out = LOSSES[name](LossInputs(leaf, old[own], a, torch.ones(len(own), dtype=torch.float64), at), config)
    (slope,) = torch.autograd.grad(out.loss, leaf)
    gradient[own] = slope.numpy()
    clipped, count = out.metrics.get("train/clip_fraction", (0.0, 1.0))
    return {"loss": losses, "gradient": gradient, "clip_fraction": clipped / count}


def _advantages(given: Given, size: int, lengths: list[int] | None) -> Floats:
    key = next((k for k in ("advantage", "advantages", "advantage_sign") if k in given), None)
    if key is None:
        return np.ones(size)
    if given.is_list(key) and any(isinstance(r, list) for r in given.get(key)):
        return np.concatenate(given.table(key))
    values = given.numbers(key)
    if lengths is not None and len(values) == len(lengths):
        return np.repeat(values, lengths)
    return np.broadcast_to(values, size).copy()


def loss_name(given: Given) -> str:
    """The registered loss: ``loss`` by its name or a preset's, ``clip`` where none is given."""
    named = str(given.get("loss", "clip"))
    return named if named in LOSSES else str(PRESETS.get(named, {}).get("loss", named))


def loss_config(given: Given) -> LossConfig:
    """eps for both bounds, or eps_low and eps_high (also clip_low and clip_high), and dual_clip."""
    eps = given.number("eps", 0.2)
    low = given.number("eps_low", given.number("clip_low", eps))
    high = given.number("eps_high", given.number("clip_high", eps))
    return LossConfig(clip_low=low, clip_high=high, dual_clip=given.get("dual_clip"))


def reduction_of(given: Given, default: str = "token_mean") -> Any:
    """``token_mean``, ``sequence_mean`` or ``constant``, under the names that cases use."""
    named = given.text("reduction", default)
    names = {"constant_divisor": "constant", "mean over rollouts of token mean": "sequence_mean"}
    reduction = names.get(named, named)
    if reduction not in ("token_mean", "sequence_mean", "constant"):
        raise NotData(f"no reduction is called {named!r}")
    return reduction


def divisor_of(given: Given) -> float | None:
    """The divisor of ``constant``."""
    key = next((k for k in ("divisor", "constant", "constant_divisor") if k in given), None)
    return None if key is None else given.number(key)


def _episode_ratio(gaps: Floats, mask: Bools, cap: float) -> tuple[Any, dict[str, float]]:
    data = Rows((make_sample(mask),), old=(np.concatenate([[0.0], gaps]),))
    return importance_weights(data, "sequence_truncate", cap=cap)
