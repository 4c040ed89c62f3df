# SPDX-License-Identifier: Apache-2.0
"""A model behind an OpenAI-compatible server, to be evaluated, not trained: its weights are elsewhere.

Two ways in. ``api: completions`` sends token ids to ``/completions`` and takes the sampled ids back, where the server
gives them (vLLM, SGLang): tokens are exact, as in our own engine. ``api: chat`` sends messages to ``/chat/completions``
(any server) and gets text; see ``openai_chat.py``. What is sampled here carries version -1 in either case, which
training takes for stale.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import Field

from palestra.engine.base import Completion, SamplingParams
from palestra.env.threads import run_on_thread
from palestra.errors import ConfigError, EngineError
from palestra.server import EndpointError, Later, Server
from palestra.types import Author, IntArray, Span

FOREIGN = -1
"""The policy version of what a server sampled: older than any of ours."""
REASONS = {"stop": "eos", "length": "length", "tool_calls": "eos", "content_filter": "abort", "abort": "abort"}
"""How a server says that a reply ended → how we say it."""
_TOKEN_ID = re.compile(r"token_id:(\d+)")


class EndpointConfig(Server):
    """Where a model answers.

    url: base address, as in ``http://localhost:8000/v1``. api: ``chat`` (messages) or ``completions`` (token ids; the
    tokenizer is that of ``model``). model: its name on the server; left out, the config's ``model.path``. api_key_env:
    the environment variable that holds the key (none is sent when it is empty). timeout_s: of one try. retries: after a
    failed connection, a time-out, or a status that says "later" (429, 5xx). max_context: of ``completions``, in tokens.
    extra_body: further fields of each request, for what only this server knows.
    """

    shorthand = "url"
    api: Literal["chat", "completions"] = "chat"
    model: str | None = None
    timeout_s: float = Field(default=120.0, gt=0)
    max_context: int = Field(default=32768, ge=2)
    extra_body: dict[str, Any] = Field(default_factory=dict)


@dataclass(slots=True)
class Usage:
    """What the server counted, over all requests."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, reply: Any) -> None:
        told = reply.get("usage") if isinstance(reply, Mapping) else None
        self.requests += 1
        for name in ("prompt_tokens", "completion_tokens"):
            value = told.get(name) if isinstance(told, Mapping) else None
            setattr(self, name, getattr(self, name) + (value if isinstance(value, int) else 0))


class Endpoint:
    """Posts to a server, tries again where that may help, and counts what was used."""

    def __init__(self, config: EndpointConfig) -> None:
        self.config = config
        self.usage = Usage()

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The reply's JSON. Raises EngineError after the last try, ConfigError for what no repetition can mend."""
        config, last = self.config, None
        for attempt in range(config.retries + 1):
            try:
                reply = await run_on_thread(config.once, path, {**body, **config.extra_body})
                self.usage.add(reply)
                return reply
            except Later as problem:
                last = problem
            except EndpointError as problem:
                raise EngineError(str(problem)) from None
            if attempt < config.retries:
                await asyncio.sleep(last.wait_s(attempt))
        raise EngineError(str(config.gave_up(last)))


class EndpointEngine:
    """What the two engines share: nothing is cached here, and no weights can be loaded."""

    def __init__(self, config: EndpointConfig, model: str) -> None:
        self.endpoint = Endpoint(config)
        self.model = config.model or model

    @property
    def version(self) -> int:
        return FOREIGN

    def release(self, session: str) -> None:
        """Servers keep their own caches."""

    def load_weights(self, policy: Any, version: int) -> None:
        """Raises EngineError: the weights are the server's."""
        raise EngineError(f"{self.endpoint.config.url} has weights of its own; it can be evaluated, not trained")

    def close(self) -> None:
        """Nothing is held."""

    def request(self, params: SamplingParams) -> dict[str, Any]:
        """The fields of a request that both addresses share; those that only some servers know, where they are set."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "seed": params.seed % 2**31,
        }
        cuts = {"top_p": (params.top_p, 1.0), "top_k": (params.top_k, 0), "min_p": (params.min_p, 0.0)}
        return body | {name: value for name, (value, off) in cuts.items() if value != off}


class CompletionsEngine(EndpointEngine):
    """An :class:`~palestra.engine.base.Engine` over ``POST {url}/completions`` with token ids in and out.

    decode: token ids → text, special tokens included, by the tokenizer that the server uses. The log-probs are those
    the server reports, 0 where it reports none.
    """

    def __init__(self, config: EndpointConfig, model: str, decode: Callable[[Sequence[int]], str]) -> None:
        super().__init__(config, model)
        self._decode = decode

    @property
    def max_context(self) -> int:
        return self.endpoint.config.max_context

    async def sample(self, prompt: IntArray, params: SamplingParams, *, session: str) -> Completion:
        body = self.request(params) | {
            "prompt": [int(i) for i in prompt],
            "stop": list(params.stop),
            "stop_token_ids": list(params.stop_token_ids),
            "include_stop_str_in_output": True,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        reply = await self.endpoint.post("completions", body)
        choice = choice_of(reply, self.endpoint.config.url)
        self._check_prompt(body["prompt"], choice.get("prompt_token_ids", reply.get("prompt_token_ids")))
        ids = self._ids(choice)
        ended = bool(ids) and ids[-1] in params.stop_token_ids
        text = self._decode(ids[:-1] if ended else ids)
        stop = first_stop(text, params.stop)
        reason = (
            "eos" if ended else "stop" if stop is not None else REASONS.get(str(choice.get("finish_reason")), "eos")
        )
        span = Span(
            np.asarray(ids, np.int32),
            Author.MODEL,
            "assistant",
            self._decode(ids),
            np.asarray(_logprobs(choice, len(ids)), np.float32),
            FOREIGN,
        )
        if stop is not None and not ended:
            text = text[: stop[1] if params.include_stop_str_in_output else stop[0]]
        return Completion((span,), reason, text)

    def _check_prompt(self, sent: list[int], answered: Any) -> None:
        """Where the server says what it has read: a reply to another request, or to a cut prompt, is no reply."""
        if answered is not None and answered != sent:
            raise EngineError(
                f"{self.endpoint.config.url} answers another prompt than it was sent ({len(sent)} tokens): it mixes up "
                "requests, or cuts or changes prompts"
            )

    def _ids(self, choice: Mapping[str, Any]) -> list[int]:
        given = choice.get("token_ids")
        if isinstance(given, list):
            return [int(i) for i in given]
        tokens = (choice.get("logprobs") or {}).get("tokens") or []
        found = [_TOKEN_ID.fullmatch(str(token)) for token in tokens]
        if not found or not all(found):
            raise ConfigError(
                f"{self.endpoint.config.url} gives no token ids of what it sampled; set endpoint.api=chat, which needs "
                "none"
            )
        return [int(m[1]) for m in found if m is not None]


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Where the first of the stop strings to end stands: (start, end), or None.

    >>> first_stop("a</b>c</d>", ["</d>", "</b>"])
    (1, 5)
    """
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return (min(found)[1], min(found)[0]) if found else None


def choice_of(reply: Any, url: str) -> Mapping[str, Any]:
    try:
        choice = reply["choices"][0]
    except (KeyError, IndexError, TypeError):
        choice = None
    if not isinstance(choice, Mapping):
        raise EngineError(f"{url}: the reply has no choices[0]")
    return choice


def _logprobs(choice: Mapping[str, Any], count: int) -> list[float]:
    told = (choice.get("logprobs") or {}).get("token_logprobs") or []
    return [float(v or 0.0) for v in told] if len(told) == count else [0.0] * count
