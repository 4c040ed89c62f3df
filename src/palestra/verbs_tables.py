# SPDX-License-Identifier: Apache-2.0
"""How the verbs ``rewards inspect`` and ``rewards ablate`` show what they found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from palestra.reward.ablation import Ablation, Movement
    from palestra.reward.advice import Advice
    from palestra.reward.inspection import Inspection
    from palestra.reward.probes import Probe
    from palestra.reward.rubric import Rubric

RED, YELLOW = "red", "yellow"


def show_inspection(
    console: Console,
    what: str,
    found: Inspection,
    probes: Sequence[Probe],
    rubric: Rubric | None,
    advice: Sequence[Advice],
) -> None:
    """The parts, the pairs and the probes, as tables, and the advice."""
    share = "none" if found.no_signal is None else f"{found.no_signal:.0%}"
    console.print(f"{what}: {found.episodes} episodes in {found.groups} groups, {found.failed} failed")
    console.print(
        f"groups without signal (all members alike): {share}", style=RED if (found.no_signal or 0) > 0.5 else ""
    )
    console.print(_parts_table(found))
    for name, count in (rubric.errors if rubric is not None else {}).items():
        console.print(f"{name}: {count} completions could not be scored: {rubric.last_error[name]}", style=RED)  # type: ignore[union-attr]
    if found.pairs:
        console.print(_pairs_table(found))
    if probes:
        console.print(_probes_table(probes))
    elif rubric is None:
        console.print("no probes: no config beside these rollouts says what is scored", style="dim")
    else:
        console.print("no probes: only the environment pays, and probes play nothing", style="dim")
    for piece in advice:
        console.print(Text(f"{piece.principle}: {piece.text}", YELLOW))


def _parts_table(found: Inspection) -> Table:
    from palestra.run.plot import sparkline

    table = Table(box=SIMPLE_HEAD)
    for name in ("part", "weight", "mean", "std", "range", "flat", "pull", ""):
        table.add_column(name, no_wrap=name == "range")
    for part in found.parts:
        bars = sparkline(part.histogram, len(part.histogram)) if part.histogram else ""
        between = "" if part.low is None else f"{part.low:.3g} {bars} {part.high:.3g}"
        flat = "" if part.flat_groups is None else f"{part.flat_groups:.0%}"
        pull = "" if part.pull is None else f"{part.pull:+.0%}"
        notes = [f"{part.missing} unscored"] if part.missing else []
        notes += [f"counts in {part.counted:.0%}"] if part.counted < 1 and part.scored else []
        weight = "" if part.name == "reward" else f"{part.weight:g}"
        table.add_row(part.name, weight, _number(part.mean), _number(part.std), between, flat, pull, ", ".join(notes))
    table.caption = "flat: groups in which it does not vary; pull: its share of the reward's variance within groups"
    return table


def _pairs_table(found: Inspection) -> Table:
    meaning = {"conflict": "pull apart: decide which one you want", "same": "say the same: one of them is enough"}
    table = Table("two parts, within groups", "correlation", "", box=SIMPLE_HEAD)
    for pair in found.pairs:
        style = {"conflict": RED, "same": YELLOW}.get(pair.verdict, "")
        table.add_row(f"{pair.a}, {pair.b}", f"{pair.correlation:+.2f}", Text(meaning.get(pair.verdict, ""), style))
    return table


def _probes_table(probes: Sequence[Probe]) -> Table:
    from palestra.run.text import visible

    table = Table("a reply of …", "earns", "by part", "", box=SIMPLE_HEAD)
    for found in probes:
        parts = ", ".join(f"{name} {value:.3g}" for name, value in found.parts.items())
        worked = found.name == "answer without work"
        said = f"{found.verdict}; for example {visible(found.example)[:60]!r}" if found.verdict else ""
        table.add_row(found.name, _number(found.reward), parts, Text(said, YELLOW if worked else RED))
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def show_ablation(console: Console, found: Ablation) -> None:
    """For each part what moved when it was off, with intervals; first, whether training itself moved anything."""
    table = Table(box=SIMPLE_HEAD)
    for name in ("off", "measure", "all parts", "without", "difference", "95 % interval", ""):
        table.add_column(name)
    _add(table, "nothing (before, after training)", found.training)
    for part, movements in found.parts.items():
        _add(table, part, movements)
    console.print(table)
    for part in found.parts:
        moved = ", ".join(found.moved(part))
        console.print(Text(f"{part}: {moved} moved" if moved else _still(found, part), "" if moved else YELLOW))


def _add(table: Table, name: str, movements: Sequence[Movement]) -> None:
    for at, m in enumerate(movements):
        between = "" if m.low is None or m.high is None else f"{m.low:+.3g} … {m.high:+.3g}"
        style = {"moved": "bold", "perhaps": YELLOW}.get(m.verdict, "dim")
        cells = (name if at == 0 else "", m.measure, f"{m.base:.3g}", f"{m.value:.3g}", f"{m.difference:+.3g}", between)
        table.add_row(*cells, m.verdict, style=style)
    if not movements:
        table.add_row(name, "no measure differs")
    table.add_section()


def _still(found: Ablation, part: str) -> str:
    if found.seeds == 1:
        return f"{part}: one seed cannot tell movement from noise; use --seeds 3 or more"
    if not any(m.verdict == "moved" for m in found.training):
        return f"{part}: nothing can be said, since training itself moved nothing yet; use more --steps or --seeds"
    if hints := ", ".join(m.measure for m in found.parts[part] if m.verdict == "perhaps"):
        return f"{part}: {hints} perhaps; {found.seeds} seeds cannot tell that from chance, use more --seeds"
    return (
        f"{part}: no movement seen with {found.seeds} seeds; either it does not work on its own, or less than the "
        "intervals show"
    )
