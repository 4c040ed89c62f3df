# SPDX-License-Identifier: Apache-2.0
"""A server that is down, slow, or talks nonsense costs its tries and no more: in time, and as one line."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from palestra.errors import ConfigError
from palestra.server import EndpointError, Later, Server

OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s"


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server whose every connection ``answer`` is given once a request is there."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection, suppress(OSError):
                    while not connection.recv(65536).endswith(b"{}"):  # the whole request
                        pass
                    answer(connection)
                    connection.shutdown(socket.SHUT_WR)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    finally:
        listening.close()


def bytes_of(content: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(content)


def drip(head: bytes) -> Callable[[socket.socket], None]:
    """A byte every 20 ms: no single wait is long, and the whole has no end."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(head)
        for _ in range(500):
            connection.sendall(b"x")
            time.sleep(0.02)

    return answer


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{", b"HTTP/1.1 200 OK\r\nA: ", b""],
    ids=["in the body", "in a header", "in the status"],
)  # fmt: skip
def test_a_try_ends_in_its_time_also_where_bytes_keep_coming(head: bytes) -> None:
    began = time.monotonic()
    with answering(drip(head)) as url, pytest.raises(Later, match=r"TimeoutError: no whole reply within 0\.3 s"):
        Server(url=url, timeout_s=0.3).once("completions", {})
    assert 0.25 < time.monotonic() - began < 3


def test_a_try_ends_in_its_time_where_nothing_comes() -> None:
    with answering(lambda _: time.sleep(2)) as url, pytest.raises(Later, match=r"TimeoutError|timed out"):
        Server(url=url, timeout_s=0.2).once("completions", {})


DEEP = b"[" * 200_000


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\x00\x01 no HTTP at all\r\n\r\n", "BadStatusLine"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n", "HTTPException: got more than 100 headers"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70_000, "LineTooLong"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{", "IncompleteRead"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "IncompleteRead|ValueError"),
        (b"", "RemoteDisconnected"),
        (OK % (5, b"{'a':"), "JSONDecodeError"),
        (OK % (2, b"\xff\xfe"), "UnicodeDecodeError|JSONDecodeError"),
        (OK % (len(DEEP), DEEP), "RecursionError"),
        (b"HTTP/1.1 500 no\r\nContent-Length: 99\r\n\r\ncut", "HTTP 500"),
    ],
    ids=["garbage", "headers", "long header", "cut", "chunks", "closed", "no JSON", "no UTF-8", "deep", "500"],
)  # fmt: skip
def test_nonsense_is_a_try_that_failed(content: bytes, told: str) -> None:
    with answering(bytes_of(content)) as url, pytest.raises(Later, match=told) as caught:
        Server(url=url, timeout_s=5).once("completions", {})
    assert "\n" not in str(caught.value)


def test_what_no_repetition_can_mend_is_not_repeated() -> None:
    with answering(bytes_of(b"HTTP/1.1 404 no\r\nContent-Length: 0\r\n\r\n")) as url, pytest.raises(ConfigError):
        Server(url=url).once("completions", {})
    bad = bytes_of(b"HTTP/1.1 400 no\r\nContent-Length: 3\r\n\r\nbad")
    with answering(bad) as url, pytest.raises(EndpointError, match="HTTP 400: bad"):
        Server(url=url).once("completions", {})


def test_a_good_reply_is_read_and_leaves_no_timer_behind() -> None:
    before = threading.active_count()
    with answering(bytes_of(OK % (8, b'{"a": 1}'))) as url:
        assert Server(url=url, timeout_s=30).once("completions", {}) == {"a": 1}
    time.sleep(0.05)
    assert threading.active_count() <= before + 1, "that of the server above may still be there"
