# SPDX-License-Identifier: Apache-2.0
"""What clocks decide in the episodes of a run, on disk before it counts, so that a step which is played again after a
kill meets it again. A clock is no function of the seed; everything else of an episode is.

Journalled are ``limits.timeout_s`` and ``limits.step_timeout_s`` where they strike, and what an environment answered
after as long as its own time limit. A limit that did not strike may strike the second time; then the episode goes
another way. What ends the run itself (``stall_timeout_s``, the patience of an outage) must not come back with it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from palestra.config import FORMAT
from palestra.env.base import StepResult
from palestra.errors import RunError
from palestra.run.files import sync, write_text, writing

FILE = "journal.jsonl"
Entry = Mapping[str, Any]
Place = tuple[int, str]
Seen = Sequence[npt.ArrayLike]
"""The tokens that an episode has come to a place by, in parts."""

_EPISODE = ("phase", "step", "purpose", "draw", "task", "member", "attempt")
_NEEDED = ("format", *_EPISODE, "turn", "kind", "seen")
_RESULT = ("reward", "terminated", "truncated", "tool_calls", "tool_failure")


@dataclass(frozen=True, slots=True)
class Clock:
    """The time limits of one attempt at an episode. known: where they struck in the run that is gone on with, by turn
    and kind (``reset``, ``sample``, ``step``: that call took too long; ``episode``: the time was over after the turn;
    ``result``: the environment's own limit may have decided what it answered). keep: takes what strikes now."""

    known: Mapping[Place, Entry] = field(default_factory=dict)
    keep: Callable[[dict[str, Any]], None] = lambda entry: None

    def under(self, **limits: float) -> Clock:
        """The same under these limits: what struck under others does not come back."""
        known = {place: entry for place, entry in self.known.items() if entry.get("limits") == limits}
        return Clock(known, lambda entry: self.keep({**entry, "limits": limits}))

    def struck(self, turn: int, kind: str, seen: Seen) -> Entry | None:
        """The entry of this place, where the episode has come to it by the same tokens."""
        entry = self.known.get((turn, kind))
        return entry if entry is not None and entry["seen"] == _digest(seen) else None

    def strikes(self, turn: int, kind: str, seen: Seen, **what: Any) -> None:
        """Write it down; when this returns, it is on the disk."""
        self.keep({"turn": turn, "kind": kind, "seen": _digest(seen), **what})


class Journal:
    """The clocks of a run, kept in ``path`` (None: nothing is kept). What the file holds already comes back.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as run:
    ...     journal = Journal(Path(run) / FILE)
    ...     journal.at("rl", 7)
    ...     journal.clock("train", 56, "t1", 0).strikes(2, "step", [[5, 9]], limit_s=1.5)
    ...     again = Journal(Path(run) / FILE)  # the next process
    ...     again.at("rl", 7)
    ...     again.clock("train", 56, "t1", 0).struck(2, "step", [[5, 9]])["limit_s"]
    1.5
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._entries, self._torn = _read(path) if path is not None else ([], False)
        self._known: dict[tuple[Any, ...], dict[Place, Entry]] = defaultdict(dict)
        for entry in self._entries:
            self._known[tuple(entry[name] for name in _EPISODE)][entry["turn"], entry["kind"]] = entry
        self._step: tuple[str, int] = ("", 0)
        self._attempts: Counter[tuple[Any, ...]] = Counter()

    def at(self, phase: str, step: int) -> None:
        """Tell how many steps of a phase are done: whose are the episodes that begin now."""
        if self._step != (phase, step):
            self._step = (phase, step)
            self._attempts.clear()

    def clock(self, purpose: str, draw: int, task: str, member: int) -> Clock:
        """For the next attempt at this episode."""
        if self._path is None:
            return Clock()
        whose = (*self._step, purpose, draw, task, member)
        self._attempts[whose] += 1
        episode = (*whose, self._attempts[whose])
        place = dict(zip(_EPISODE, episode, strict=True))
        return Clock(self._known.get(episode, {}), lambda entry: self._keep(place | entry))

    def settle(self, phase: str, step: int) -> None:
        """Forget what lies before a checkpoint: other phases, and this one's steps before ``step``."""
        left = [entry for entry in self._entries if entry["phase"] == phase and entry["step"] >= step]
        if len(left) < len(self._entries):
            self._entries = left
            self._rewrite()

    def _keep(self, entry: dict[str, Any]) -> None:
        assert self._path is not None
        if self._torn:
            self._rewrite()
        entry = {"format": FORMAT, **entry}
        with writing(self._path):
            new = not self._path.exists()
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(entry))
                file.flush()
                os.fsync(file.fileno())
            if new:
                sync(self._path.parent)
        self._entries.append(entry)

    def _rewrite(self) -> None:
        assert self._path is not None
        write_text(self._path, "".join(map(_line, self._entries)))
        self._torn = False


def described(result: StepResult) -> dict[str, Any] | None:
    """What counts of an answer, as plain data; ``info`` where JSON can say it. None where JSON cannot say the rest."""
    parts = {name: getattr(result, name) for name in _RESULT}
    parts["reward"] = dict(result.reward) if isinstance(result.reward, Mapping) else result.reward
    parts |= {"messages": list(result.observation.messages), "info": dict(result.info)}
    plain: dict[str, Any] = {}
    for name, value in parts.items():
        with suppress(TypeError, ValueError):
            plain[name] = json.loads(json.dumps(value, default=_plain))
    return plain if plain.keys() >= parts.keys() - {"info"} else None


def restored(result: StepResult, plain: Entry) -> StepResult:
    """``result`` as :func:`described` tells of another one; tools, stops and what JSON could not say stay its own.

    >>> late = StepResult(tool_failure="timed out", tool_calls=1)
    >>> restored(StepResult(reward=1.0, terminated=True), described(late)) == late
    True
    """
    shown = replace(result.observation, messages=tuple(plain["messages"]))
    same = {name: plain[name] for name in _RESULT}
    return replace(result, observation=shown, info=plain.get("info", result.info), **same)


def _read(path: Path) -> tuple[list[Entry], bool]:
    """The entries of a file, and whether its last line was torn by a kill: that one never took effect."""
    try:
        whole, newline, rest = path.read_bytes().rpartition(b"\n")
    except FileNotFoundError:
        return [], False
    entries = []
    for number, line in enumerate((whole + newline).splitlines(), start=1):
        try:
            entry = json.loads(line)
            missing = [name for name in _NEEDED if not isinstance(entry.get(name), int | str)]
        except (ValueError, AttributeError, RecursionError):
            missing = ["format"]
        if missing or entry["format"] != FORMAT:
            why = f"{missing[0]!r} is missing" if missing else f"format {entry['format']!r} is not known here"
            raise RunError(f"{path}:{number} is no entry of a journal: {why}; remove the file to go on without it")
        entries.append(entry)
    return entries, bool(rest)


def _digest(seen: Seen) -> str:
    return hashlib.blake2b(b"".join(np.asarray(part, np.int32).tobytes() for part in seen), digest_size=8).hexdigest()


def _line(entry: Entry) -> str:
    return json.dumps(entry) + "\n"


def _plain(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no JSON")


__all__ = ["FILE", "Clock", "Journal", "described", "restored"]
