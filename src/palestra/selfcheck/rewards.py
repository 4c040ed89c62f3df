# SPDX-License-Identifier: Apache-2.0
"""Known answers about answers and rewards: what is read from a text, and what it is worth."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from palestra.learn.advantage import AdvantageConfig, group_mean
from palestra.learn.batch import Rows
from palestra.learn.shaping import token_rewards
from palestra.reward.answers import extract_answer, is_correct, normalise
from palestra.reward.base import FACTORIES, REWARDS
from palestra.reward.functions import overlong_penalty
from palestra.reward.rubric import checked, mean_scored
from palestra.selfcheck.given import Given, NotData, to_float
from palestra.selfcheck.kinds import kind, make_sample

FORMATS = {"think_answer": "format", "boxed": "boxed_format"}


@kind("answer_extraction", "completion")
def of_completion(given: Given) -> dict[str, Any]:
    """A completion, with ``ground_truth``, ``mode`` (numeric, boxed, math), rel_tol, timeout_s. → value (null = none),
    correct, wall_s, worker_usable_after"""
    text, mode = given.text("completion"), given.text("mode", "numeric")
    timeout, rel_tol = given.number("timeout_s", 5.0), given.number("rel_tol", 1e-6)
    found: dict[str, Any] = {"value": extract_answer(text, mode)}
    if "ground_truth" in given:
        if mode == "math":  # a comparison starts a worker once, which is no part of its time
            is_correct("\\boxed{x+1}", "1+x", "math")
        began = time.perf_counter()
        found["correct"] = is_correct(text, str(given.get("ground_truth")), mode, rel_tol=rel_tol, timeout_s=timeout)
        found["wall_s"] = time.perf_counter() - began
        if "timeout_s" in given:
            found["worker_usable_after"] = is_correct("\\boxed{x+1}", "1+x", "math", timeout_s=60.0)
    return found


@kind("answer_extraction", "gold_field")
def of_gold(given: Given) -> dict[str, Any]:
    """A data set's answer field. → gold_value"""
    return {"gold_value": extract_answer(given.text("gold_field"), given.text("mode", "numeric"))}


@kind("answer_extraction", "values")
def of_values(given: Given) -> dict[str, Any]:
    """Bare answers. → property: normalising twice changes nothing; examples (value → its normal form)"""
    values = given.get("values")
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise NotData("values is not a list of texts")
    given.get("call")
    once = [normalise(v) for v in values]
    return {
        "property": [normalise(v) for v in once] == once,
        "examples": dict(zip(values, once, strict=True)),
        "normalised": once,
    }


@kind("reward", "num_completions", "returns")
def of_returns(given: Given) -> dict[str, Any]:
    """What a reward function returned for a number of completions. → rewards, raises"""
    returns = given.get("returns")
    if isinstance(returns, str):
        raise NotData("returns is a description")
    given.get("note")
    if isinstance(returns, list):
        returns = [to_float(r, "returns") if isinstance(r, str) else r for r in returns]
    return {"rewards": checked("reward", returns, given.integer("num_completions"))}


@kind("reward", "metric_values")
def of_metric(given: Given) -> dict[str, Any]:
    """Values of which some are null. → logged_mean"""
    return {"logged_mean": mean_scored(given.get("metric_values"))}


@kind("reward", "completion", "format")
def of_format(given: Given) -> dict[str, Any]:
    """A completion and a format (think_answer, boxed). → reward"""
    name = given.text("format")
    function: Any = REWARDS[FORMATS.get(name, name)]
    return {"reward": checked(name, function(completions=[given.text("completion")]), 1)[0]}


@kind("reward", "lengths", "max_len", "cache")
def of_overlong(given: Given) -> dict[str, Any]:
    """Lengths in tokens. → penalties"""
    given.get("shaping")
    limit, cache = given.integer("max_len"), given.integer("cache")
    return {"penalties": [overlong_penalty(int(n), limit, cache) for n in given.numbers("lengths")]}


@kind("reward", "action_mask")
def of_length(given: Given) -> dict[str, Any]:
    """Which tokens the model wrote. → length"""
    given.get("measure")
    return {"length": make_sample(given.numbers("action_mask")).trained_tokens}


@kind("reward", "response_mask", "scalar_reward")
def of_placement(given: Given) -> dict[str, Any]:
    """A reward for the whole episode. → token_rewards, reward_index"""
    given.get("place")
    mask = given.numbers("response_mask").astype(np.bool_)
    ends = np.flatnonzero(mask)[-1:].tolist()
    paid = token_rewards(mask, ends, [given.number("scalar_reward")][: len(ends)])
    return {"token_rewards": paid.tolist(), "reward_index": ends[0] if ends else None}


@kind("reward", "response_masks", "scalar_rewards")
def of_group_placement(given: Given) -> dict[str, Any]:
    """Rewards of one group's episodes, some of which wrote nothing. → token_rewards, advantages, excluded"""
    masks, rewards = given.table("response_masks"), given.numbers("scalar_rewards")
    given.get("same_group"), given.text("advantage", "centre_only")
    excluded = [not m.any() for m in masks]
    kept = [i for i, out in enumerate(excluded) if not out]
    rows = Rows(tuple(make_sample(masks[i], episode=str(i), reward=float(rewards[i])) for i in kept))
    values = dict(zip(kept, (float(a.max() + a.min()) for a in group_mean(rows, AdvantageConfig())), strict=True))
    paid = [
        token_rewards(m.astype(np.bool_), np.flatnonzero(m)[-1:].tolist(), [float(r)] * bool(m.any())).tolist()
        for m, r in zip(masks, rewards, strict=True)
    ]
    return {
        "token_rewards": paid,
        "advantages": [values.get(i, 0.0) for i in range(len(masks))],
        "excluded": excluded,
    }


@kind("reward", "reward", "completions")
def of_registered(given: Given) -> dict[str, Any]:
    """A registered reward by name, with ``options``, on completions; other keys are columns. → rewards"""
    name, options = given.text("reward"), given.get("options") or {}
    function: Any = FACTORIES[name](**options) if options else REWARDS[name]
    columns = {k: given.get(k) for k in given.data if k not in ("reward", "options")}
    count = len(columns["completions"])
    return {"rewards": checked(name, function(**columns), count)}
