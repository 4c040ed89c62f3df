# SPDX-License-Identifier: Apache-2.0
"""Rows as a Markdown table, by itself or in the page that keeps the last one."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from bench.rows import NOT_ASKED, Record
from palestra.errors import DataError

HEAD = "| work | dtype | ours | peers | ratio | of the limit | bar | met |\n|---|---|---|---|---|---|---|---|"
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
MET = {True: "yes", False: "**no**", None: "–"}


def table(rows: Sequence[Record]) -> str:
    """One line a row; a value with the spread of its runs, a ratio as how many times better ours is."""
    return "\n".join([HEAD, *(_line(row) for row in rows)])


def _line(row: Record) -> str:
    names = row["peers"]
    cells = [
        row["work"],
        row["dtype"],
        _value(row, "ours", row["ours"]),
        "<br>".join([*(f"{n} {_value(row, n, v)}" for n, v in names.items()), *_absent(row)]) or "–",
        "<br>".join(f"{row['ratio'][n]:.2f} × {n}" for n in names if n in row["ratio"]) or "–",
        "–" if row["limit_share"] is None else f"{row['limit_share']:.0%}",
        row["bar"] or "–",
        MET[row["met"]] + "".join(_failed(row)),
    ]
    return "| " + " | ".join(cells) + " |"


def _value(row: Record, name: str, value: float | None) -> str:
    if value is None:
        return "–"
    spread = row["spread"][name]
    return f"{number(value)} {row['unit']}" + (f" ± {spread / 2:.0%}" if spread else "")


def number(value: float) -> str:
    """Three figures, none of them an exponent.

    >>> number(1288.4), number(65.74), number(0.0312)
    ('1288', '65.7', '0.0312')
    """
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _absent(row: Record) -> list[str]:
    return [f"{name} {why.partition(':')[0]}" for name, why in row["absent"].items()]


def said(row: Record) -> str:
    """A row as one line of a terminal."""
    ours = "–" if row["ours"] is None else number(row["ours"])
    peers = [f"{name} {number(value)} ({row['ratio'].get(name, 0.0):.2f} ×)" for name, value in row["peers"].items()]
    share = [f"{row['limit_share']:.0%} of the limit"] if row["limit_share"] else []
    met = [] if row["met"] is None else ["met" if row["met"] else f"NOT met{''.join(_failed(row))}"]
    gone = [name for name, why in row["absent"].items() if why != NOT_ASKED]
    absent = [f"without {', '.join(gone)}"] if gone else []
    return f"  {row['work']} {row['dtype']}: " + "; ".join([f"{ours} {row['unit']}", *peers, *share, *met, *absent])


def advice(rows: Sequence[Record]) -> list[str]:
    """Why peers are missing, each reason once, with what to do about it."""
    reasons = [(name, why) for row in rows for name, why in row["absent"].items() if why != NOT_ASKED]
    return [f"{name}: {why}" for name, why in dict.fromkeys(reasons)]


def _failed(row: Record) -> list[str]:
    return [f" ({name} {number(c['value'])})" for name, c in row["checks"].items() if not c["met"]]


def page_text(rows: Sequence[Record], command: str) -> str:
    """The table with what it was made by: command, machine, versions of everyone."""
    versions: dict[str, dict[str, str]] = {}
    for row in rows:
        for name, found in row.get("versions", {}).items():
            versions.setdefault(name.split()[0], {}).update(found)
    known = [f"{name}: {', '.join(f'{p} {v}' for p, v in v_.items())}" for name, v_ in sorted(versions.items()) if v_]
    when = max((row["measured_at"] for row in rows), default="")
    lines = [
        f"    {command}",
        "",
        f"{when}, {platform.platform()}, Python {platform.python_version()}.",
        "",
        table(rows),
    ]
    return "\n".join([*lines, "", *(f"- {line}" for line in known)])


def write_page(page: Path, text: str) -> None:
    """Put the text between the marks of a page; DataError when it has none."""
    whole = page.read_text(encoding="utf-8")
    before, begin, rest = whole.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise DataError(f"{page} has no {BEGIN} … {END}, where the table goes")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
