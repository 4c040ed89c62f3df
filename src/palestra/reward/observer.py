# SPDX-License-Identifier: Apache-2.0
"""How likely a language model finds an answer after what was seen: the beliefs that information gain is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from palestra.chat.base import text_encoder
from palestra.types import IntArray

if TYPE_CHECKING:
    from palestra.learn.batch import Sample
    from palestra.learn.policy import Policy
    from palestra.model.loading import LoadedModel
    from palestra.reward.information import Belief, Seen

Context = Callable[["Seen"], Sequence[int] | IntArray]
"""What was seen → the tokens that the model reads it as."""


def policy_belief(policy: LoadedModel, lead: str, *, micro_batch_tokens: int = 8192) -> Belief:
    """The belief of the model in training: its weights at the time of asking, the very tokens that it saw."""
    return _belief(policy, lambda seen: seen.tokens, lead, micro_batch_tokens)


def fixed_belief(
    path: str, renderer: str, lead: str, *, dtype: str, device: str, micro_batch_tokens: int = 8192
) -> Belief:
    """The belief of a model that stays as it is loaded; it reads the messages through its own template."""
    from palestra.chat import make_renderer
    from palestra.model.loading import load_model

    loaded = load_model(path, dtype=dtype, device=device)
    shown = make_renderer(renderer, loaded.tokenizer, extra_stop_token_ids=loaded.stop_token_ids)

    def context(seen: Seen) -> Sequence[int]:
        return shown.render(seen.messages, add_generation_prompt=True).token_ids

    return _belief(loaded, context, lead, micro_batch_tokens)


def _belief(loaded: LoadedModel, context: Context, lead: str, max_tokens: int) -> Belief:
    encode = text_encoder(loaded.tokenizer)
    begins = lead.rstrip(" ")
    beginning, space = encode(begins), lead[len(begins) :]  # tokenizers count a space to the word behind it

    def row(index: int, seen: Seen, answer: str) -> Sample | None:
        from palestra.learn.batch import Sample

        before, gold = context(seen), encode(space + answer)
        tokens = np.asarray([*before, *beginning, *gold], np.int32)
        if not len(before) or not gold or len(tokens) > loaded.max_context:
            return None
        zeros, asked = np.zeros(len(tokens), np.int32), np.arange(len(tokens)) >= len(tokens) - len(gold)
        return Sample(tokens, asked, zeros.astype(np.float32), zeros, "", str(index), 0.0)

    @cache
    def policy() -> Policy:
        # Not with the reward: it changes how the model attends, and a run checks its engine on the plain way first.
        from palestra.learn.policy import Policy

        return Policy(loaded.model)

    def belief(pairs: Sequence[tuple[Seen, str]]) -> list[float | None]:
        found: list[float | None] = [None] * len(pairs)
        made = {i: s for i, pair in enumerate(pairs) if (s := row(i, *pair)) is not None}
        for i, mean in zip(made, _means(policy(), list(made.values()), max_tokens), strict=True):
            found[i] = mean
        return found

    return belief


def _means(policy: Policy, samples: Sequence[Sample], max_tokens: int) -> list[float]:
    """Per sample the mean log-prob of the tokens that its mask marks. Those of one group share what they begin with, so
    an episode asked about before each of its actions is read once."""
    import torch

    from palestra.learn.batch import Rows, micro_batches, pack

    rows = Rows(tuple(samples))
    weights = [np.zeros(len(s.tokens)) for s in samples]
    means = [0.0] * len(samples)
    for indices in micro_batches(samples, range(len(samples)), max_tokens):
        batch = pack(rows, weights, indices, device=policy.device)
        logprobs = policy.current_logprobs(batch)
        sums = torch.zeros(len(indices), dtype=logprobs.dtype, device=logprobs.device)
        sums = sums.index_add(0, batch.sequence, logprobs)
        counts = batch.sequence.bincount(minlength=len(indices))
        for i, mean in zip(batch.indices, (sums / counts).tolist(), strict=True):
            means[i] = mean
    return means
