# SPDX-License-Identifier: Apache-2.0
"""Known answers about evaluation: pass@k, means over examples, intervals."""

from __future__ import annotations

from typing import Any

from palestra.eval.metrics import mean, normal_interval, pass_at_k, pass_hat_k, sign_test, std_error, wilson_interval
from palestra.selfcheck.given import Given, NotData
from palestra.selfcheck.kinds import kind
from palestra.types import RewardTerm, StopReason, Trajectory

PASS = {"pass@k": pass_at_k, "pass^k": pass_hat_k}


@kind("eval", "n", "c", "k")
def of_pass(given: Given) -> dict[str, Any]:
    """n samples of which c are right, and k; ``metric`` pass@k or pass^k. → value (null when k > n)"""
    metric = given.text("metric", "pass@k")
    if metric not in PASS:
        raise NotData(f"no metric of n, c and k is called {metric!r}")
    return {"value": PASS[metric](*(given.integer(key) for key in ("n", "c", "k")))}


@kind("eval", "batches")
def of_batches(given: Given) -> dict[str, Any]:
    """Batches as {n, mean}. → mean (over examples)"""
    batches = given.get("batches")
    if not isinstance(batches, list) or not all(isinstance(b, dict) for b in batches):
        raise NotData("batches is not a list of {n, mean}")
    return {"mean": mean([float(b["mean"]) for b in batches for _ in range(int(b["n"]))])}


@kind("eval", "n", "accuracy")
def of_accuracy(given: Given) -> dict[str, Any]:
    """Examples and the share that is right. → std_error, ci95 (normal), wilson95"""
    n, accuracy = given.integer("n"), given.number("accuracy")
    right = round(n * accuracy)
    values = [1.0] * right + [0.0] * (n - right)
    return {
        "std_error": std_error(values),
        "ci95": list(normal_interval(values) or ()),
        "wilson95": list(wilson_interval(right, n) or ()),
    }


@kind("eval", "scores")
def of_scores(given: Given) -> dict[str, Any]:
    """A score per example; null = not scored. → mean, n, std_error"""
    scores = [float(s) for s in given.get("scores") if s is not None]
    return {"mean": mean(scores), "n": len(scores), "std_error": std_error(scores)}


@kind("eval", "better", "worse")
def of_comparison(given: Given) -> dict[str, Any]:
    """How many examples became better and worse. → p_value (exact, two-sided)"""
    return {"p_value": sign_test(given.integer("better"), given.integer("worse"))}


@kind("eval", "reward_parts")
def of_parts(given: Given) -> dict[str, Any]:
    """Parts of one reward, each with weight 1. → total, parts, logged (the series by themselves, as texts)"""
    parts = given.get("reward_parts")
    if not isinstance(parts, dict):
        raise NotData("reward_parts is not a mapping of names to numbers")
    terms = {name: RewardTerm(float(value)) for name, value in parts.items()}
    total = Trajectory((), StopReason.ENV_TERMINATED, rewards=terms).reward
    assert total is not None
    series = {"reward total": total} | {name: float(value) for name, value in parts.items()}
    logged = frozenset(f"{name} {value:.12g}" if value % 1 else f"{name} {value}" for name, value in series.items())
    return {"total": total, "parts": {name: t.value for name, t in terms.items()}, "logged": logged}
