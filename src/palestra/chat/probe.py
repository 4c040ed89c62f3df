# SPDX-License-Identifier: Apache-2.0
"""What a chat template does, found out by rendering small dialogues.

Jinja templates cannot be read, only run. Everything the renderer must know about one is a difference between
two renderings: where a reply ends, what the generation prompt opens, whether tools are shown at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from palestra.chat.toolcalls import CLOSE, OPEN, THINK, UNTHINK, openai_tools, parse_reply
from palestra.errors import ConfigError, ModelError

ASK: dict[str, Any] = {"role": "user", "content": "palestra7ask"}
REPLY = "palestra7reply"
NEXT = "palestra7next"

_TAGS = (OPEN, CLOSE, THINK, UNTHINK)


class Template:
    """A tokenizer's chat template as a function of messages, and the facts about it.

    marker: the special token that ends a reply, as text ("" when the template writes none). close: what the
    template writes from the end of a reply's body to the end of the marker. lead: what it writes between the
    generation prompt and the body, which the model therefore samples. thinking: the generation prompt opens
    ``<think>``. Raises :class:`ModelError` for a tokenizer without a template, for a template that leaves out what is
    said, and for one whose end of a turn is not a token of the tokenizer but text: nothing could be stopped at.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any]) -> None:
        if not tokenizer.chat_template:
            raise ModelError(
                "this tokenizer has no chat template; use renderer 'plain', or set tokenizer.chat_template "
                "(base models usually have none, their instruct versions do)"
            )
        self._tokenizer = tokenizer
        self._options = dict(options)
        self._check_options()
        reply = {"role": "assistant", "content": REPLY}
        ended = self.text([ASK, reply])
        inside = self.text([ASK, reply, {"role": "user", "content": NEXT}])
        self.before_reply = self.text([ASK])
        for content, text in ((str(ASK["content"]), self.before_reply), (REPLY, ended), (NEXT, inside)):
            _check_shown(content, text, "assistant" if content == REPLY else "user")
        # White space is in most replies: one that is a token of its own ends none.
        self._added = tuple(t for t in map(str, tokenizer.get_added_vocab()) if t not in _TAGS and t.strip())
        self.marker, self.close = self._closing(ended, inside)
        prompt = self.text([ASK], generation_prompt=True)
        self.thinking = prompt.rstrip().endswith(THINK)
        self.lead = self._lead(prompt, ended)

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The rendered text. Raises :class:`ModelError` where the template refuses the dialogue."""
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages),
                tools=openai_tools(tools) if tools else None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **(self._options if options is None else options),
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(str(m["role"]) for m in messages if m is not ASK)
            raise ModelError(f"the chat template refuses a dialogue with the roles {roles}: {error}") from error
        return str(rendered)

    def accepts_tool_role(self) -> bool:
        """Whether a message of role ``tool`` comes out at all."""
        dialogue = [ASK, {"role": "assistant", "content": REPLY}, {"role": "tool", "content": NEXT}]
        try:
            return NEXT in self.text(dialogue)
        except ModelError:
            return False

    def check_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Raises :class:`ConfigError` where the template ignores tools or writes calls that we cannot read."""
        if self.text([ASK], tools=tools) == self.text([ASK]):
            raise ConfigError(
                "tools: template, but this model's chat template has no place for tools (its text is the same with "
                "and without them); choose tools: system"
            )
        probe = {"name": "probe", "arguments": {"x": 1}}
        written = self.call_text([{"id": "call00000", "type": "function", "function": probe}], tools)
        if [c["function"] for c in parse_reply(written).tool_calls] != [probe]:
            raise ConfigError(
                "tools: template, but this model's chat template writes tool calls in a notation other than "
                f"{OPEN}JSON{CLOSE}, which is all that can be read here; choose tools: system"
            )

    def call_text(self, calls: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """How the template writes tool calls: what stands between a reply's content and its end."""
        reply = {"role": "assistant", "content": REPLY, "tool_calls": list(calls)}
        after = self.text([ASK, reply], tools=tools).rpartition(REPLY)[2]
        end = after.find(self.marker) if self.marker else len(after)
        return after[: max(end, 0)].rstrip("\n")

    def reply_end(self, text: str, start: int) -> int:
        """Where the reply whose last known character is before ``start`` ends, its marker included."""
        if not self.marker:
            return start
        at = text.find(self.marker, start)
        return at + len(self.marker) if at >= 0 else -1

    def _closing(self, ended: str, inside: str) -> tuple[str, str]:
        """The first added token that follows a reply, whether or not the dialogue goes on, and all up to it; both ""
        where the template writes nothing to end a reply."""
        tail, middle = ended.rpartition(REPLY)[2], inside.rpartition(REPLY)[2]
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tail, middle, strict=False))
        common = "".join(character for character, _ in pairs)
        found = [(common.find(t), -len(t), t) for t in self._added if t and t in common]
        if not found:
            # The last turn may end by a token of its own, as gpt-oss's does.
            if not any(t in tail for t in self._added):
                self._check_spelt(common.strip())
            return "", ""
        at, _, marker = min(found)
        return marker, common[: at + len(marker)]

    def _check_spelt(self, ending: str) -> None:
        """An end of turn that is spelt out letter by letter."""
        if ending:
            pieces = len(self._tokenizer.encode(ending, add_special_tokens=False))
            raise ModelError(
                f"the chat template ends a reply with {ending!r}, which is no special token of this tokenizer but text "
                f"of {pieces} tokens: generation could not stop there. Use the tokenizer that the template was written "
                "for, make that text a special token, let the template end replies with eos_token, or choose renderer "
                "'plain'"
            )

    def _lead(self, prompt: str, ended: str) -> str:
        lead = ended.rpartition(REPLY)[0].removeprefix(prompt)
        # An (empty) reasoning block is put there by the template, for history; no model samples it.
        return "" if not ended.startswith(prompt) or THINK in lead or UNTHINK in lead else lead

    def _check_options(self) -> None:
        """An option that the template never looks at is a typing mistake."""
        thought = {"role": "assistant", "content": REPLY, "reasoning_content": REPLY}
        cases = [(dialogue, prompted) for dialogue in ([ASK], [ASK, thought]) for prompted in (False, True)]
        full = [self.text(dialogue, generation_prompt=prompted) for dialogue, prompted in cases]
        for name in self._options:
            rest = {k: v for k, v in self._options.items() if k != name}
            without = [self.text(dialogue, generation_prompt=prompted, options=rest) for dialogue, prompted in cases]
            if full == without:
                raise ConfigError(f"template option {name!r} changes nothing in this model's chat template; remove it")


def _check_shown(content: str, text: str, role: str) -> None:
    """A template that drops messages would show the model dialogues without them."""
    if content not in text:
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        raise ModelError(
            f"the chat template leaves out what the {role} says: with the message {content!r} it writes {shown!r}. "
            "Give the tokenizer its model's own template (chat_template.jinja beside it), or choose renderer 'plain'"
        )
