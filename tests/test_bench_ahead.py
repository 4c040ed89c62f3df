# SPDX-License-Identifier: Apache-2.0
"""The bench of playing ahead runs whole steps with each bound in turn."""

from __future__ import annotations

from typer.testing import CliRunner

from bench import ahead


def test_every_bound_has_a_line() -> None:
    small = ["--delay-s", "0", "--turns", "2", "--new", "2", "--updates", "1", "--steps", "2", "--repeats", "1"]
    shown = CliRunner().invoke(ahead.app, small)
    assert shown.exit_code == 0, shown.output
    rows = [line for line in shown.output.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows] == ["| max_staleness", "| 0", "| 1"]
    assert rows[1].endswith(" 1.00 × |")


def test_the_table_by_hand() -> None:
    found = {0: [(2.0, 1.0), (4.0, 3.0), (3.0, 1.5)], 1: [(1.5, 0.25)]}
    assert ahead.table(found).splitlines()[2:] == ["| 0 | 3.00 | 1.50 | 1.00 × |", "| 1 | 1.50 | 0.25 | 2.00 × |"]
