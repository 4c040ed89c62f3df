# SPDX-License-Identifier: Apache-2.0
"""What ``palestra eval`` measures beyond the evaluation that training has."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from palestra.config import Config


class Measures(Config):
    """samples: episodes of each task; from 2 on, pass@k and pass^k, at a temperature above 0. pass_k: the k to report;
    left out, powers of two up to ``samples``. baseline: a run directory of an earlier evaluation to compare with, or a
    model that plays the same tasks first. judge: scores the reasoning of each episode as the part ``reasoning``,
    outside the reward; the options of the reward function ``judge`` (at least ``endpoint``). concurrency: episodes at
    once. retries: for episodes that fail.
    """

    samples: int = Field(default=1, ge=1)
    pass_k: tuple[Annotated[int, Field(ge=1)], ...] = ()
    baseline: str | None = None
    judge: dict[str, Any] | None = None
    concurrency: int = Field(default=64, ge=1)
    retries: int = Field(default=1, ge=0)
