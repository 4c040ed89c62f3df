# SPDX-License-Identifier: Apache-2.0
"""A server that speaks OpenAI's protocol over HTTP: where it is, one try, and what a failure means."""

from __future__ import annotations

import functools
import http.client
import json
import os
import random
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pydantic
from pydantic import Field

from palestra.config import Config
from palestra.errors import ConfigError, PalestraError

REFUSED = {401: "the key is missing or wrong", 403: "the key may not do this", 404: "no such address or model"}
AGAIN = (408, 409, 429, 500, 502, 503, 504)
LONGEST_WAIT_S = 60.0
LARGEST_REPLY_BYTES = 64 << 20


class EndpointError(PalestraError):
    """No usable reply, after all tries."""


class Later(Exception):
    """A try that failed where another may not. told_s: how long the server says to wait, if it does."""

    def __init__(self, said: str, told_s: float | None = None) -> None:
        super().__init__(said)
        self.told_s = told_s

    def wait_s(self, attempt: int) -> float:
        """Seconds before the try after this one: 0.5, 1, 2 … with some chance in it, or as long as the server says."""
        return self.told_s if self.told_s is not None else 0.5 * 2**attempt * random.uniform(0.8, 1.2)


class Server(Config):
    """Where a model answers.

    url: base address, as in ``http://localhost:8000/v1``. api_key_env: the environment variable that holds the key
    (none is sent when it is empty). timeout_s: of one try, from its beginning to the last byte. retries: after a failed
    connection, a time-out, a reply that cannot be read, or a status that says "later" (429, 5xx).
    """

    url: str
    api_key_env: str = "OPENAI_API_KEY"
    timeout_s: float = Field(default=60.0, gt=0)
    retries: int = Field(default=3, ge=0)

    @pydantic.field_validator("url")
    @classmethod
    def _address(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError("is no address; write it as http://host:port/v1")
        return value

    def once(self, path: str, body: Mapping[str, Any]) -> Any:
        """One ``POST {url}/{path}``: the reply's JSON. Raises Later where another try may help, EndpointError where
        none will, ConfigError for what no repetition can mend."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.api_key_env):
            headers["Authorization"] = f"Bearer {key}"
        address = f"{self.url.rstrip('/')}/{path}"
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)
        # Nothing that runs on this machine is behind a proxy, whatever the environment says.
        near = urllib.parse.urlsplit(address).hostname in ("localhost", "127.0.0.1", "::1")
        with Deadline(self.timeout_s) as deadline:
            kinds = (_Plain(deadline), _Secure(deadline), *([urllib.request.ProxyHandler({})] if near else []))
            try:
                with urllib.request.build_opener(*kinds).open(request, timeout=self.timeout_s) as reply:
                    return _content(reply)
            except urllib.error.HTTPError as error:
                with error:
                    said = f"HTTP {error.code}: {_reason(error)}"
                if error.code in REFUSED:
                    raise ConfigError(f"{self.url} refuses ({REFUSED[error.code]}): {said}") from None
                if error.code not in AGAIN:
                    raise EndpointError(f"{self.url}: {said}") from None
                raise Later(said, _retry_after(error)) from None
            except _BROKEN as error:
                if deadline.struck:
                    raise Later(f"TimeoutError: no whole reply within {self.timeout_s:g} s") from None
                raise Later(f"{type(error).__name__}: {_one_line(error)}") from None

    def gave_up(self, last: Later | None) -> EndpointError:
        """What to raise after the last try."""
        return EndpointError(f"{self.url}: no reply after {self.retries + 1} tries; the last: {last}")


_BROKEN = (OSError, ValueError, RecursionError, http.client.HTTPException)
"""No connection, a time-out, a reply that is cut, is no HTTP, or is no JSON that can be read."""


class Deadline:
    """Ends the connections of one try when its time is up, however slowly bytes keep coming: a socket's own timeout
    begins anew with each of them. struck: whether it did."""

    def __init__(self, seconds: float) -> None:
        self.struck = False
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._strike)
        self._timer.daemon = True

    def __enter__(self) -> Deadline:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def watch(self, connection: socket.socket) -> None:
        """A connection of the try."""
        with self._lock:
            self._sockets.append(connection)
        if self.struck:
            self._strike()

    def _strike(self) -> None:
        self.struck = True
        with self._lock:
            for connection in self._sockets:
                with suppress(OSError):  # closed meanwhile
                    connection.shutdown(socket.SHUT_RDWR)


class _PlainConnection(http.client.HTTPConnection):
    deadline: Deadline

    def connect(self) -> None:
        super().connect()
        self.deadline.watch(self.sock)


class _SecureConnection(http.client.HTTPSConnection):
    deadline: Deadline

    def connect(self) -> None:
        super().connect()
        self.deadline.watch(self.sock)


def _made(
    kind: type[_PlainConnection | _SecureConnection], deadline: Deadline, *args: Any, **options: Any
) -> http.client.HTTPConnection:
    connection = kind(*args, **options)
    connection.deadline = deadline
    return connection


class _Plain(urllib.request.HTTPHandler):
    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self._make = functools.partial(_made, _PlainConnection, deadline)

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._make, req)


class _Secure(urllib.request.HTTPSHandler):
    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self._make = functools.partial(_made, _SecureConnection, deadline)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._make, req)


def _content(reply: Any) -> Any:
    read = reply.read(LARGEST_REPLY_BYTES + 1)
    if len(read) > LARGEST_REPLY_BYTES:
        raise ValueError(f"the reply is larger than {LARGEST_REPLY_BYTES >> 20} MB")
    if reply.length:
        raise http.client.IncompleteRead(read, reply.length)
    return json.loads(read)


def _one_line(error: BaseException) -> str:
    """What an error says, without its line breaks and not for pages."""
    return " ".join(str(error).split())[:200]


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return " ".join(error.read(2000).decode("utf-8", "replace").split())[:200] or str(error.reason)
    except (OSError, http.client.HTTPException):
        return str(error.reason)


def _retry_after(error: urllib.error.HTTPError) -> float | None:
    try:
        return min(LONGEST_WAIT_S, max(0.0, float(error.headers.get("Retry-After", ""))))
    except ValueError:
        return None
