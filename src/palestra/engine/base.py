# SPDX-License-Identifier: Apache-2.0
"""What an engine is: tokens in, tokens out. Nothing here knows a chat template or an environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from palestra.errors import ConfigError
from palestra.types import IntArray, Span


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is sampled.

    max_new_tokens: upper bound on sampled tokens. temperature: T of softmax(logits / T); 0 = greedy, whose
    log-probs are reported at T = 1. stop: strings looked for in the *decoded* text, wherever the tokenizer
    splits them; the token that straddles the end of one stays in the span. stop_token_ids: ids that end the
    generation (``eos``); the id itself is part of the span. seed: 64-bit key of the request's counter-based
    noise: token i of a request with key k always meets the same uniform number, whatever else is in the batch.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if self.temperature < 0:
            raise ConfigError(f"temperature is {self.temperature}; use 0 for greedy or a positive number")
        if not 0 < self.top_p <= 1 or self.top_k < 0 or not 0 <= self.min_p < 1:
            raise ConfigError("need 0 < top_p <= 1, top_k >= 0 and 0 <= min_p < 1")

    @property
    def truncated(self) -> bool:
        """True when part of the distribution is cut off before sampling."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What was sampled: one span per policy version that took part (one, unless weights changed meanwhile).

    finish_reason: ``eos`` (a stop token id), ``stop`` (a stop string), ``length`` or ``abort``.
    text: the decoded completion without special end tokens; a stop string is cut off unless
    ``include_stop_str_in_output``. The spans keep every sampled token either way.
    """

    spans: tuple[Span, ...]
    finish_reason: str
    text: str


class Engine(Protocol):
    """Samples completions of token prompts. Async, safe to call from many tasks of one event loop.

    ``session`` names an episode's view: its cache is kept between turns until :meth:`release`.
    ``version`` is the policy version that the next sampled token will carry.
    """

    @property
    def version(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    async def sample(self, prompt: IntArray, params: SamplingParams, *, session: str) -> Completion: ...

    def release(self, session: str) -> None:
        """The session is over; its cache may go. Unknown sessions are ignored."""
        ...

    def load_weights(self, policy: Any, version: int) -> None:
        """Take over the policy's weights; cached keys and values of older versions are not used again."""
        ...

    def close(self) -> None: ...
