# SPDX-License-Identifier: Apache-2.0
"""How a request ends: the completion that it is, or the failure, told to the coroutine that waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from palestra.engine.base import Completion
from palestra.engine.scheduler import Request
from palestra.types import Author, Span


def completion(request: Request, reason: str, decode: Callable[[Sequence[int]], str]) -> Completion:
    """What was sampled for a request that ends for this ``reason``, one span per version that took part."""
    tokens = np.asarray(request.slot.tokens[len(request.slot.tokens) - request.sampled :], np.int32)
    body = tokens[:-1] if reason == "eos" else tokens
    text = decode(body.tolist())
    if reason == "stop" and request.stops is not None:
        text = request.stops.text(include_stop=request.params.include_stop_str_in_output)
    spans = tuple(
        Span(
            tokens[a:b],
            Author.MODEL,
            "assistant",
            decode(tokens[a:b].tolist()),
            logprobs=np.asarray(request.logprobs[a:b], np.float32),
            version=request.versions[a],
            kept_logmass=np.asarray(request.kept[a:b], np.float32) if request.params.truncated else None,
        )
        for a, b in _runs(request.versions)
    )
    return Completion(spans, reason, text)


def resolve(request: Request, said: Completion) -> None:
    """Hand the completion over, from any thread."""

    def deliver() -> None:
        if not request.future.done():
            request.future.set_result(said)

    request.loop.call_soon_threadsafe(deliver)


def reject(request: Request, error: Exception) -> None:
    """Let the request fail, from any thread; a loop that is closed has nobody left who waits."""

    def deliver() -> None:
        if not request.future.done():
            request.future.set_exception(error)

    if not request.loop.is_closed():
        request.loop.call_soon_threadsafe(deliver)


def _runs(values: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, end) of the runs of equal values.

    >>> list(_runs([4, 4, 5]))
    [(0, 2), (2, 3)]
    """
    start = 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] != values[start]:
            yield start, i
            start = i


__all__ = ["completion", "reject", "resolve"]
