# SPDX-License-Identifier: Apache-2.0
"""Episodes that fail: which kind it is, whether another try is worth it, and when the run has to stop."""

from __future__ import annotations

import enum
import re
from collections import Counter
from dataclasses import dataclass, field

from palestra.errors import PalestraError
from palestra.types import Episode, StopReason

_TOLD = re.compile(r"([\w.]+): (\w+)")
_OUTAGES = re.compile(
    r"Connect|Timeout|Network|Protocol|Disconnect|Unavailable|RateLimit|TooMany|Overload|HTTP|URLError|gaierror"
    r"|BrokenPipe|IncompleteRead|EngineError|^OSError$|^IOError$"
)
_LONGEST_WAIT_S = 10.0


class RolloutError(PalestraError):
    """No episode succeeds any more."""


class Kind(enum.Enum):
    """What kind of failure it was.

    OUTAGE: something outside does not answer; worth another try after a while. HANG: one of our time limits struck.
    BUG: anything else that was raised; tried again at once, since it may depend on chance. PERMANENT: the same would
    happen again.
    """

    OUTAGE = "outage"
    HANG = "hang"
    BUG = "bug"
    PERMANENT = "permanent"

    def wait_s(self, attempt: int) -> float:
        """Seconds before the try after the ``attempt``-th.

        >>> [Kind.OUTAGE.wait_s(n) for n in (1, 2, 3, 9)], Kind.BUG.wait_s(3)
        ([0.25, 0.5, 1.0, 10.0], 0.0)
        """
        return min(0.25 * 2 ** (attempt - 1), _LONGEST_WAIT_S) if self is Kind.OUTAGE else 0.0


def kind_of(episode: Episode) -> Kind | None:
    """The kind of an episode's failure, or None for one that was played to an end.

    >>> from palestra.types import Task
    >>> kind_of(Episode(Task("t", "go"), error="env.reset: ConnectionRefusedError: no")).value
    'outage'
    """
    if episode.error is None:
        hung = episode.info.get("stop") == StopReason.TOOL_FAILURE.value
        return Kind.HANG if hung and "no answer within" in str(episode.info.get("tool_failure")) else None
    if episode.info.get("permanent"):
        return Kind.PERMANENT
    told = _TOLD.match(episode.error)
    if told is None or told[2] == "StepTimeout":
        return Kind.HANG
    return Kind.OUTAGE if _OUTAGES.search(told[2]) else Kind.BUG


def reason_of(episode: Episode) -> str:
    """Where and how an episode failed, short enough to be counted.

    >>> from palestra.types import Task
    >>> reason_of(Episode(Task("t", "go"), error="env.step: KeyError: 'x'"))
    'env.step.KeyError'
    """
    if episode.error is None:
        return "env.step.StepTimeout"
    if episode.info.get("permanent"):
        return "prompt_too_long"
    told = _TOLD.match(episode.error)
    return f"{told[1]}.{told[2]}" if told else "timeout"


@dataclass
class Budget:
    """How many retries a call has left: a few, and one for every second episode, so that a broken world costs at most
    half as much again."""

    left: float = 8.0

    def earn(self) -> None:
        self.left += 0.5

    def spend(self) -> bool:
        """Take one, if there is one."""
        if self.left < 1:
            return False
        self.left -= 1
        return True


@dataclass
class Failures:
    """The failures in a row, in the order in which the episodes began. One success ends the row.

    limit: so many in a row mean that nothing works. An outage is then waited for, one episode at a time, for
    ``patience_s``; anything else stops at once. Tasks that cannot be played at all are less alarming: eight times as
    many of them have to come.
    """

    limit: int = 16
    patience_s: float = 60.0
    reasons: Counter[str] = field(default_factory=Counter)
    _kinds: Counter[Kind] = field(default_factory=Counter)
    _since: float = 0.0
    _probes: int = 0
    _last: str = ""

    def add(self, episode: Episode, now: float) -> None:
        """Count one more end. Raises RolloutError when that makes too many failures in a row."""
        kind = kind_of(episode)
        if kind is None:
            self.reasons, self._kinds, self._probes = Counter(), Counter(), 0
            return
        self._since = self._since if self._kinds else now
        self._probes += self._down()
        self.reasons[reason_of(episode)] += 1
        self._kinds[kind] += 1
        self._last = episode.error or str(episode.info.get("tool_failure"))
        if self._kinds[Kind.PERMANENT] >= 8 * self.limit:
            raise RolloutError(self._told())
        waited_for = self._kinds.keys() <= {Kind.OUTAGE, Kind.PERMANENT} and now - self._since < self.patience_s
        if self._down() and not waited_for:
            raise RolloutError(self._told())

    def room(self, concurrency: int) -> int:
        """How many episodes may run at once."""
        return 1 if self._down() else concurrency

    def pause_s(self) -> float:
        """Seconds before the next one begins."""
        return Kind.OUTAGE.wait_s(self._probes + 2) if self._down() else 0.0

    def _down(self) -> bool:
        return self._kinds.total() - self._kinds[Kind.PERMANENT] >= self.limit

    def _told(self) -> str:
        (reason, times), n = self.reasons.most_common(1)[0], self._kinds.total()
        return f"{n} episodes in a row failed, {times} of them by {reason}; the last: {self._last}"
