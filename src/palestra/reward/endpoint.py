# SPDX-License-Identifier: Apache-2.0
"""A chat model behind an OpenAI-compatible HTTP endpoint: messages in, text out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from palestra.server import EndpointError as EndpointError
from palestra.server import Later, Server
from palestra.types import Message


class ChatEndpoint(Server):
    """Where a chat model answers: ``POST {url}/chat/completions``.

    The address and its retries are those of :class:`~palestra.server.Server`; temperature and max_tokens go with each
    request.
    """

    model: str
    temperature: float = Field(default=0.0, ge=0)
    max_tokens: int = Field(default=1024, ge=1)

    def complete(self, messages: Sequence[Message]) -> str:
        """The reply's text. Raises EndpointError, or ConfigError for what no repetition can mend."""
        body = {
            "model": self.model,
            "messages": list(messages),
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        last: Later | None = None
        for attempt in range(self.retries + 1):
            try:
                return _text(self.once("chat/completions", body))
            except Later as problem:
                last = problem
            if attempt < self.retries:
                time.sleep(last.wait_s(attempt))
        raise self.gave_up(last)


def _text(reply: Any) -> str:
    try:
        text = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise Later("ValueError: the reply has no choices[0].message.content") from None
    if not isinstance(text, str):
        raise Later(f"ValueError: the reply's content is a {type(text).__name__}")
    return text
