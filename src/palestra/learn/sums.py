# SPDX-License-Identifier: Apache-2.0
"""Numbers that add up over micro-batches: metrics, and the seconds of a step's parts."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass
class Sums:
    """Metrics as (sum, count), added over micro-batches and divided once at the end."""

    values: dict[str, tuple[float, float]]

    def add(self, name: str, total: float, count: float) -> None:
        have = self.values.get(name, (0.0, 0.0))
        self.values[name] = (have[0] + total, have[1] + count)

    def total(self, name: str, value: float) -> None:
        """Add up over micro-batches without dividing: the parts of one loss."""
        self.values[name] = (self.values.get(name, (0.0, 1.0))[0] + value, 1.0)

    def peak(self, name: str, value: float) -> None:
        """Keep the largest."""
        self.values[name] = (max(self.values.get(name, (0.0, 1.0))[0], value), 1.0)

    def lowest(self, name: str, value: float) -> None:
        """Keep the smallest."""
        self.values[name] = (min(self.values.get(name, (math.inf, 1.0))[0], value), 1.0)

    def means(self) -> dict[str, float]:
        return {name: s / n for name, (s, n) in self.values.items() if n}


class Clock:
    """Seconds from one lap to the next, added up under the lap's name."""

    def __init__(self, sums: Sums) -> None:
        self._sums, self._since = sums, time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._sums.total(name, now - self._since)
        self._since = now
