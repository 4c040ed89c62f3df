# SPDX-License-Identifier: Apache-2.0
"""An intrinsic reward: states that were seldom seen pay more (count-based exploration, arXiv:1606.01868, with
exact counts of normalised text in the place of a density model)."""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from palestra.errors import ConfigError
from palestra.reward.base import FACTORIES
from palestra.types import Trajectory


def normalised(text: str) -> str:
    """Text as a state: letter case, accents' encoding, punctuation and spacing make no new one; numbers do.

    >>> normalised("  The Door\\n is OPEN, room 12!"), normalised("the door is open: room 12")
    ('the door is open room 12', 'the door is open room 12')
    """
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))


def states(trajectory: Trajectory) -> list[str]:
    """Where each action led: the observation that followed it; for the last action, its own text."""
    seen = [" ".join(m.get("content") or "" for m in turn.observation) for turn in trajectory.turns[1:]]
    last = [trajectory.turns[-1].text] if trajectory.turns else []
    return [normalised(text) for text in (*seen, *last)]


class Novelty:
    """Pays 1/√N for each state, N being how often it was visited so far, this time included; an episode gets the
    mean over its states, or with ``total`` the sum.

    Members of a group are paid as if they ran at the same time: a state counts for all of them before it is
    counted, so their order changes nothing. A state that an episode visits twice pays once.

    The counts are this object's only state; :meth:`state_dict` and :meth:`load_state_dict` carry them over a restart.
    """

    def __init__(self, *, per_task: bool = True, total: bool = False) -> None:
        self.per_task = per_task
        self.total = total
        self.visits: Counter[str] = Counter()

    def __call__(self, trajectories: Sequence[Trajectory], task_id: Sequence[str], **_: Any) -> list[float | None]:
        visited = [self._keys(t, task) for t, task in zip(trajectories, task_id, strict=True)]
        paid = [[1.0 / math.sqrt(self.visits[key] + 1) for key in keys] for keys in visited]
        self.visits.update(key for keys in visited for key in keys)
        sums = [math.fsum(pays) for pays in paid]
        return list(sums) if self.total else [s / len(p) if p else 0.0 for s, p in zip(sums, paid, strict=True)]

    def _keys(self, trajectory: Trajectory, task: str) -> list[str]:
        place = f"{task}\n" if self.per_task else ""
        hashes = (
            hashlib.blake2b(f"{place}{s}".encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
            for s in states(trajectory)
        )
        return list(dict.fromkeys(hashes))

    def state_dict(self) -> dict[str, int]:
        """Visits by state."""
        return dict(self.visits)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.visits = Counter(state)


@FACTORIES.register("novelty")
def novelty(scope: str = "task", reduce: str = "mean") -> Novelty:
    """Pays for states that were seldom seen (:class:`Novelty`). Give it a small weight, or gate it.

    scope: count states per ``task``, or over the whole ``run``. reduce: ``mean`` over an episode's states, or ``sum``,
    which pays long episodes more.

    >>> from palestra.types import Span, StopReason, Turn, Author
    >>> import numpy as np
    >>> said = Span(np.zeros(1), Author.MODEL, "assistant", "go north", np.zeros(1), 0)
    >>> walk = Trajectory((Turn((said,), (), {"role": "assistant"}, "eos"),), StopReason.ENV_TERMINATED)
    >>> reward = novelty()
    >>> [reward(trajectories=[walk, walk], task_id=["a", "a"]) for _ in range(2)]
    [[1.0, 1.0], [0.577..., 0.577...]]
    """
    if scope not in ("task", "run"):
        raise ConfigError(f"novelty: scope is {scope!r}; choose 'task' or 'run'")
    if reduce not in ("mean", "sum"):
        raise ConfigError(f"novelty: reduce is {reduce!r}; choose 'mean' or 'sum'")
    return Novelty(per_task=scope == "task", total=reduce == "sum")
