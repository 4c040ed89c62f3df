# SPDX-License-Identifier: Apache-2.0
"""What a person sees while a run goes on: phase, bar, time left, the last numbers, the learning curve.

On a terminal a live view, drawn by its own thread at most four times a second from a snapshot; elsewhere (a
pipe, CI) a plain line every few seconds without control characters.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from palestra.run.plot import plot, sparkline

CURVES = ("train/reward", "eval/accuracy", "train/loss", "sft/loss", "prefer/loss", "reward_model/loss")
"""What the plot shows: the first of these that the phase has reported at least twice."""

ORDER = (
    *("train/reward", "reward/", "rollout/success_rate", "eval/accuracy", "eval/format", "train/kl"),
    *("rollout/sampled_tokens_mean", "speed/sampled_tokens_per_s", "train/entropy"),
    *("prefer/loss", "prefer/margin", "prefer/accuracy", "reward_model/loss", "reward_model/accuracy"),
    *("sft/loss", "train/loss", "rollout/turns_mean", "rollout/tool_calls_mean"),
    *("rollout/truncated_share", "rollout/groups_zero_variance", "train/grad_norm", "train/clip_fraction"),
    *("train/learning_rate", "sft/learning_rate", "speed/trained_tokens_per_s"),
)
"""What the table shows, in this order; a name that ends in ``/`` stands for its family."""

_ROWS = 14
_NOTES = 4
_PHASES = 6
_WIDTH = 100
_POINTS = 512
_FRAMES_PER_S = 4


@dataclass(frozen=True, slots=True)
class _Curve:
    """What the plot shows: it outlasts its phase until the next one has a curve of its own."""

    phase: str
    name: str
    total: int
    points: list[tuple[int, float]]


class Progress:
    """Live view of a run. Safe to update from any thread; a ``with`` block draws and restores the terminal.

    console: where to draw (stdout by default). quiet: draw nothing at all. interval_s: pause between the plain
    lines that replace the live view where stdout is no terminal.

    >>> import io
    >>> out = io.StringIO()
    >>> with Progress(Console(file=out)) as progress:
    ...     progress.phase("RL", total=2)
    ...     progress.update(1, {"train/reward": 0.25})
    ...     progress.update(2, {"train/reward": 0.5})
    >>> [" ".join(line.split()) for line in out.getvalue().splitlines()]
    ['RL: 2 steps', 'RL 1/2 0:00 elapsed, 0:00 left reward 0.250', 'RL 2/2 0:00 elapsed, 0:00 left reward 0.500']
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False, interval_s: float = 5.0) -> None:
        self.console = console or Console()
        self.quiet = quiet
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._phase, self._total, self._step = "", 0, 0
        self._first, self._began, self._printed = 0, time.monotonic(), -math.inf
        self._history: dict[str, list[tuple[int, float]]] = {}
        self._notes: list[tuple[str, bool]] = []
        self._done: list[str] = []
        self._curve: _Curve | None = None
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if not self.quiet and self.console.is_terminal:
            self._live = Live(
                get_renderable=self.render, console=self.console, refresh_per_second=_FRAMES_PER_S, transient=False
            )
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def phase(self, name: str, total: int, *, done: int = 0) -> None:
        """A new phase of ``total`` steps begins; ``done`` of them lie behind (a resumed run)."""
        if self._phase:
            self._done = [*self._done, self._summary()][-_PHASES:]
        with self._lock:
            self._phase, self._total, self._step, self._first = name, total, done, done
            self._began, self._printed, self._history = time.monotonic(), -math.inf, {}
        self._line(f"{name}: {total} steps" + (f", {done} done" if done else ""))

    def update(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        """``step`` of the phase is done, with these numbers; None and NaN are not shown."""
        with self._lock:
            self._step = step
            for name, value in metrics.items():
                if value is not None and math.isfinite(value):
                    self._history[name] = _bounded([*self._history.get(name, ()), (step, float(value))])
            drawn = next((name for name in CURVES if len(self._history.get(name, ())) > 1), None)
            if drawn is not None:
                self._curve = _Curve(self._phase, drawn, self._total, self._history[drawn])
            now = time.monotonic()
            due = now - self._printed >= self._interval_s or step >= self._total
            self._printed = now if due else self._printed
        if due:
            self._line(self._summary())

    def note(self, text: str, *, warning: bool = False) -> None:
        """One line that should not be missed: an evaluation's result, a checkpoint; a health line as ``warning``."""
        with self._lock:
            self._notes = [*self._notes, (text, warning)][-_NOTES:]
        self._line(f"warning: {text}" if warning else text)

    def render(self) -> RenderableType:
        """The live view of this moment."""
        with self._lock:
            history = {name: list(points) for name, points in self._history.items()}
            notes, done = list(self._notes), list(self._done)
            head, curve = self._head(), self._curve
        width = min(self.console.width, _WIDTH)
        parts: list[RenderableType] = [Text(line, style="dim", overflow="ellipsis", no_wrap=True) for line in done]
        bar = Table.grid()
        bar.add_row(ProgressBar(total=max(self._total, 1), completed=self._step, width=width))
        parts += [head, bar]
        ascii_only = self.console.options.ascii_only
        if curve is not None:
            parts.append(Text(f"{_label(curve.name)} by step of {curve.phase}", style="cyan"))
            lines = plot(curve.points, width=width, height=7, end=curve.total, ascii_only=ascii_only)
            parts.append(Text("\n".join(lines), "cyan"))
        if history:
            parts.append(_table(history, width, ascii_only))
        for note, warning in notes:
            shown = ("! ", "bold yellow") if warning else ("- ", "")
            parts.append(Text(shown[0] + note, style=shown[1], overflow="ellipsis", no_wrap=True))
        return Group(*parts)

    def _head(self) -> Text:
        head = Text(no_wrap=True, overflow="ellipsis")
        if not self._phase:
            return head.append(f"starting  {clock(time.monotonic() - self._began)}", style="dim")
        head.append(self._phase, style="bold")
        head.append(f"  step {self._step}/{self._total}  ")
        head.append(self._times(), style="dim")
        return head

    def _times(self) -> str:
        elapsed = time.monotonic() - self._began
        done = self._step - self._first
        left = clock(elapsed / done * max(self._total - self._step, 0)) if done > 0 else "?"
        return f"{clock(elapsed)} elapsed, {left} left"

    def _summary(self) -> str:
        with self._lock:
            last = {name: points[-1][1] for name, points in self._history.items()}
            width = len(str(self._total))
            start = f"{self._phase} {self._step:{width}d}/{self._total}  {self._times()}"
        shown = [f"{_label(name)} {number(last[name])}" for name in _ordered(last)[:8]]
        return "  ".join([start, *shown])

    def _line(self, text: str) -> None:
        """A plain line, where no live view shows it."""
        if not self.quiet and self._live is None and not self.console.is_terminal:
            self.console.file.write(text + "\n")
            self.console.file.flush()


def _bounded(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The points, neighbours averaged once there are more than the screen could show: drawing stays cheap."""
    if len(points) <= _POINTS:
        return points
    pairs = zip(points[0:-1:2], points[1::2], strict=True)
    merged = [(late[0], (early[1] + late[1]) / 2) for early, late in pairs]
    return merged if len(points) % 2 == 0 else [*merged, points[-1]]


def number(value: float) -> str:
    """A number in at most about seven characters.

    >>> number(0.123456), number(0.5), number(1234.5), number(3e-06), number(512.0)
    ('0.123', '0.500', '1,234', '3e-06', '512')
    """
    if value == round(value) and abs(value) < 1000:
        return str(round(value))
    if abs(value) < 1e-3:
        return f"{value:.1e}".replace(".0e", "e")
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}"


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss.

    >>> clock(75), clock(3671)
    ('1:15', '1:01:11')
    """
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def _label(name: str) -> str:
    """A metric's name for people: ``rollout/sampled_tokens_mean`` → ``sampled tokens mean``."""
    area, _, rest = name.partition("/")
    words = rest.replace("_per_s", "/s").replace("_", " ")
    return f"{area} {words}" if area in ("eval", "reward", "sft") else words


def _ordered(names: Mapping[str, object]) -> list[str]:
    """The names that are shown, in :data:`ORDER`."""
    return [n for o in ORDER for n in sorted(names) if n == o or (o.endswith("/") and n.startswith(o))]


def _table(history: Mapping[str, list[tuple[int, float]]], width: int, ascii_only: bool) -> Table:
    """Two columns of name, sparkline and last value."""
    names = _ordered(history)[:_ROWS]
    columns = 2 if width >= 80 else 1
    table = Table.grid(padding=(0, 2))
    for _ in range(columns):
        table.add_column(style="dim")
        table.add_column(style="cyan")
        table.add_column(justify="right")
    rows = -(-len(names) // columns)
    for i in range(rows):
        cells: list[str] = []
        for name in names[i::rows]:
            points = history[name]
            cells += [_label(name), sparkline([v for _, v in points], 12, ascii_only=ascii_only), number(points[-1][1])]
        table.add_row(*cells)
    return table
