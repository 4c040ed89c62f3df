# SPDX-License-Identifier: Apache-2.0
"""A progress that says nothing and keeps what it was told."""

from __future__ import annotations

from collections.abc import Mapping

from palestra.run.progress import Progress


class Listening(Progress):
    """Keeps what is told; ends the run by Ctrl-C after a certain step."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__(quiet=True)
        self.stop_at, self.told = stop_at, list[str]()

    def update(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        if step == self.stop_at:
            raise KeyboardInterrupt

    def note(self, text: str, *, warning: bool = False) -> None:
        self.told.append(text)
