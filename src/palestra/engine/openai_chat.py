# SPDX-License-Identifier: Apache-2.0
"""A chat model behind a server, played through the same episodes as our own models.

A chat endpoint takes messages and gives text; nobody outside knows its tokens. Here a "token" is therefore an entry of
a table: a message that was shown, or a piece of a reply. A reply is cut into as many pieces as the server says it has
tokens, so limits and lengths count the server's tokens, while the ids mean nothing: such episodes can be read, scored
and compared, and not be trained on.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from palestra.chat.base import Parsed, Rendered
from palestra.engine.base import Completion, SamplingParams
from palestra.engine.openai import FOREIGN, REASONS, EndpointConfig, EndpointEngine, choice_of, first_stop
from palestra.types import Author, IntArray, Message, Span

UNBOUNDED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a reply; the last one carries what the whole reply was read as."""

    text: str
    reply: Parsed | None = None


Entry = Message | tuple[Mapping[str, Any], ...] | Piece
"""A message, the tools of an episode, or a piece of a reply."""


class Table:
    """Entries by number, in the order in which they were added."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def add(self, entry: Entry) -> int:
        self._entries.append(entry)
        return len(self._entries) - 1

    def __getitem__(self, number: int) -> Entry:
        return self._entries[number]


class MessageRenderer:
    """A :class:`~palestra.chat.base.Renderer` for chat endpoints: one number per message, none of them a real token.

    >>> renderer = MessageRenderer(Table())
    >>> renderer.render([{"role": "user", "content": "2+2?"}], add_generation_prompt=True).token_ids
    [0]
    >>> renderer.decode([0])
    '2+2?'
    """

    def __init__(self, table: Table) -> None:
        self._table = table

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        head = [self._table.add(tuple(tools))] if tools else []
        ids = [*head, *(self._table.add(message) for message in messages)]
        owners = [*[-1] * len(head), *range(len(messages))]
        return Rendered(ids, owners, [messages[i].get("role") == "assistant" if i >= 0 else False for i in owners])

    def parse_response(self, token_ids: Sequence[int]) -> Parsed:
        last = self._table[token_ids[-1]] if token_ids else None
        return last.reply if isinstance(last, Piece) and last.reply is not None else Parsed("")

    def get_stop_token_ids(self) -> list[int]:
        """None: the server ends its own replies."""
        return []

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Rendered:
        return self.render(new_messages)

    def decode(self, token_ids: Sequence[int] | IntArray) -> str:
        return "".join(_text(self._table[int(i)]) for i in token_ids)


class ChatEngine(EndpointEngine):
    """An :class:`~palestra.engine.base.Engine` over ``POST {url}/chat/completions``.

    table: the one that the renderer fills. Stop strings are looked for here, in the reply: servers take few of them
    and leave them out of the text. Tool results that answer no call (of text protocols) are sent as the user's.
    """

    def __init__(self, config: EndpointConfig, model: str, table: Table) -> None:
        super().__init__(config, model)
        self._table = table

    @property
    def max_context(self) -> int:
        """Unknown here; the server refuses what is too long for it."""
        return UNBOUNDED

    async def sample(self, prompt: IntArray, params: SamplingParams, *, session: str) -> Completion:
        messages, tools = self._told(prompt)
        body = self.request(params) | {"messages": messages} | ({"tools": list(tools)} if tools else {})
        reply = await self.endpoint.post("chat/completions", body)
        choice = choice_of(reply, self.endpoint.config.url)
        parsed = _parsed(choice.get("message") or {})
        reason = REASONS.get(str(choice.get("finish_reason")), "eos")
        count = (reply.get("usage") or {}).get("completion_tokens") or len(parsed.content.split())
        stop = first_stop(parsed.content, params.stop)
        shown = parsed.content
        if stop is not None:
            kept = parsed.content[: stop[1]]
            count = round(count * len(kept) / len(parsed.content))
            parsed, reason = Parsed(kept, parsed.reasoning_content), "stop"
            shown = kept if params.include_stop_str_in_output else kept[: stop[0]]
        ids = self._pieces(parsed, max(1, int(count)))
        zeros = np.zeros(len(ids), np.float32)
        mass = zeros if params.truncated else None
        span = Span(np.asarray(ids, np.int32), Author.MODEL, "assistant", parsed.content, zeros, FOREIGN, mass)
        return Completion((span,), reason, shown)

    def _told(self, prompt: IntArray) -> tuple[list[Message], tuple[Mapping[str, Any], ...]]:
        """The messages and tools that a prompt's numbers stand for."""
        messages: list[Message] = []
        tools: tuple[Mapping[str, Any], ...] = ()
        for number in prompt:
            entry = self._table[int(number)]
            if isinstance(entry, tuple):
                tools = entry
            elif isinstance(entry, Piece):
                messages += [] if entry.reply is None else [entry.reply.message()]
            else:
                messages.append(entry)
        return [_sent(message) for message in messages], tools

    def _pieces(self, parsed: Parsed, count: int) -> list[int]:
        """The reply's numbers: ``count`` pieces of nearly the same length, the last of them holding the reply."""
        text = parsed.content
        cuts = [round(i * len(text) / count) for i in range(count + 1)]
        parts = [text[a:b] for a, b in itertools.pairwise(cuts)]
        return [*(self._table.add(Piece(part)) for part in parts[:-1]), self._table.add(Piece(parts[-1], parsed))]


def _text(entry: Entry) -> str:
    if isinstance(entry, Piece):
        return entry.text
    return "" if isinstance(entry, tuple) else entry.get("content") or ""


def _parsed(message: Mapping[str, Any]) -> Parsed:
    """A reply in our shape: the arguments of calls as mappings; one that is no JSON object makes it malformed."""
    calls: list[dict[str, Any]] = []
    malformed = None
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            malformed = malformed or f"the arguments of {function.get('name')!r} are not a JSON object"
            continue
        told = {"name": str(function.get("name")), "arguments": arguments}
        calls.append({"id": str(call.get("id")), "type": "function", "function": told})
    content = message.get("content")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return Parsed(
        content if isinstance(content, str) else "",
        reasoning if isinstance(reasoning, str) else None,
        () if malformed else tuple(calls),
        malformed,
    )


def _sent(message: Message) -> Message:
    """A message as servers take it: arguments as text, no reasoning, no tool result without its call."""
    sent: Message = {**message}
    sent.pop("reasoning_content", None)
    if sent.get("role") == "tool" and not sent.get("tool_call_id"):
        return {"role": "user", "content": sent.get("content") or ""}
    if sent.get("tool_calls"):
        sent["tool_calls"] = [
            {**c, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"])}}
            for c in sent["tool_calls"]
        ]
    return sent
