# SPDX-License-Identifier: Apache-2.0
"""Known answers about advantages: groups, parts, whitening."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from palestra.learn.advantage import ADVANTAGES, AdvantageConfig, same, score, score_parts, whiten, zero_variance
from palestra.learn.batch import PerToken, Rows
from palestra.learn.gae import returns_to_go
from palestra.selfcheck.given import Floats, Given, NotData, nested, to_float
from palestra.selfcheck.kinds import kind, make_sample
from palestra.train.config import PRESETS

BY_PARTS = {
    # what is subtracted, what divides → the estimator
    ("mean", "none"): "group_mean",
    ("mean", "std"): "group_zscore",
    ("mean", "batch_std"): "group_mean_batch_std",
    ("leave_one_out", "none"): "rloo",
    ("leave_one_out", "leave_one_out_std"): "rloo_zscore",
    ("none", "none"): "reinforce",
    ("batch_mean", "none"): "reinforce_baseline",
}
BASELINES = {"group": "mean", "group_mean": "mean", "batch": "batch_mean", "rloo": "leave_one_out"}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@kind("advantage", "groups", "filter")
def filtered(given: Given) -> dict[str, Any]:
    """Groups without signal. → kept_groups (indices), dropped (a number)"""
    given.text("filter")
    groups = given.table("groups")
    names = [f"{i}" for i in range(len(groups))]
    rows = Rows(
        tuple(
            make_sample([1], group=n, episode=f"{n}/{j}", reward=r)
            for n, g in zip(names, groups, strict=True)
            for j, r in enumerate(g)
        )
    )
    return {"kept_groups": [i for i, g in enumerate(groups) if not same(g.tolist())], "dropped": zero_variance(rows)}


@kind("advantage", "groups")
def grouped(given: Given) -> dict[str, Any]:
    """A list of rewards for each group. → advantages (nested alike), and what ``rewards`` gives"""
    groups = given.table("groups")
    names = [str(i) for i, g in enumerate(groups) for _ in g]
    found = _estimated(given, np.concatenate(groups), names)
    ends = np.cumsum([len(g) for g in groups])[:-1]
    found["advantages"] = [part.tolist() for part in np.split(np.array(found["advantages"]), ends)]
    return found


@kind("advantage", "group_rewards")
def by_parts(given: Given) -> dict[str, Any]:
    """Named parts of the reward for one group; null abstains. → advantages, sum"""
    parts = given.get("group_rewards")
    if not isinstance(parts, dict):
        raise NotData("group_rewards is not a mapping of names to lists")
    given.get("std_ddof"), given.get("abstain_contribution")
    eps = given.number("eps", 1e-4)
    aggregation = given.text("aggregation", "normalise each function then sum")
    if aggregation.startswith("normalise"):
        values = score_parts(parts, eps=eps)
    else:
        weights = given.get("weights", {})
        totals = [
            sum(weights.get(n, 1.0) * v for n, v in zip(parts, column, strict=True) if v is not None)
            for column in zip(*parts.values(), strict=True)
        ]
        values = score(totals, "mean", "std", eps=eps)
    return {"advantages": values.tolist(), "sum": float(values.sum())}


@kind("advantage", "values", "mask")
def whitened(given: Given) -> dict[str, Any]:
    """Values under a mask, whitened over all rows; ``variance`` biased or unbiased, ``centre`` (``shift_mean``) false
    leaves the mean. → mean, whitened"""
    values = given.table("values")
    masks = [m.astype(np.bool_) for m in given.table("mask")]
    given.text("op", "whiten")
    variances = {"biased": 0, "population": 0, "unbiased": 1, "sample": 1}
    if (named := given.text("variance", "biased")) not in variances:
        raise NotData(f"no variance is called {named!r}")
    centre = given.flag("centre", given.flag("shift_mean", True))
    own = np.concatenate([v[m] for v, m in zip(values, masks, strict=True)])
    out = whiten(values, masks, eps=given.number("eps", 1e-8), centre=centre, ddof=variances[named])
    return {"mean": float(own.mean()) if len(own) else 0.0, "whitened": nested(list(out))}


@kind("advantage", "returns", "turns")
def by_turns(given: Given) -> dict[str, Any]:
    """One list of returns per episode, a number for each turn; ``turns`` may hold the turns' keys. → advantages"""
    from palestra.learn.turns import turn_advantages

    keys = given.get("turns")
    scale = {"none": "none", "std": "std"}[given.text("scale", "none")]
    found = turn_advantages(
        nested(given.table("returns")),
        keys if isinstance(keys, list) else None,
        scale=scale,  # type: ignore[arg-type]
        eps=given.number("eps", 1e-4),
    )
    return {"advantages": nested(found)}


@kind("advantage", "estimator", "masks")
def by_tokens(given: Given) -> dict[str, Any]:
    """Which tokens the model wrote, a list per row (every run of them is a turn), for the registered ``estimator``.
    Beside it, as the estimator needs: rewards (per row), turn_rewards, values, old, ref (a list per row), after,
    truncated (per row), prompt_ids, episodes (whose row it is), eps, gamma, lam, kl_coef, turn_key. → advantages"""
    masks = given.table("masks")
    count = len(masks)
    episodes = given.get("episodes") or [str(i) for i in range(count)]
    groups = _groups(given, count)
    turns = given.table("turn_rewards") if "turn_rewards" in given else [None] * count
    rewards = given.numbers("rewards") if "rewards" in given else [0.0 if t is None else float(t.sum()) for t in turns]
    truncated = given.mask("truncated", count) & ("truncated" in given)
    samples = tuple(
        make_sample(
            m,
            group=g,
            episode=f"{g}/{e}",
            reward=float(r),
            turn_rewards=None if t is None else tuple(t.tolist()),
            truncated=bool(cut),
        )
        for m, g, e, r, t, cut in zip(masks, groups, episodes, rewards, turns, truncated, strict=True)
    )
    per_token = {k: _behind_prompt(given.table(k)) for k in ("values", "old", "ref") if k in given}
    after = tuple(given.numbers("after")) if "after" in given else (0.0,) * count
    config = AdvantageConfig(
        eps=given.number("eps", 1e-4),
        gamma=given.number("gamma", 1.0),
        gae_lambda=given.number("lam", 0.95),
        kl_coef=given.number("kl_coef", 0.0),
        turn_key=given.get("turn_key", "index"),
    )
    rows = Rows(samples, after=after).with_(**per_token)
    found = ADVANTAGES[_estimator(given)](rows, config)
    return {"advantages": [a[1:].tolist() for a in found]}


def _behind_prompt(rows: Sequence[Floats]) -> tuple[PerToken, ...]:
    """With a zero for the prompt's token that :func:`make_sample` puts before each row."""
    return tuple(np.concatenate([[0.0], row]) for row in rows)


@kind("advantage", "turn_rewards")
def by_turn_rewards(given: Given) -> dict[str, Any]:
    """What each turn earned, a list per episode of one group, discounted by ``gamma``; ``turns`` may hold the turns'
    keys, ``scale`` none or std. → returns, advantages"""
    returns = [returns_to_go(r, gamma=given.number("gamma", 1.0)).tolist() for r in given.table("turn_rewards")]
    turns = given.get("turns")
    asked = {"returns": returns, "turns": turns, "scale": given.get("scale", "none"), "eps": given.number("eps", 1e-4)}
    return {"returns": returns} | by_turns(Given(asked))


@kind("advantage", "rewards")
def by_rewards(given: Given) -> dict[str, Any]:
    """One reward per episode, in groups by ``prompt_ids`` or ``group_size``, for an ``estimator`` or by its parts
    ``baseline`` (or ``centre``) and ``scale``; null or nan = not scored. → advantages, sum, mean, std, zero_variance
    (exactly no advantage at all), abs_max, advantage_of_first"""
    raw = given.get("rewards")
    if not isinstance(raw, list):
        raise NotData("rewards is not a list of numbers")
    raw = [None if r is None or math.isnan(to_float(r, "rewards")) else to_float(r, "rewards") for r in raw]
    scored = [i for i, r in enumerate(raw) if r is not None]
    names = _groups(given, len(raw))
    rewards = np.array([raw[i] for i in scored], np.float64)
    found = _estimated(given, rewards, [names[i] for i in scored])
    if len(scored) < len(raw):  # one that was not scored takes no part
        values = dict(zip(scored, found["advantages"], strict=True))
        found["advantages"] = [values.get(i) for i in range(len(raw))]
    return found


def _groups(given: Given, count: int) -> list[str]:
    if given.get("prompt_ids") is not None:
        return [str(p) for p in given.get("prompt_ids")]
    size = given.integer("group_size", count)
    return [str(i // max(size, 1)) for i in range(count)]


def _estimated(given: Given, rewards: Floats, groups: Sequence[str]) -> dict[str, Any]:
    name, eps = _estimator(given), given.number("eps", 1e-4)
    rewards = torch.tensor(rewards).to(DTYPES[given.text("dtype", "float64")]).double().numpy()
    if given.integer("std_ddof", 1) == 0:
        if name != "group_zscore":
            raise NotData(f"{name} divides by the sample deviation; std_ddof=0 is computed for a group's z-score only")
        return _told(_population(rewards, groups, eps))
    samples = tuple(
        make_sample([1], group=g, episode=f"{g}/{i}", reward=float(r))
        for i, (g, r) in enumerate(zip(groups, rewards, strict=True))
    )
    found = ADVANTAGES[name](Rows(samples), AdvantageConfig(eps=eps))
    return _told(np.array([a[1] for a in found]))


def _told(flat: Floats) -> dict[str, Any]:
    return {
        "advantages": flat.tolist(),
        "sum": float(flat.sum()),
        "mean": float(flat.mean()),
        "std": float(flat.std(ddof=1)) if len(flat) > 1 else 0.0,
        "abs_max": float(np.abs(flat).max()),
        "advantage_of_first": float(flat[0]),
        "zero_variance": not flat.any(),
    }


def _population(rewards: Floats, groups: Sequence[str], eps: float) -> Floats:
    values = np.zeros(len(rewards))
    for group in set(groups):
        where = np.array([g == group for g in groups])
        values[where] = score(rewards[where].tolist(), "mean", "std", eps=eps, ddof=0)
    return values


def _estimator(given: Given) -> str:
    """The registered name: given as such, by a preset, or by what is subtracted and what divides."""
    named = given.get("estimator")
    parts_too = any(key in given for key in ("baseline", "centre", "scale"))  # then a preset's name says no more
    if named is not None and (named in ADVANTAGES or not parts_too):
        named = given.text("estimator")
        return named if named in ADVANTAGES else str(PRESETS.get(named, {}).get("advantage", named))
    baseline = given.get("baseline", given.get("centre", "mean"))
    scale = given.get("scale", "none" if baseline in ("leave_one_out", "none", "batch_mean") else "std")
    parts = (BASELINES.get(baseline, baseline), "batch_std" if scale == "batch" else scale)
    if parts not in BY_PARTS:
        raise NotData(f"no estimator subtracts {baseline!r} and divides by {scale!r}")
    return BY_PARTS[parts]
