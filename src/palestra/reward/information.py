# SPDX-License-Identifier: Apache-2.0
"""An intrinsic reward: how much nearer an episode's observations brought the right answer.

Information gain as in arXiv:2510.14967 (IGPO): with p_k = exp(1/L · Σ_j log π(a_j | everything before action k, a_<j))
the probability of the gold answer a, of L tokens, as a geometric mean per token, turn k gains p_(k+1) − p_k. Over an
episode of K actions that sums to p_K − p_1, so two forward passes do; what the last action itself says is not counted,
for that is what accuracy judges. Unlike there, π is a fixed observer and not the policy in training: a gain means the
same all through a run, and a policy cannot earn it by growing sure of itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from palestra.errors import ConfigError
from palestra.reward.base import FACTORIES, RewardFunction
from palestra.types import Message, Trajectory

Belief = Callable[[Sequence[tuple[Sequence[Message], str]]], Sequence[float | None]]
"""(dialogue, answer) pairs → mean log-probability per token of each answer, in nats; None where it cannot be had."""

SCALES = ("probability", "nats")


class InformationGain:
    """p_K − p_1 of the gold answer: 0.0 for an episode of one action, None without a gold answer.

    belief: how likely an answer is after a dialogue. nats: the difference of mean log-probabilities instead, which has
    no bounds.

    >>> def belief(pairs): return [-float("clue" not in str(d)) for d, _ in pairs]
    >>> gain = InformationGain(belief, nats=True)
    >>> from palestra.types import StopReason, Turn
    >>> ask, look, see, say = ({"role": "user", "content": t} for t in ("?", "look", "a clue", "4"))
    >>> turns = (Turn((), (ask,), look, "eos"), Turn((), (see,), say, "eos"))
    >>> gain(trajectories=[Trajectory(turns, StopReason.ENV_TERMINATED)], answer=["4"])
    [1.0]
    """

    def __init__(self, belief: Belief, *, nats: bool = False) -> None:
        self.belief = belief
        self.nats = nats

    def __call__(self, trajectories: Sequence[Trajectory], answer: Sequence[Any], **_: Any) -> list[float | None]:
        asked: dict[tuple[str, str], tuple[Sequence[Message], str]] = {}
        rows: list[tuple[tuple[str, str], tuple[str, str]] | None] = []
        for trajectory, gold in zip(trajectories, answer, strict=True):
            if gold is None or not trajectory.turns:
                rows.append(None)
                continue
            pairs = [(dialogue, str(gold)) for dialogue in before_first_and_last_action(trajectory)]
            keys = [(repr(dialogue), text) for dialogue, text in pairs]
            asked |= dict(zip(keys, pairs, strict=True))
            rows.append((keys[0], keys[1]))
        # Members of a group begin alike: what they begin with is asked once.
        found = dict(zip(asked, self.belief(list(asked.values())), strict=True)) if asked else {}
        return [None if row is None else self._gain(found, *row) for row in rows]

    def _gain(
        self, found: Mapping[tuple[str, str], float | None], first: tuple[str, str], last: tuple[str, str]
    ) -> float | None:
        before, after = found[first], found[last]
        if before is None or after is None:
            return None
        return after - before if self.nats else math.exp(after) - math.exp(before)


def before_first_and_last_action(trajectory: Trajectory) -> tuple[list[Message], list[Message]]:
    """What the model had seen before its first action, and before its last."""
    first, *_, last = (*trajectory.turns[:1], *trajectory.turns)
    earlier = [m for turn in trajectory.turns[:-1] for m in (*turn.observation, turn.action)]
    return list(first.observation), [*earlier, *last.observation]


@FACTORIES.register("information_gain")
def information_gain(
    path: str,
    scale: str = "probability",
    lead: str = "The answer is",
    renderer: str = "chat",
    dtype: str = "float32",
    device: str = "auto",
    micro_batch_tokens: int = 8192,
) -> RewardFunction:
    """How much nearer an episode's observations brought the right answer (:class:`InformationGain`).

    path: the observer, any causal LM as ``model.path`` names one; the model that training starts from is a good one.
    scale: ``probability``, from −1 to 1, or ``nats`` per token of the answer. lead: how the observer begins its reply
    before the answer. renderer: ``chat`` (the observer's own template, without schemas of tools) or ``plain``. A
    dialogue that is longer than the observer's context is not scored (None).
    """
    if scale not in SCALES:
        raise ConfigError(f"information_gain: scale is {scale!r}; choose 'probability' or 'nats'")
    return InformationGain(_observer(path, lead, renderer, dtype, device, micro_batch_tokens), nats=scale == "nats")


def _observer(path: str, lead: str, renderer: str, dtype: str, device: str, micro_batch_tokens: int) -> Belief:
    """The belief of a language model."""
    import numpy as np
    import torch

    from palestra.chat import make_renderer
    from palestra.learn.batch import Rows, Sample, micro_batches, pack
    from palestra.learn.policy import Policy
    from palestra.model.loading import load_model

    loaded = load_model(path, dtype=dtype, device=device)
    shown = make_renderer(renderer, loaded.tokenizer, extra_stop_token_ids=loaded.stop_token_ids)
    policy = Policy(loaded.model)

    def encoded(text: str) -> list[int]:
        ids: list[int] = loaded.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def row(index: int, dialogue: Sequence[Message], answer: str) -> Sample | None:
        head = [*shown.render(dialogue, add_generation_prompt=True).token_ids, *encoded(lead)]
        gold = encoded(f" {answer}")
        tokens = np.asarray([*head, *gold], np.int32)
        if not gold or not 0 < len(head) < len(tokens) <= loaded.max_context:
            return None
        zeros = np.zeros(len(tokens), np.int32)
        return Sample(tokens, np.arange(len(tokens)) >= len(head), zeros.astype(np.float32), zeros, "", str(index), 0.0)

    def belief(pairs: Sequence[tuple[Sequence[Message], str]]) -> list[float | None]:
        made = {i: s for i, pair in enumerate(pairs) if (s := row(i, *pair)) is not None}
        rows, places = Rows(tuple(made.values())), list(made)
        weights = [np.zeros(len(s.tokens)) for s in rows.samples]
        found: list[float | None] = [None] * len(pairs)
        for indices in micro_batches(rows.samples, range(len(rows)), micro_batch_tokens):
            batch = pack(rows, weights, indices, device=policy.device)
            logprobs = policy.current_logprobs(batch)
            count = len(batch.indices)
            sums = torch.zeros(count, dtype=logprobs.dtype, device=logprobs.device)
            sums = sums.index_add(0, batch.sequence, logprobs)
            for i, mean in zip(batch.indices, (sums / batch.sequence.bincount(minlength=count)).tolist(), strict=True):
                found[places[i]] = mean
        return found

    return belief
