# SPDX-License-Identifier: Apache-2.0
"""Messages ⇄ tokens: the only room that knows a chat template.

The protocol has the four methods and the field names of the ``renderers`` package, so one of its renderers
can stand in for ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from palestra.types import Author, IntArray, Message, Span


@dataclass(frozen=True, slots=True)
class Rendered:
    """Tokens with their origin.

    token_ids: the tokens. message_indices: for each token the index of the message whose body it came from,
    -1 for scaffolding that the template wrote. sampled_mask: True where the model itself would have sampled
    the token (assistant bodies and their end-of-turn token); what SFT trains on.
    """

    token_ids: list[int]
    message_indices: list[int]
    sampled_mask: list[bool] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Parsed:
    """A sampled completion, read: visible content, reasoning, tool calls (OpenAI shape), or why a call is malformed."""

    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    malformed: str | None = None

    def message(self) -> Message:
        """The assistant message this completion amounts to."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        return message


class Renderer(Protocol):
    """Turns messages into tokens and sampled tokens into a message."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendered: ...

    def parse_response(self, token_ids: Sequence[int]) -> Parsed: ...

    def get_stop_token_ids(self) -> list[int]: ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Rendered | None:
        """The *new* tokens that follow prompt + completion: closing scaffolding, the new messages, the next
        generation prompt. ``message_indices`` index into ``new_messages``. None when the template cannot be
        extended without rewriting what is already there."""
        ...

    def decode(self, token_ids: Sequence[int] | IntArray) -> str:
        """Text for people and reward functions, special tokens included."""
        ...


def fast_tokenizer(tokenizer: Any) -> Any | None:
    """The ``tokenizers.Tokenizer`` inside a transformers tokenizer, where calling it directly gives the same; None
    where there is none, or transformers does more than hand on. Its wrapper costs ten times as much as decoding a token
    or two, which is done after every token, and encodes every text on a pool of threads."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None or getattr(tokenizer, "clean_up_tokenization_spaces", True):
        return None
    if fast.truncation is not None or fast.padding is not None or getattr(tokenizer, "split_special_tokens", False):
        return None
    return fast


def text_encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Text → token ids, no special tokens added.

    >>> class Letters:
    ...     def encode(self, text, add_special_tokens): return [ord(c) for c in text]
    >>> text_encoder(Letters())("hi")
    [104, 105]
    """
    if (fast := fast_tokenizer(tokenizer)) is None:
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    return lambda text: list(fast.encode(text, add_special_tokens=False).ids)


def text_decoder(tokenizer: Any) -> Callable[[Sequence[int] | IntArray], str]:
    """Token ids → text, special tokens included.

    >>> class Letters:
    ...     def decode(self, ids, skip_special_tokens): return "".join(map(chr, ids))
    >>> text_decoder(Letters())([104, 105])
    'hi'
    """
    if (fast := fast_tokenizer(tokenizer)) is None:
        return lambda ids: str(tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))
    return lambda ids: str(fast.decode([int(i) for i in ids], skip_special_tokens=False))


def spans_of(rendered: Rendered, messages: Sequence[Message], decode: Any) -> tuple[Span, ...]:
    """The one function that turns rendered tokens into spans: a new span wherever author or role changes.

    Tokens of message bodies are written by ``ENV``; scaffolding by ``TEMPLATE`` (with the role of the message
    it precedes, ``assistant`` for the generation prompt).
    """
    import numpy as np

    spans: list[Span] = []
    ids, owners = rendered.token_ids, rendered.message_indices
    start = 0
    for i in range(1, len(ids) + 1):
        if i < len(ids) and owners[i] == owners[start]:
            continue
        tokens = np.asarray(ids[start:i], dtype=np.int32)
        if owners[start] >= 0:
            author, role = Author.ENV, messages[owners[start]].get("role", "user")
        else:
            following = next((owners[j] for j in range(i, len(ids)) if owners[j] >= 0), None)
            author, role = (
                Author.TEMPLATE,
                "assistant" if following is None else messages[following].get("role", "user"),
            )
        spans.append(Span(tokens, author, role, decode(tokens)))
        start = i
    return tuple(s for s in spans if len(s))
