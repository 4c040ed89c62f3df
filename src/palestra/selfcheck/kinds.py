# SPDX-License-Identifier: Apache-2.0
"""What a case may be about: for each area the kinds of input that can be computed from, first fit first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from palestra.learn.batch import Sample
from palestra.selfcheck.given import Given

Check = Callable[[Given], dict[str, Any]]
KINDS: dict[str, list[Kind]] = {}
"""area → its kinds, in the order in which they are tried."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of input. needs: the keys that mark it. check: input → named values, or whatever it raises."""

    needs: tuple[str, ...]
    check: Check


def kind(area: str, *needs: str) -> Callable[[Check], Check]:
    """Decorator: this function computes inputs of ``area`` that have all the keys ``needs``."""

    def add(check: Check) -> Check:
        KINDS.setdefault(area, []).append(Kind(needs, check))
        return check

    return add


def make_sample(
    mask: npt.ArrayLike,
    *,
    group: str = "g",
    episode: str = "0",
    reward: float = 0.0,
    logprobs: npt.ArrayLike | None = None,
    turn_rewards: tuple[float, ...] | None = None,
    trained: bool = True,
    truncated: bool = False,
) -> Sample:
    """A row of which only the mask matters; a token before it, which nothing trains, stands for the prompt.

    Every run of the model's own tokens is a turn. turn_rewards: what each earned; the last one all, if not given.

    >>> make_sample([1, 0, 1]).loss_mask.tolist()
    [False, True, False, True]
    """
    own = np.concatenate([[False], np.asarray(mask).astype(np.bool_)])
    scored = np.zeros(len(own), np.float64)
    if logprobs is not None:
        scored[1:] = logprobs
    ends = tuple(int(i) for i in np.flatnonzero(own & ~np.append(own[1:], False)))
    if turn_rewards is None:
        turn_rewards = (0.0,) * (len(ends) - 1) + (reward,) * bool(ends)
    # float64 instead of the sampler's float32: known answers have six decimals
    return Sample(
        np.arange(len(own), dtype=np.int32),
        own,
        scored,  # type: ignore[arg-type]
        np.where(own, 0, -1).astype(np.int32),
        group,
        episode,
        reward,
        ends,
        trained,
        turn_rewards,
        truncated,
    )
