# SPDX-License-Identifier: Apache-2.0
"""Where the engine's time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class EngineStats:
    """Seconds and tokens since they were last taken (``LocalEngine.take_stats``).

    A pass that fills prompts and decodes counts as ``prefill_s`` and ``decode_s`` in proportion to its rows. Twins
    share decode rows and guesses may be wrong, so rows and tokens differ; ``draft_rows`` of the rows were
    for guesses, ``guessed_tokens`` of the tokens were guessed right.
    """

    schedule_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    sample_s: float = 0.0
    collect_s: float = 0.0
    passes: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    decode_rows: int = 0
    draft_rows: int = 0
    guessed_tokens: int = 0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        setattr(self, name, getattr(self, name) + time.perf_counter() - start)

    @property
    def busy_s(self) -> float:
        """Seconds in which the engine did anything at all."""
        return self.schedule_s + self.prefill_s + self.decode_s + self.sample_s + self.collect_s

    def ran(self, seconds: float, filled: int, decoded: int) -> None:
        """One forward pass over so many rows of prompts and of decoding."""
        share = filled / max(1, filled + decoded)
        self.prefill_s += seconds * share
        self.decode_s += seconds * (1 - share)
