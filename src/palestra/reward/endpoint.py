# SPDX-License-Identifier: Apache-2.0
"""A chat model behind an OpenAI-compatible HTTP endpoint: messages in, text out."""

from __future__ import annotations

import json
import os
import random
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any

import pydantic
from pydantic import Field

from palestra.config import Config
from palestra.errors import ConfigError, PalestraError
from palestra.types import Message

REFUSED = {401: "the key is missing or wrong", 403: "the key may not do this", 404: "no such address or model"}
AGAIN = (408, 409, 429, 500, 502, 503, 504)
LONGEST_WAIT_S = 60.0


class EndpointError(PalestraError):
    """No usable reply, after all tries."""


class ChatEndpoint(Config):
    """Where a chat model answers: ``POST {url}/chat/completions``.

    url: base address, as in ``http://localhost:8000/v1``. api_key_env: the environment variable that holds the
    key (none is sent when it is empty). timeout_s: of one try. retries: after a failed connection, a time-out, or
    a status that says "later" (429, 5xx), waiting 0.5, 1, 2 … s or as long as the server says.
    """

    url: str
    model: str
    api_key_env: str = "OPENAI_API_KEY"
    temperature: float = Field(default=0.0, ge=0)
    max_tokens: int = Field(default=1024, ge=1)
    timeout_s: float = Field(default=60.0, gt=0)
    retries: int = Field(default=3, ge=0)

    @pydantic.field_validator("url")
    @classmethod
    def _address(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError("is no address; write it as http://host:port/v1")
        return value

    def complete(self, messages: Sequence[Message]) -> str:
        """The reply's text. Raises EndpointError, or ConfigError for what no repetition can mend."""
        body = {
            "model": self.model,
            "messages": list(messages),
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        for attempt in range(self.retries + 1):
            try:
                return _text(self._post(body))
            except urllib.error.HTTPError as error:
                said, wait_s = f"HTTP {error.code}: {_reason(error)}", _retry_after(error)
                if error.code in REFUSED:
                    raise ConfigError(f"{self.url} refuses ({REFUSED[error.code]}): {said}") from None
                if error.code not in AGAIN:
                    raise EndpointError(f"{self.url}: {said}") from None
            except (OSError, ValueError) as error:  # no connection, a time-out, a reply that is no JSON
                said, wait_s = f"{type(error).__name__}: {error}", None
            if attempt < self.retries:
                time.sleep(wait_s if wait_s is not None else 0.5 * 2**attempt * random.uniform(0.8, 1.2))
        raise EndpointError(f"{self.url}: no reply after {self.retries + 1} tries; the last: {said}")

    def _post(self, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.api_key_env):
            headers["Authorization"] = f"Bearer {key}"
        address = f"{self.url.rstrip('/')}/chat/completions"
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)
        # Nothing that runs on this machine is behind a proxy, whatever the environment says.
        near = urllib.parse.urlsplit(address).hostname in ("localhost", "127.0.0.1", "::1")
        opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if near else []))
        with opener.open(request, timeout=self.timeout_s) as reply:
            return json.load(reply)


def _text(reply: Any) -> str:
    try:
        text = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise ValueError("the reply has no choices[0].message.content") from None
    if not isinstance(text, str):
        raise ValueError(f"the reply's content is a {type(text).__name__}")
    return text


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return " ".join(error.read(2000).decode("utf-8", "replace").split())[:200] or str(error.reason)
    except OSError:
        return str(error.reason)


def _retry_after(error: urllib.error.HTTPError) -> float | None:
    try:
        return min(LONGEST_WAIT_S, max(0.0, float(error.headers.get("Retry-After", ""))))
    except ValueError:
        return None
