# SPDX-License-Identifier: Apache-2.0
"""The plain-tag renderer: a dialogue is the concatenation of its messages' contents, and nothing else.

For models that were taught a text protocol (``<call>``, ``<obs>``, ``<answer>``) rather than a chat template.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from palestra.chat.base import Parsed, Rendered, text_decoder, text_encoder
from palestra.errors import ConfigError
from palestra.types import IntArray, Message


class PromptWarning(UserWarning):
    """A prompt was written in a form that the model has probably not been trained on."""


class PlainRenderer:
    """Contents in, tokens out: ``[bos]`` where the tokenizer has one, then each content, encoded on its own.

    tokenizer: ``encode(text, add_special_tokens=False)``, ``decode(ids, skip_special_tokens=False)``,
    ``bos_token_id``, ``eos_token_id``. extra_stop_token_ids: further ids that end a turn, such as the
    ``eos_token_id`` list of a generation config. A turn of the plain protocol ends with a stop string of its
    environment, so no end-of-turn token is written after an assistant's content.

    >>> class Letters:
    ...     bos_token_id, eos_token_id, chat_template = 1, 2, None
    ...     def encode(self, text, add_special_tokens): return [ord(c) for c in text]
    ...     def decode(self, ids, skip_special_tokens): return "".join(map(chr, ids))
    >>> plain = PlainRenderer(Letters())
    >>> plain.render([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "!"}])
    Rendered(token_ids=[1, 104, 105, 33], message_indices=[-1, 0, 0, 1], sampled_mask=[False, False, False, True])
    """

    def __init__(self, tokenizer: Any, *, extra_stop_token_ids: Sequence[int] = ()) -> None:
        self._bos = tokenizer.bos_token_id
        self._encode, self._decode = text_encoder(tokenizer), text_decoder(tokenizer)
        stops = (tokenizer.eos_token_id, *extra_stop_token_ids)
        self._stop_token_ids = list(dict.fromkeys(i for i in stops if i is not None))
        if getattr(tokenizer, "chat_template", None):
            warnings.warn(
                "this tokenizer has a chat template, but the plain renderer sends raw text: the model will see "
                "prompts unlike those it was tuned on; choose renderer 'chat'",
                PromptWarning,
                stacklevel=2,
            )

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """The whole dialogue; ``add_generation_prompt`` adds nothing, since the protocol has no scaffolding."""
        body = self._contents(messages, tools)
        if self._bos is None or body.token_ids[:1] == [self._bos]:
            return body
        return Rendered([self._bos, *body.token_ids], [-1, *body.message_indices], [False, *body.sampled_mask])

    def parse_response(self, token_ids: Sequence[int]) -> Parsed:
        """The text without its end token. The protocol's calls are read by the environment, from the text."""
        ids = list(token_ids)
        if ids and ids[-1] in self._stop_token_ids:
            ids.pop()
        return Parsed(self.decode(ids))

    def get_stop_token_ids(self) -> list[int]:
        """The tokenizer's end token, where it has one, and the extra ids."""
        return list(self._stop_token_ids)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Rendered:
        """The new contents; whatever came before is left as it is."""
        body = self._contents(new_messages, tools)
        return Rendered(body.token_ids, body.message_indices, [False] * len(body.token_ids))

    def decode(self, token_ids: Sequence[int] | IntArray) -> str:
        """Text, special tokens included."""
        return self._decode(token_ids)

    def _contents(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> Rendered:
        if tools or any(m.get("tool_calls") for m in messages):
            raise ConfigError("the plain renderer has no place for tools and tool calls; choose renderer 'chat'")
        ids: list[int] = []
        owners: list[int] = []
        sampled: list[bool] = []
        for index, message in enumerate(messages):
            piece = self._encode(message.get("content") or "")
            ids += piece
            owners += [index] * len(piece)
            sampled += [message.get("role") == "assistant"] * len(piece)
        return Rendered(ids, owners, sampled)
