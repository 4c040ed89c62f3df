# SPDX-License-Identifier: Apache-2.0
"""Stop strings, found in decoded text wherever the tokenizer splits them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from palestra.errors import ConfigError

Decode = Callable[[Sequence[int]], str]

_UNFINISHED = "\ufffd"
# A UTF-8 character has at most four bytes and a token at least one, so the tokens of an unfinished character
# number at most three; whatever else waits with them is finished.
_CHARACTER_TOKENS = 4


class StopFinder:
    """Watches one completion token by token and says when a stop string is complete.

    decode: token ids → text, special tokens kept, no clean-up of spaces. stops: the strings. The first string to
    *end* wins; of two that end together, the longer. Only a few recent tokens are decoded at each step, so the
    work per token does not grow with the text. A character whose bytes are spread over tokens is held back until
    it is whole. Feed sampled tokens only, and not the end token that a stop id caught.

    >>> words = ["a", "b", "...", "c"]
    >>> finder = StopFinder(lambda ids: "".join(words[i] for i in ids), [".."])
    >>> [finder.push(token) for token in (0, 1, 2)]
    [False, False, True]
    >>> finder.text(), finder.text(include_stop=True), finder.found
    ('ab', 'ab..', '..')
    """

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        if any(not s for s in stops):
            raise ConfigError("a stop string is empty; every completion would end at once: remove it")
        self.found: str | None = None
        self._decode = decode
        self._stops = tuple(stops)
        self._reach = max((len(s) for s in stops), default=1) - 1  # characters a stop may reach back
        self._ids: list[int] = []
        self._context: list[int] = []  # the last finished chunk: decoders look at the left neighbour
        self._context_text = ""
        self._pending: list[int] = []
        self._pieces: list[str] = []
        self._length = 0
        self._tail = ""
        self._start = 0  # where the stop string found starts, in characters

    def push(self, token: int) -> bool:
        """Take the next sampled token; True when it completes a stop string. No more may follow then."""
        self._ids.append(token)
        if not self._stops:
            return False
        self._pending.append(token)
        fresh = self._fresh()
        whole = fresh.rstrip(_UNFINISHED)
        if self._search(whole):
            self._pieces.append(whole)
            return True
        if len(whole) == len(fresh):
            self._commit(fresh, len(self._pending))
        elif len(self._pending) > _CHARACTER_TOKENS:
            self._commit_garbage()
        return False

    def text(self, *, include_stop: bool = False) -> str:
        """The visible text: up to the stop string, or to its end with ``include_stop``; all of it when none came."""
        if self.found is None:
            return self._decode(self._ids)
        end = self._start + (len(self.found) if include_stop else 0)
        return "".join(self._pieces)[:end]

    def _fresh(self) -> str:
        """What the pending tokens add to the text."""
        return self._decode([*self._context, *self._pending])[len(self._context_text) :]

    def _search(self, fresh: str) -> bool:
        window = self._tail + fresh
        hits = [(at + len(s), at, s) for s in self._stops if (at := window.find(s)) >= 0]
        if not hits:
            return False
        _, at, self.found = min(hits)
        self._start = self._length - len(self._tail) + at
        return True

    def _commit(self, fresh: str, tokens: int) -> None:
        self._pieces.append(fresh)
        self._length += len(fresh)
        self._tail = (self._tail + fresh)[-self._reach :] if self._reach else ""
        if fresh:  # a chunk of invisible tokens is no context to decode the next one with
            self._context = self._pending[:tokens]
            self._context_text = self._decode(self._context)
        self._pending = self._pending[tokens:]

    def _commit_garbage(self) -> None:
        """Bytes that are no text: let go of the oldest, cutting where no character is torn."""
        everything = self._decode(self._pending)
        for cut in range(len(self._pending) - _CHARACTER_TOKENS + 1, 0, -1):
            head, rest = self._decode(self._pending[:cut]), self._decode(self._pending[cut:])
            if head + rest == everything:
                fresh = self._fresh()
                self._commit(fresh[: len(fresh) - len(rest)], cut)
                return
        self._commit(self._fresh(), len(self._pending))
