# SPDX-License-Identifier: Apache-2.0
"""Two turns of which only the first matters: what each way of giving credit tells the tokens of the second."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from small_models import sample

from palestra.learn.advantage import ADVANTAGES, AdvantageConfig
from palestra.learn.batch import Rows, Sample
from palestra.learn.turns import turn_starts

WORDS, FREE, GROUP = 8, 16, 8
"""The first turn is one of eight words and word 0 is right; the second is sixteen words, whatever they are."""


def episode(member: int, first: int, rest: Any) -> Sample:
    right = float(first == 0)
    row = sample([9, first, 9, *rest], [0, 1, 0] + [1] * len(rest), episode=str(member), reward=right)
    return replace(row, turn_ends=(1, 2 + len(rest)), turn_rewards=(right, 0.0))


def test_credit_by_turns_leaves_the_second_turn_alone_and_credit_by_episodes_does_not() -> None:
    rng = np.random.default_rng(0)
    rows = Rows(tuple(episode(i, i % 3, rng.integers(0, WORDS, FREE)) for i in range(GROUP)))
    whole = ADVANTAGES["group_mean"](rows, AdvantageConfig())
    assert all(turn_starts(s).tolist() == [1, 3] for s in rows.samples)
    for name, first in (("turn_group_mean", whole), ("turn_group_zscore", None)):
        turns = ADVANTAGES[name](rows, AdvantageConfig())
        for i, (a, by_episode) in enumerate(zip(turns, whole, strict=True)):
            assert not a[2:].any() and by_episode[3:].all() and a[1] * by_episode[1] > 0
            assert first is None or a[1] == pytest.approx(first[i][1])


def episodes_to(enough: float, advantage: str, seed: int) -> int:
    """REINFORCE on a table, with steps of one length as clipping makes them: the logits of a turn are what both turns
    have in common plus its own."""
    rng = np.random.default_rng(seed)
    common, own = np.zeros(WORDS), np.zeros((2, WORDS))
    for step in range(1, 200):
        probs = np.exp(common + own)
        probs /= probs.sum(-1, keepdims=True)
        if probs[0, 0] >= enough:
            return step * GROUP
        played = [
            (int(rng.choice(WORDS, p=probs[0])), rng.choice(WORDS, FREE, p=probs[1]).tolist()) for _ in range(GROUP)
        ]
        rows = Rows(tuple(episode(i, first, rest) for i, (first, rest) in enumerate(played)))
        gradient = np.zeros((2, WORDS))
        for (first, rest), a in zip(played, ADVANTAGES[advantage](rows, AdvantageConfig()), strict=True):
            gradient[0] += a[1] * (np.eye(WORDS)[first] - probs[0])
            gradient[1] += (a[3:, None] * (np.eye(WORDS)[rest] - probs[1])).sum(0)
        together = gradient.sum(0)
        length = np.sqrt((gradient**2).sum() + (together**2).sum()) + 1e-12
        common, own = common + 0.3 * together / length, own + 0.3 * gradient / length
    return 200 * GROUP


def test_credit_by_turns_learns_in_fewer_episodes() -> None:
    needed = {name: [episodes_to(0.9, name, seed) for seed in range(5)] for name in ("turn_group_mean", "group_mean")}
    assert fmean(needed["turn_group_mean"]) < 0.6 * fmean(needed["group_mean"]), needed


def script() -> Any:
    path = Path(__file__).parents[1] / "docs" / "make_turn_credit.py"
    spec = importlib.util.spec_from_file_location("make_turn_credit", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("way", ["turn_group_mean", "gae_turns"])
def test_the_measurement_of_the_results_page_runs(way: str) -> None:
    made = script()
    rewards, seconds = made.learn(0, {"advantage": way}, steps=1)
    assert len(rewards) == 1 and 0 <= rewards[0] <= 1 and seconds > 0
    assert {w["advantage"] for w in made.WAYS.values()} >= {"group_mean", way}
