# SPDX-License-Identifier: Apache-2.0
"""Weights between the sampler and the trainer: levels, cuts, what is reported."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from small_models import sample

from palestra.errors import ConfigError
from palestra.learn.batch import Rows
from palestra.learn.offpolicy import check_importance, importance_weights


def rows_of(*gaps: tuple[str, list[float | None]], trained: bool = True) -> Rows:
    """Per row its episode and trainer − sampler of each token after a prompt; None = a tool's, absurdly far off."""
    samples, old = [], []
    for episode, row in gaps:
        mask = [0, *(int(g is not None) for g in row)]
        logprobs = [0.0, *(-1.5 if g is not None else -7.0 for g in row)]
        samples.append(sample(range(len(mask)), mask, episode=episode, logprobs=logprobs, trained=trained))
        old.append(np.array([0.0, *(-1.5 + g if g is not None else 90.0 for g in row)]))
    return Rows(tuple(samples), old=tuple(old))


def weighed(rows: Rows, importance: Any, **how: float) -> tuple[list[list[float]], dict[str, float]]:
    weights, metrics = importance_weights(rows, importance, **how)
    assert all(not w[~s.loss_mask].any() for w, s in zip(weights, rows.samples, strict=True))
    return [w[s.loss_mask].tolist() for w, s in zip(weights, rows.samples, strict=True)], {
        name.removeprefix("train/sampler_ratio_"): value for name, value in metrics.items()
    }


def test_tokens_above_the_cap_count_as_the_cap_or_not_at_all() -> None:
    rows = rows_of(("a", [math.log(2), None, math.log(5)]), ("b", [math.log(0.25), 0.0]))
    raw = {"min": pytest.approx(0.25), "mean": pytest.approx(2.0625), "max": pytest.approx(5.0)}
    got, metrics = weighed(rows, "token_truncate", cap=3.0)
    assert got == [[pytest.approx(2), 3.0], [pytest.approx(0.25), 1.0]] and metrics == raw | {"cut": 0.25}
    got, metrics = weighed(rows, "token_mask", cap=3.0, floor=0.5)
    assert got == [[pytest.approx(2), 0.0], [0.0, 1.0]] and metrics == raw | {"cut": 0.5}
    got, metrics = weighed(rows, "none")
    assert got == [[1.0, 1.0], [1.0, 1.0]] and metrics == raw | {"cut": 0.0}, "reported even when nothing is done"


def test_an_episodes_weight_is_the_product_over_all_its_rows() -> None:
    rows = rows_of(("a", [math.log(2), None]), ("b", [math.log(0.5)]), ("a", [math.log(2), math.log(1.5)]))
    raw = {"min": pytest.approx(0.5), "mean": pytest.approx(3.25), "max": pytest.approx(6.0)}
    got, metrics = weighed(rows, "sequence_truncate", cap=4.0)
    assert got == [[4.0], [pytest.approx(0.5)], [4.0, 4.0]] and metrics == raw | {"cut": 0.5}
    got, metrics = weighed(rows, "sequence_mask", cap=4.0)
    assert got == [[0.0], [pytest.approx(0.5)], [0.0, 0.0]] and metrics == raw | {"cut": 0.5}
    got, _ = weighed(rows, "sequence_mask", cap=9.0, floor=0.6)
    assert got == [[pytest.approx(6)], [0.0], [pytest.approx(6)] * 2]


def test_ls_012_a_tiny_gap_per_token_multiplies_up_with_length() -> None:
    rows = rows_of(("a", [0.015] * 90))
    got, metrics = weighed(rows, "token_truncate", cap=3.0)
    assert got[0] == pytest.approx([1.015113] * 90, abs=5e-7) and metrics["cut"] == 0.0
    got, metrics = weighed(rows, "sequence_mask", cap=3.0)
    assert got[0] == [0.0] * 90 and metrics["mean"] == pytest.approx(3.857426, abs=5e-6) and metrics["cut"] == 1.0


def test_ls_011_the_mean_weight_is_over_sequences() -> None:
    _, metrics = weighed(rows_of(("a", [0.0]), ("b", [math.log(2), 0.0])), "sequence_truncate")
    assert metrics["mean"] == pytest.approx(1.5)


def test_where_sampler_and_trainer_agree_nothing_is_weighed() -> None:
    for importance in ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        got, metrics = weighed(rows_of(("a", [0.0, None, 0.0]), ("b", [0.0])), importance)
        assert got == [[1.0, 1.0], [1.0]] and metrics == {"min": 1.0, "mean": 1.0, "max": 1.0, "cut": 0.0}


def test_absurd_gaps_stay_finite() -> None:
    rows = rows_of(("a", [1e4]), ("b", [-1e4]))
    got, metrics = weighed(rows, "token_truncate")
    assert got == [[3.0], [pytest.approx(0.0, abs=1e-8)]] and math.isfinite(metrics["max"])


def test_rows_that_do_not_train_have_no_weight_and_no_part_in_the_metrics() -> None:
    stale = rows_of(("a", [5.0]), trained=False)
    assert weighed(stale, "token_truncate") == ([[0.0]], {})
    for level in ("sequence_mask", "token_mask"):
        assert importance_weights(Rows((), old=()), level) == ((), {})  # type: ignore[arg-type]


def test_each_level_equals_a_loop_over_tokens() -> None:
    rng = np.random.default_rng(0)
    gaps = [(f"e{i % 4}", [float(g) if rng.random() < 0.7 else None for g in rng.normal(0, 0.8, 9)]) for i in range(6)]
    rows = rows_of(*gaps)
    got, _ = weighed(rows, "token_mask", cap=2.0, floor=0.5)
    for have, (_, row) in zip(got, gaps, strict=True):
        ratios = [math.exp(g) for g in row if g is not None]
        assert have == pytest.approx([r if 0.5 <= r <= 2 else 0.0 for r in ratios], rel=1e-6)
    got, _ = weighed(rows, "sequence_truncate", cap=2.0)
    for have, (episode, _) in zip(got, gaps, strict=True):
        ratio = math.exp(sum(g for e, row in gaps if e == episode for g in row if g is not None))
        assert have == pytest.approx([min(ratio, 2.0)] * len(have), rel=1e-6)


def test_weights_without_a_trainers_log_probs_are_refused_and_so_is_a_floor_that_nothing_reads() -> None:
    check_importance("token_mask", "recompute", 0.5)
    check_importance("none", "recorded", 0.0)
    with pytest.raises(ConfigError, match="old_logprobs=recompute"):
        check_importance("token_truncate", "recorded", 0.0)
    for importance in ("none", "token_truncate"):
        with pytest.raises(ConfigError, match="importance_floor"):
            check_importance(importance, "recompute", 0.5)  # type: ignore[arg-type]
