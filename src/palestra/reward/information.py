# SPDX-License-Identifier: Apache-2.0
"""An intrinsic process reward: how much nearer each turn's observation brought the right answer.

Information gain as in arXiv:2510.14967 (IGPO): with p_k = exp(1/L · Σ_j log π(a_j | everything before action k, a_<j))
the probability of the gold answer a, of L tokens, as a geometric mean per token, turn k gains p_(k+1) − p_k. Over an
episode of K actions that sums to p_K − p_1. What the last action itself says gains nothing: accuracy judges it.

π is the policy in training, as there, or a fixed observer. The policy's own gain measures what a turn told this policy
now; a fixed observer's means the same all through a run, and no policy can earn it by growing sure of itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from palestra.errors import ConfigError
from palestra.reward.base import FACTORIES, PerTurn, RewardFunction
from palestra.types import Author, IntArray, Message, Trajectory

if TYPE_CHECKING:
    from palestra.model.loading import LoadedModel

SCALES = ("probability", "nats")
POLICY = "policy"
"""The ``path`` that stands for the model in training."""


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What a model had before it when it acted: the messages, and the very tokens, int32[T]."""

    messages: tuple[Message, ...]
    tokens: IntArray


Belief = Callable[[Sequence[tuple[Seen, str]]], Sequence[float | None]]
"""(what was seen, answer) → mean log-probability per token of each answer, in nats; None where it cannot be had."""

_Key = tuple[str, bytes, str]


class InformationGain:
    """p_(k+1) − p_k of the gold answer for each turn k but the last, which gains 0; None without a gold answer.

    belief: how likely an answer is after what was seen. nats: the difference of mean log-probabilities instead, which
    has no bounds. per_turn: without it the sum alone, p_K − p_1, for which an episode is asked about twice.

    >>> def belief(pairs): return [-float("clue" not in str(seen.messages)) for seen, _ in pairs]
    >>> gain = InformationGain(belief, nats=True)
    >>> from palestra.types import StopReason, Turn
    >>> ask, look, see, say = ({"role": "user", "content": t} for t in ("?", "look", "a clue", "4"))
    >>> turns = (Turn((), (ask,), look, "eos"), Turn((), (see,), say, "eos"))
    >>> gain(trajectories=[Trajectory(turns, StopReason.ENV_TERMINATED)], answer=["4"])
    [PerTurn(values=(1.0, 0.0))]
    """

    def __init__(self, belief: Belief, *, nats: bool = False, per_turn: bool = True) -> None:
        self.belief = belief
        self.nats = nats
        self.per_turn = per_turn

    def __call__(
        self, trajectories: Sequence[Trajectory], answer: Sequence[Any], **_: Any
    ) -> list[float | PerTurn | None]:
        asked: dict[_Key, tuple[Seen, str]] = {}
        rows: list[list[_Key]] = []
        for trajectory, gold in zip(trajectories, answer, strict=True):
            seen = [] if gold is None else list(before_actions(trajectory))
            if not self.per_turn:
                seen = [*seen[:1], *seen[-1:]]
            keys = [(repr(s.messages), s.tokens.tobytes(), str(gold)) for s in seen]
            asked |= {key: (s, str(gold)) for key, s in zip(keys, seen, strict=True)}
            rows.append(keys)
        # Members of a group begin alike: what they begin with is asked once.
        found = dict(zip(asked, self.belief(list(asked.values())), strict=True)) if asked else {}
        return [self._gain(found, keys) for keys in rows]

    def _gain(self, found: Mapping[_Key, float | None], keys: Sequence[_Key]) -> float | PerTurn | None:
        beliefs = [b for key in keys if (b := found[key]) is not None]
        if not keys or len(beliefs) < len(keys):
            return None
        levels = beliefs if self.nats else [math.exp(b) for b in beliefs]
        gains = [after - before for before, after in pairwise(levels)]
        return PerTurn((*gains, 0.0)) if self.per_turn else gains[0]


def before_actions(trajectory: Trajectory) -> Iterator[Seen]:
    """For each turn, what the model had seen when it acted."""
    messages: list[Message] = []
    tokens: list[IntArray] = [np.zeros(0, np.int32)]
    for turn in trajectory.turns:
        own = [s.author is Author.MODEL for s in turn.spans].index(True) if turn.sampled_tokens else len(turn.spans)
        shown = [s.tokens for s in turn.spans[:own]]
        yield Seen((*messages, *turn.observation), np.concatenate([*tokens, *shown]))
        messages += [*turn.observation, turn.action]
        tokens += [s.tokens for s in turn.spans]


def by_policy(name: str, entry: float | Mapping[str, Any], instead: str) -> float | dict[str, Any]:
    """A part of a config's ``rewards``; one that the policy itself measures, with the function ``instead``.

    >>> by_policy("information_gain", 0.5, "nothing")
    {'weight': 0.5, 'function': 'nothing'}
    """
    given: dict[str, Any] = dict(entry) if isinstance(entry, Mapping) else {"weight": entry}
    if given.get("function", name) != "information_gain" or given.get("path", POLICY) != POLICY:
        return given
    return {k: v for k, v in given.items() if k in ("weight", "gate")} | {"function": instead}


@FACTORIES.register("information_gain")
def information_gain(
    path: str = POLICY,
    scale: str = "probability",
    per_turn: bool = True,
    lead: str = "The answer is ",
    renderer: str = "chat",
    dtype: str = "float32",
    device: str = "auto",
    micro_batch_tokens: int = 8192,
    policy: LoadedModel | None = None,
) -> RewardFunction:
    """How much nearer each turn's observation brought the right answer (:class:`InformationGain`).

    path: who measures: ``policy``, the model in training with the weights of the moment, on the very tokens that it
    saw; or a fixed observer, any causal LM as ``model.path`` names one (that path itself: the policy's frozen
    beginning). scale: ``probability``, from −1 to 1, or ``nats`` per token of the answer. per_turn: pay each turn its
    own gain; false asks only about first and last. lead: how the reply begins before the answer; spaces at its end are
    the answer's. renderer, dtype and device are an observer's: ``chat`` (its own template, without schemas of tools) or
    ``plain``. Where a context was rewritten, the turns of the last one are paid. What is longer than the model's
    context is not scored (None).
    """
    from palestra.reward.observer import fixed_belief, policy_belief

    if scale not in SCALES:
        raise ConfigError(f"information_gain: scale is {scale!r}; choose 'probability' or 'nats'")
    if path != POLICY:
        belief = fixed_belief(path, renderer, lead, dtype=dtype, device=device, micro_batch_tokens=micro_batch_tokens)
    elif policy is not None:
        belief = policy_belief(policy, lead, micro_batch_tokens=micro_batch_tokens)
    else:
        raise ConfigError(
            "information_gain: path is 'policy', and no model whose weights stand still is at hand here (recorded "
            "episodes, an endpoint that takes text, train.max_staleness above 0); name a model as `path`"
        )
    return InformationGain(belief, nats=scale == "nats", per_turn=per_turn)
