# SPDX-License-Identifier: Apache-2.0
"""The bench of the kernels measures both ways in processes of their own."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from bench import kernels
from palestra.errors import UserError


def test_both_ways_are_measured_and_the_table_has_a_line_for_each_work() -> None:
    shown = CliRunner().invoke(kernels.app, ["builtin:calculator", "--repeats", "1"])
    assert shown.exit_code == 0, shown.output
    rows = [line for line in shown.output.splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[0][2:] for row in rows] == list(kernels.WORK)


def test_a_model_that_is_not_there_is_told() -> None:
    with pytest.raises(UserError, match="no-such-model"):
        kernels.measured("no-such-model")
