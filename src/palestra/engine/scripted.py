# SPDX-License-Identifier: Apache-2.0
"""The public double: an engine that says what it is told, so that an environment is tested in milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from palestra.engine.base import Completion, SamplingParams
from palestra.engine.stops import StopFinder
from palestra.errors import EngineError
from palestra.types import Author, FloatArray, IntArray, Span


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...


Line = str | Sequence[int] | tuple[Sequence[int], Sequence[float]]
"""What is said in one turn: a text, token ids, or (ids, log-probs)."""
Script = Sequence[str | Sequence[int]] | Callable[[IntArray, SamplingParams, str], Line]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One call of :meth:`ScriptedEngine.sample` and what it answered."""

    session: str
    prompt: IntArray
    params: SamplingParams
    completion: Completion

    @property
    def sequence(self) -> list[int]:
        """Prompt and completion: every token this call leaves in the engine's context."""
        return [*self.prompt.tolist(), *(int(t) for s in self.completion.spans for t in s.tokens)]


class ScriptedEngine:
    """An Engine that plays a script instead of a model.

    script: one line per turn, for every session from the start, or ``(prompt, params, session) -> line``. A line is
    a text, a list of token ids, or (ids, log-probs). A text is the whole reply, so the first of the request's stop
    ids is added as its end; token ids are taken as they are, and end with ``length`` when nothing in them ends the
    turn. Stop ids, stop strings, ``max_new_tokens`` and ``max_context`` cut it as they would cut a model.
    ``requests`` keeps every call, ``released`` every session that was let go. delay_s: how long each call takes.

    Raises EngineError when the script has no line left, or no token fits into the context.

    >>> from palestra.model.testing import ByteTokenizer
    >>> engine = ScriptedEngine(["<answer>4</answer> and on"], ByteTokenizer())
    >>> ask = np.array(ByteTokenizer().encode("2+2?"))
    >>> params = SamplingParams(max_new_tokens=50, stop=("</answer>",))
    >>> said = asyncio.run(engine.sample(ask, params, session="a"))
    >>> said.text, said.finish_reason
    ('<answer>4', 'stop')
    """

    def __init__(
        self, script: Script, tokenizer: Tokenizer, *, max_context: int = 4096, version: int = 0, delay_s: float = 0.0
    ) -> None:
        self.requests: list[Request] = []
        self.released: list[str] = []
        self._script = script
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._version = version
        self._delay_s = delay_s
        self._turns: dict[str, int] = {}

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_context(self) -> int:
        return self._max_context

    async def sample(self, prompt: IntArray, params: SamplingParams, *, session: str) -> Completion:
        await asyncio.sleep(self._delay_s)
        room = min(params.max_new_tokens, self._max_context - len(prompt))
        if room < 1:
            raise EngineError(f"a prompt of {len(prompt)} tokens leaves no room in a context of {self._max_context}")
        ids, logprobs = self._line(prompt, params, session)
        count, finish_reason, finder = self._cut(ids, params, room)
        tokens = np.asarray(ids[:count], dtype=np.int32)
        span = Span(
            tokens,
            Author.MODEL,
            "assistant",
            self._decode(ids[:count]),
            _logprobs(tokens, len(prompt)) if logprobs is None else np.asarray(logprobs[:count], np.float32),
            self._version,
            np.full(count, -0.125, np.float32) if params.truncated else None,
        )
        text = finder.text(include_stop=params.include_stop_str_in_output)
        completion = Completion((span,), finish_reason, text)
        self.requests.append(Request(session, np.array(prompt, np.int32), params, completion))
        return completion

    def release(self, session: str) -> None:
        self.released.append(session)
        self._turns.pop(session, None)

    def load_weights(self, policy: Any, version: int) -> None:
        """The script stays; only the version that sampled tokens carry changes."""
        self._version = version

    def close(self) -> None:
        """Nothing is held."""

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _line(self, prompt: IntArray, params: SamplingParams, session: str) -> tuple[list[int], Sequence[float] | None]:
        """The next line as ids, with log-probs when the script names them."""
        line: Line
        if callable(self._script):
            line = self._script(prompt, params, session)
        else:
            turn = self._turns.get(session, 0)
            self._turns[session] = turn + 1
            if turn >= len(self._script):
                raise EngineError(f"the script has {len(self._script)} lines; session {session!r} asked for one more")
            line = self._script[turn]
        if isinstance(line, str):
            return [*self._tokenizer.encode(line, add_special_tokens=False), *params.stop_token_ids[:1]], None
        if isinstance(line, tuple) and len(line) == 2 and not isinstance(line[0], int):
            ids, logprobs = line
            return list(ids), logprobs
        return list(line), None

    def _cut(self, ids: Sequence[int], params: SamplingParams, room: int) -> tuple[int, str, StopFinder]:
        """How many tokens are said, why they end there, and the finder that read them."""
        finder = StopFinder(self._decode, params.stop)
        for count, token in enumerate(ids[:room], start=1):
            if token in params.stop_token_ids:
                return count, "eos", finder
            if finder.push(token):
                return count, "stop", finder
        return min(len(ids), room), "length", finder


def _logprobs(tokens: IntArray, start: int) -> FloatArray:
    """float32[n]: made up, but a pure function of token and position, in [-2, -0.002]."""
    position = np.arange(start, start + len(tokens), dtype=np.int64)
    return (-(1 + (tokens.astype(np.int64) * 7919 + position * 104729) % 1000) / 500).astype(np.float32)
