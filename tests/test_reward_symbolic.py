# SPDX-License-Identifier: Apache-2.0
"""Symbolic comparison: a process of its own, a hard limit, the same from every thread."""

from __future__ import annotations

import threading
import time

import pytest

from palestra.errors import RewardError
from palestra.reward.answers import is_correct
from palestra.reward.symbolic import ALGEBRA, Algebra


def test_a_runaway_expression_costs_one_time_out_and_the_worker_is_usable_after_ax_044() -> None:
    algebra = ALGEBRA
    before = algebra.timeouts
    assert algebra.equal("x+x", "2x")  # warm, so that the limit is all that is measured
    started = time.monotonic()
    assert not algebra.equal("3", "9^{9^{9^{9}}}", timeout_s=1.5)
    assert time.monotonic() - started < 2.5
    assert algebra.timeouts == before + 1
    assert algebra.equal("x+x", "2x")


def test_math_equality_is_the_same_in_a_worker_thread_rw_017() -> None:
    cases = [("\\boxed{2(x+1)}", "2x+2"), ("\\boxed{2(x+1)}", "2x+1"), ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}")]
    here = [is_correct(text, gold, "math") for text, gold in cases]
    there: list[bool] = []
    thread = threading.Thread(target=lambda: there.extend(is_correct(t, g, "math") for t, g in cases))
    thread.start()
    thread.join()
    assert here == there == [True, False, True]


def test_tiny_numbers_are_not_equal_for_being_tiny() -> None:
    assert not ALGEBRA.equal("\\frac{1}{3^{81}}", "\\frac{1}{3^{80}}")
    assert ALGEBRA.equal("\\frac{3}{3^{81}}", "\\frac{1}{3^{80}}")


def test_what_cannot_be_read_equals_nothing() -> None:
    assert not ALGEBRA.equal("x", "\\frac{}{}}{")


def test_a_worker_that_cannot_start_is_an_error_and_not_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palestra.reward.symbolic.PROGRAM", "no_such_program.py")
    with pytest.raises(RewardError, match="symbolic comparison is not possible"):
        Algebra().equal("x", "y")
