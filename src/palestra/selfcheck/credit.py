# SPDX-License-Identifier: Apache-2.0
"""Known answers about returns, generalised advantages and the divergence from a reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from palestra.learn.advantage import whiten
from palestra.learn.batch import token_weights
from palestra.learn.gae import bootstrap_value, gae, returns_to_go
from palestra.learn.kl import KL_ESTIMATORS, importance_corrected
from palestra.learn.klcontrol import KLControlConfig, KLController
from palestra.learn.shaping import token_rewards
from palestra.selfcheck.given import Bools, Floats, Given, NotData, nested, one_or_all
from palestra.selfcheck.kinds import kind, make_sample


@kind("gae", "rows")
def packed(given: Given) -> dict[str, Any]:
    """Several episodes: each of ``rows`` is an input of its own. → advantages, returns (one list per row)"""
    rows = given.get("rows")
    if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
        raise NotData("rows is not a list of objects")
    given.get("packed")
    shared = {k: v for k, v in given.data.items() if k not in ("rows", "packed")}
    found = [generalised(Given({**shared, **row})) for row in rows]
    given.seen |= set(shared)
    return {name: [f[name] for f in found] for name in ("advantages", "returns")}


@kind("gae", "kl")
def kl_in_reward(given: Given) -> dict[str, Any]:
    """A score for the episode and a KL penalty per token. → token_rewards, returns"""
    kl = given.numbers("kl")
    mask = given.mask("mask", len(kl))
    given.get("estimator")
    paid = token_rewards(mask, _last(mask), [_score(given)][: len(_last(mask))], given.number("beta", 1.0) * kl)
    found: dict[str, Any] = {"token_rewards": paid, "returns": returns_to_go(paid, mask, gamma=_gamma(given))}
    if "values" in given:
        advantages, returns = gae(
            paid, given.numbers("values"), mask, gamma=_gamma(given), lam=given.number("lam", 0.95)
        )
        found |= {"advantages": advantages, "returns": returns}
    return {k: nested(v) for k, v in found.items()}


@kind("gae", "values", "rewards")
def listed(given: Given) -> dict[str, Any]:
    """Rewards per token and values; as lists of lists several episodes, with a mask and a next_value for each. →
    advantages, returns, token_rewards"""
    if not any(isinstance(r, list) for r in given.get("rewards") or []):
        return generalised(given)
    names = ("rewards", "values", "mask", "next_value", "terminal", "terminated", "truncated")
    by_row = [k for k in names if given.is_list(k)]
    count = len(given.get("rewards"))
    rows = [{k: given.get(k)[i] for k in by_row} for i in range(count)]
    return packed(Given({**{k: given.get(k) for k in given.data if k not in by_row}, "rows": rows}))


@kind("gae", "values")
def generalised(given: Given) -> dict[str, Any]:
    """Rewards per token (or one score) and values. → advantages, returns, reward_index, token_rewards"""
    rewards, mask, index = _paid(given)
    values = given.numbers("values")
    following = given.number("next_value", given.number("bootstrap_value", 0.0))
    if len(values) == len(rewards) + 1:  # the last one is the value after the last token
        values, following = values[:-1], float(values[-1])
    bootstrap = _bootstrap(given, following)
    advantages, returns = gae(
        rewards, values, mask, gamma=_gamma(given), lam=given.number("lam", 0.95), bootstrap=bootstrap
    )
    if given.flag("whiten"):
        advantages = np.asarray(whiten([advantages], [mask])[0], np.float64)
    found = {"advantages": advantages, "returns": returns, "token_rewards": rewards, "reward_index": index}
    if given.number("lam", 0.95) == 1 and not given.flag("whiten"):
        to_go = returns_to_go(rewards, mask, gamma=_gamma(given))
        found["property"] = bool(np.allclose(advantages, np.where(mask, to_go - values, 0))) or bootstrap != 0
    return {k: nested(v) for k, v in found.items()}


@kind("gae", "turn_rewards")
def by_turns(given: Given) -> dict[str, Any]:
    """What each turn earned; with ``turn_values`` GAE over turns. → returns, advantages"""
    rewards = given.numbers("turn_rewards")
    if "turn_values" not in given:
        return {"returns": returns_to_go(rewards, gamma=_gamma(given)).tolist()}
    bootstrap = _bootstrap(given, given.number("next_value", 0.0))
    advantages, returns = gae(
        rewards, given.numbers("turn_values"), gamma=_gamma(given), lam=given.number("lam", 0.95), bootstrap=bootstrap
    )
    return {"advantages": advantages.tolist(), "returns": returns.tolist()}


@kind("gae", "rewards")
def to_go(given: Given) -> dict[str, Any]:
    """Rewards per token or per turn, without values. → returns, token_rewards"""
    given.get("estimator")
    rewards, mask, index = _paid(given)
    returns = returns_to_go(rewards, mask, gamma=_gamma(given))
    return {"returns": returns.tolist(), "token_rewards": rewards.tolist(), "reward_index": index}


def _paid(given: Given) -> tuple[Floats, Bools, int | None]:
    """Rewards per token, which tokens are the model's, and where a single score went."""
    if "rewards" in given:
        rewards = given.numbers("rewards")
        return rewards, given.mask("mask", len(rewards)), None
    size = len(given.numbers("values")) if "mask" not in given else len(given.numbers("mask"))
    mask = given.mask("mask", size)
    given.get("tokens")
    ends = _last(mask)
    paid = np.asarray(token_rewards(mask, ends, [_score(given)][: len(ends)]), np.float64)
    return paid, mask, ends[0] if ends else None


def _score(given: Given) -> float:
    return given.number("scalar_reward") if "scalar_reward" in given else given.number("score")


def _last(mask: Bools) -> list[int]:
    own = np.flatnonzero(mask)
    return [int(own[-1])] if len(own) else []


def _gamma(given: Given) -> float:
    return given.number("gamma", 1.0)


def _bootstrap(given: Given, following: float) -> float:
    limits = [k for k in ("truncated", "hit_limit", "hit_limit_same_step") if k in given]
    ended = [k for k in ("terminal", "terminated") if k in given]
    truncated = any(given.flag(k) for k in limits)
    # One that is not said to have ended, and has a value to go on with, was cut.
    terminated = any(given.flag(k) for k in ended) if ended else not (truncated or following)
    return bootstrap_value(following, terminated=terminated, truncated=truncated or not terminated)


@kind("kl", "policy", "reference")
def of_distributions(given: Given) -> dict[str, Any]:
    """Two whole distributions (probabilities); gradients are with respect to the policy's first logit. → kl,
    expected_k1…, true_grad, grad_k1… (of the estimate as a loss, in expectation over the policy)"""
    p, q = given.numbers("policy"), given.numbers("reference")
    given.get("parameter"), given.get("sampling")
    said = p > 0  # what the policy never says has no part, and a logit of -inf no gradient
    logits = torch.tensor(p[said]).log().requires_grad_()
    ref = torch.tensor(q[said]).log()
    logp = logits.log_softmax(-1)
    probs = logp.exp()
    exact = (probs * (logp - ref)).sum()
    first = bool(said[0])
    found = {"kl": exact.item(), "true_grad": first * _slope(exact, logits)}
    for name in KL_ESTIMATORS:
        expected = (probs.detach() * KL_ESTIMATORS[name](logp, ref)).sum()
        found |= {f"expected_{name}": expected.item(), f"grad_{name}": first * _slope(expected, logits)}
    return found


def _slope(value: torch.Tensor, logits: torch.Tensor) -> float:
    return float(torch.autograd.grad(value, logits, retain_graph=True)[0][0])


@kind("kl", "policy_logp", "ref_logp")
def of_tokens(given: Given) -> dict[str, Any]:
    """Log-probs of sampled tokens. → k1, k2, k3, each with _non_negative and _mean, treated_as_masked, value (of
    ``estimator``, ``form`` or k3; with ratio_to_behaviour importance-corrected)"""
    policy, ref = torch.tensor(given.numbers("policy_logp")), torch.tensor(given.numbers("ref_logp"))
    mask = torch.tensor(given.mask("mask", len(policy)))
    listed = given.is_list("policy_logp")
    found: dict[str, Any] = {}
    for name in KL_ESTIMATORS:
        values = torch.where(mask, KL_ESTIMATORS[name](policy, ref), 0.0)
        found |= {name: one_or_all(values, listed), f"{name}_non_negative": bool((values >= 0).all())}
        found[f"{name}_mean"] = float(values.sum() / mask.sum()) if mask.any() else 0.0
    banned = ref == -torch.inf
    found["treated_as_masked"] = bool(banned.any()) and not any(
        KL_ESTIMATORS[n](policy, ref)[banned].any() for n in KL_ESTIMATORS
    )
    asked = str(given.get("estimator") or given.get("form") or "k3")
    name = next((n for n in KL_ESTIMATORS if n in asked.split()), "k3")
    value = KL_ESTIMATORS[name](policy, ref)
    if "ratio_to_behaviour" in given:
        value = importance_corrected(value, torch.tensor(given.numbers("ratio_to_behaviour")).log())
    return found | {"value": one_or_all(torch.where(mask, value, 0.0), listed)}


@kind("kl", "kl_tokens", "mask")
def of_sequences(given: Given) -> dict[str, Any]:
    """Estimates per token under a mask. → sequence (mean of each), mean (of the sequences that have tokens),
    token_mean"""
    values, masks = given.table("kl_tokens"), given.table("mask")
    given.get("reduce")
    samples = [make_sample(m, episode=str(i)) for i, m in enumerate(masks)]

    def total(weights: Any) -> list[float]:
        return [float(w[1:] @ v) for w, v in zip(weights, values, strict=True)]

    return {
        "sequence": [
            float(token_weights([s], "sequence_mean")[0][1:] @ v) for s, v in zip(samples, values, strict=True)
        ],
        "mean": sum(total(token_weights(samples, "sequence_mean"))),
        "token_mean": sum(total(token_weights(samples, "token_mean"))),
    }


@kind("kl", "coef", "measured")
@kind("kl", "beta", "kl", "target")
def of_controller(given: Given) -> dict[str, Any]:
    """A KL coefficient that follows measured KLs (a number or a list); options of ``algorithm.kl_control``. → coef and
    beta (after the last), coefs (after each)"""
    options = {k: given.get(k) for k in KLControlConfig.model_fields if k in given}
    control = KLController(KLControlConfig(**options), given.number("coef" if "coef" in given else "beta"))
    coefs = [control.update(float(kl)) for kl in given.numbers("measured" if "measured" in given else "kl")]
    return {"coef": coefs[-1], "beta": coefs[-1], "coefs": coefs}
