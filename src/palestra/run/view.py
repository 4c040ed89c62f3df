# SPDX-License-Identifier: Apache-2.0
"""Episodes in a terminal: question, responses, tool results, reward by part, advantage, mask."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from palestra.errors import DataError, RunError
from palestra.run.report import optional, question, total
from palestra.run.text import visible

FORMAT = 1
_STYLES = {"model": "bold", "env": "yellow", "template": "dim italic"}
_MASK = {True: "+", False: " "}


def read_groups(path: str | Path) -> Iterator[dict[str, Any]]:
    """The groups of a rollouts file (``.jsonl`` or ``.jsonl.zst``) as plain data, advantages included.

    Raises DataError, naming file and line, for what is no rollouts file or has a format that is not known here.
    """
    path, number = Path(path), 0
    try:
        with closing(_lines(path)) as lines:
            for number, line in enumerate(lines, start=1):
                yield _read_group(line, f"{path}:{number}")
    except FileNotFoundError:
        raise DataError(f"rollouts file {path} does not exist; check the path") from None
    except OSError as problem:
        raise DataError(f"rollouts file {path} cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError as problem:
        raise DataError(f"{path}:{number + 1}: not UTF-8 text ({problem.reason}); is it a rollouts file?") from None


def _read_group(line: str, where: str) -> dict[str, Any]:
    try:
        group = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{where}: not JSON ({problem}); is it a rollouts file?") from None
    if not isinstance(group, dict) or "episodes" not in group:
        raise DataError(f"{where}: not a line of a rollouts file; see docs/formats.md")
    if group.get("format") != FORMAT:
        raise DataError(f"{where}: format {group.get('format')!r} is not known here; this version reads {FORMAT}")
    return group


def _lines(path: Path) -> Generator[str, None, None]:
    if path.suffix != ".zst":
        with path.open(encoding="utf-8") as plain:
            yield from plain
        return
    import zstandard

    decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""
    try:
        with closing(_unpacked(path)) as pieces:
            for piece in pieces:
                *lines, rest = (rest + decoder.decode(piece)).split("\n")
                yield from lines
    except zstandard.ZstdError as problem:
        raise DataError(f"{path} is not zstandard-compressed ({problem}); is it a rollouts file?") from None
    if rest := rest + decoder.decode(b"", final=True):
        yield rest


def _unpacked(path: Path) -> Generator[bytes, None, None]:
    """The frames of a file, decompressed. A stream that is cut off just ends, for zstandard; here it is an error."""
    import zstandard

    frame, whole = zstandard.ZstdDecompressor().decompressobj(), False
    with path.open("rb") as raw:
        while packed := raw.read(1 << 16):
            while packed:
                yield frame.decompress(packed)
                packed, whole = frame.unused_data, frame.eof
                if whole:
                    frame = zstandard.ZstdDecompressor().decompressobj()
    if not whole:
        raise DataError(f"{path} is cut off: it ends inside its compressed data; the groups before can be used")


def rollouts_of(run: str | Path, step: int | None = None) -> Path:
    """The rollouts file of a run: of ``step``, or the last one. Training's come before evaluation's."""
    files = sorted((Path(run) / "rollouts").glob("*.jsonl*"))
    wanted = [f for f in files if step is None or f.name.split(".")[0].endswith(f"_{step:06d}")]
    if not wanted:
        steps = ", ".join(f.name.split(".")[0] for f in files)
        raise RunError(
            f"{run} holds no rollouts{'' if step is None else f' of step {step}'}; there are: {steps or 'none'}"
        )
    return max(wanted, key=lambda f: (f.name.startswith("step_"), f.name))


def show_group(group: Mapping[str, Any]) -> RenderableType:
    """One group: the question, then each episode's spans, ``+`` in front of those that are trained on."""
    task = group["task"]
    head = Text.assemble(
        (visible(question(task)), "bold cyan"),
        (f"\ntask {visible(str(task['id']))}, draw {group['draw']}, answer {visible(str(task.get('answer')))}", "dim"),
    )
    return Group(head, *(part for episode in group["episodes"] for part in _episode(episode)), Text())


def _episode(episode: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield Text(f"\nepisode {episode['member']}", style="bold")
    if episode.get("error") is not None:
        yield Text(f"excluded: {visible(str(episode['error']))}", style="red")
    for trajectory in episode["trajectories"]:
        yield _facts(trajectory)
        for number, turn in enumerate(trajectory["turns"], start=1):
            yield Text(f"turn {number}, ended by {turn['finish_reason']}", style="dim")
            yield _spans(turn)


def _facts(trajectory: Mapping[str, Any]) -> Text:
    spans = [s for turn in trajectory["turns"] for s in turn["spans"]]
    trained = sum(len(s["tokens"]) for s in spans if s["author"] == "model")
    parts = [f"{n} {optional(p['value'])} x {p['weight']:g}" for n, p in trajectory["rewards"].items()]
    line = [
        f"{trajectory['agent']}: reward {optional(total(trajectory))}" + (f" ({', '.join(parts)})" if parts else ""),
        f"advantage {optional(trajectory.get('advantage'), 'none')}",
        f"ended: {str(trajectory['stop']).replace('_', ' ')}",
        f"{trained} of {sum(len(s['tokens']) for s in spans)} tokens trained",
    ]
    return Text("; ".join(line))


def _spans(turn: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for span in turn["spans"]:
        mine = span["author"] == "model"
        said = [span["author"], span["role"]] if span["role"] else [span["author"]]
        text = Text(visible(span["text"]).rstrip("\n") or "⏎", style=_STYLES.get(span["author"], ""))
        if mine and span.get("logprobs"):
            mean = math.fsum(span["logprobs"]) / len(span["logprobs"])
            text.append(f"   mean log-prob {mean:.2f}, version {span.get('version')}", style="dim not bold")
        table.add_row(_MASK[mine], " ".join(said), text)
    return table
