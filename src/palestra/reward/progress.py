# SPDX-License-Identifier: Apache-2.0
"""An intrinsic reward: success where success is changing pays more (learning progress: Oudeyer, Kaplan and Hafner 2007;
the two moving averages and the absolute value as in arXiv:2106.14876, section 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from palestra.errors import ConfigError, RewardError, unknown
from palestra.reward.base import FACTORIES, REWARDS, RewardFunction
from palestra.reward.build import imported
from palestra.reward.rubric import accepted


class LearningProgress:
    """Pays a success |fast − slow|, two moving averages of how often tasks of its kind succeed; a failure nothing.

    What is mastered and what is out of reach pays little, what is being learned (or forgotten) pays most. It is tied to
    success because a payment that all members of a group get alike cancels in the group's baseline.

    kind: the column that says of which kind a task is. success: a reward function, 0 to 1. fast, slow: the weight of
    the newest group in each average. The members of a group are paid by what was known before them, and then counted
    once, as their mean; an abstention (None) stays one.

    The averages are this object's only state; :meth:`state_dict` and :meth:`load_state_dict` carry them over a restart.
    """

    def __init__(self, kind: str, success: RewardFunction, *, fast: float = 0.1, slow: float = 0.01) -> None:
        self.kind = kind
        self.success = success
        self.fast = fast
        self.slow = slow
        self.rates: dict[str, tuple[float, float]] = {}
        """Kind → (fast, slow) moving averages of its success."""

    def __call__(self, **columns: Any) -> list[float | None]:
        if self.kind not in columns:
            there = ", ".join(sorted(columns))
            raise RewardError(f"learning_progress: tasks have no column {self.kind!r} (`kind`); there are: {there}")
        kinds = [str(kind) for kind in columns[self.kind]]
        chosen = accepted("learning_progress", self.success, columns)
        values: Sequence[float | None] = self.success(**chosen)  # type: ignore[assignment]
        paid = [None if v is None else v * self.progress(k) for v, k in zip(values, kinds, strict=True)]
        for kind in dict.fromkeys(kinds):
            scored = [v for v, k in zip(values, kinds, strict=True) if k == kind and v is not None]
            if scored:
                self._count(kind, math.fsum(scored) / len(scored))
        return paid

    def progress(self, kind: str) -> float:
        """|fast − slow| of a kind, 0.0 for one that was never seen."""
        fast, slow = self.rates.get(kind, (0.0, 0.0))
        return abs(fast - slow)

    def _count(self, kind: str, rate: float) -> None:
        fast, slow = self.rates.get(kind, (rate, rate))
        self.rates[kind] = (fast + self.fast * (rate - fast), slow + self.slow * (rate - slow))

    def state_dict(self) -> dict[str, list[float]]:
        """Both averages by kind."""
        return {kind: list(rates) for kind, rates in self.rates.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.rates = {kind: (float(fast), float(slow)) for kind, (fast, slow) in state.items()}


@FACTORIES.register("learning_progress")
def learning_progress(kind: str, success: str = "accuracy", fast: float = 0.1, slow: float = 0.01) -> LearningProgress:
    """Pays success by how much the success on its kind of task is changing (:class:`LearningProgress`).

    kind: a column of the data (``steps``, ``level``, ``type`` …). success: a reward that takes no options, or
    ``module:function``. fast, slow: weights of the newest group in the two moving averages.

    >>> reward = learning_progress("level")
    >>> texts = {"completions": ["#### 4"], "answer": ["4"], "level": [3]}
    >>> wrong = texts | {"completions": ["#### 5"]}
    >>> [reward(**wrong), reward(**texts), reward(**texts)]  # 0.1 and 0.01 after the first success
    [[0.0], [0.0], [0.09...]]
    """
    if not 0 < slow < fast <= 1:
        raise ConfigError(f"learning_progress: give 0 < slow < fast <= 1, got slow {slow} and fast {fast}")
    if success not in REWARDS and ":" not in success:
        raise ConfigError(f"learning_progress.success: {unknown('reward', success, REWARDS)}")
    function = REWARDS[success] if success in REWARDS else imported("learning_progress", success)
    return LearningProgress(kind, function, fast=fast, slow=slow)
