# SPDX-License-Identifier: Apache-2.0
"""A renderer for any Hugging Face chat template, by suffix difference.

The sequence is built the way a rollout grows it, in training data as in rollouts: the head (everything before
the first reply) as the template writes it with its generation prompt; a reply's own text, encoded alone, since
that is what the model samples; then what the template writes from the end of a reply to the next one. That last
part comes from a synthetic dialogue of a dummy question, a dummy reply and the new messages, cut after the
reply's end-of-turn token. So nothing that was sampled is ever rendered or encoded again, whatever the template
does to histories (trimming, dropping reasoning, inserting empty reasoning blocks).
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from palestra.chat.base import Parsed, Rendered, fast_tokenizer, text_decoder
from palestra.chat.locate import Flat, Region, locate, masked, owners_of
from palestra.chat.plain import PromptWarning
from palestra.chat.probe import ASK, REPLY, Template
from palestra.chat.toolcalls import THINK, UNTHINK, calls_text, openai_calls, parse_reply, tools_text
from palestra.errors import ConfigError, DataError, ModelError, unknown
from palestra.types import IntArray, Message

ToolsMode = Literal["template", "system", "error"]
Tools = Sequence[Mapping[str, Any]] | None
_MODES = ("template", "system", "error")


class ChatTemplateRenderer:
    """Messages ⇄ tokens through ``tokenizer.chat_template``.

    tokenizer: a fast Hugging Face tokenizer (character offsets are needed to say whose a token is).
    tools: how schemas reach the model. ``template``: through the template's own ``tools``. ``system``: written
    into the system message, for templates without a place for them; tool results are sent as role ``tool``
    where the template accepts it, else as user messages in ``<tool_response>`` tags (with a warning).
    ``error``: an environment with tools is refused.
    extra_stop_token_ids: further ids that end a turn, such as the ``eos_token_id`` list of a generation config.
    template_options: variables of the template, such as ``{"enable_thinking": False}``.

    Raises :class:`ModelError` for a tokenizer without template, character offsets or an end-of-turn token, and for a
    template that leaves out messages (see :class:`~palestra.chat.probe.Template`);
    :class:`ConfigError` for tools that cannot reach the model.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: ToolsMode = "error",
        extra_stop_token_ids: Sequence[int] = (),
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        if tools not in _MODES:
            raise ConfigError(unknown("tools mode", str(tools), _MODES))
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError("the chat renderer needs a fast tokenizer (one that reports character offsets)")
        self._tokenizer = tokenizer
        self._decode = text_decoder(tokenizer)
        self._tools_mode = tools
        self._template = Template(tokenizer, template_options or {})
        self._checked_tools = False
        marker = self._template.marker
        self._end_id = tokenizer.convert_tokens_to_ids(marker) if marker else tokenizer.eos_token_id
        if self._end_id is None:
            raise ModelError(
                "the chat template writes no end-of-turn token and the tokenizer has no eos token: generation could "
                "not stop. Set eos_token in its tokenizer_config.json, or let the template end replies with a token"
            )
        stops = (self._end_id, tokenizer.eos_token_id, *extra_stop_token_ids)
        self._stop_token_ids = list(dict.fromkeys(int(i) for i in stops if i is not None))
        self._wrap_results = tools == "system" and not self._template.accepts_tool_role()
        if self._wrap_results:
            warnings.warn(
                "this chat template refuses messages of role tool: tool results are sent as user messages in "
                "<tool_response> tags",
                PromptWarning,
                stacklevel=2,
            )

    def render(
        self, messages: Sequence[Message], *, tools: Tools = None, add_generation_prompt: bool = False
    ) -> Rendered:
        """The whole dialogue, token for token what a rollout of it would be: it ends with the last token that
        the model would have sampled, or with the new message (and the generation prompt).

        Where the template rewrites what stands before a tool result, no rollout is one sequence; then this is
        the template's own rendering.
        """
        flat = self._flatten(messages, tools, opening=True)
        if not flat:
            raise DataError("an empty dialogue cannot be rendered; give at least one message")
        head = list(itertools.takewhile(lambda m: m.role != "assistant", flat))
        rest = flat[len(head) :]
        if head:
            out = _Tokens()
            goes_on = bool(rest) or add_generation_prompt
            self._add_chunk(out, *self._both(head, tools, goes_on), anchored=False)
            if self._extend(out, rest, tools, add_generation_prompt):
                return out.rendered()
        return self._render_whole(flat, tools, add_generation_prompt)

    def parse_response(self, token_ids: Sequence[int]) -> Parsed:
        """Content, reasoning and tool calls of a sampled reply; see :func:`palestra.chat.toolcalls.parse_reply`."""
        ids = list(token_ids)
        if ids and ids[-1] in self._stop_token_ids:
            ids.pop()
        return parse_reply(self.decode(ids).removeprefix(self._template.lead), thinking=self._template.thinking)

    def get_stop_token_ids(self) -> list[int]:
        """The template's end-of-turn token, the tokenizer's eos, and the extra ids."""
        return list(self._stop_token_ids)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Tools = None,
    ) -> Rendered | None:
        """The tokens from the end of the reply to the next one. The previous ids are only looked at, not changed:
        a reply that a stop string or a limit ended gets its end-of-turn token as scaffolding.

        None when the template rewrites what stands before tool results.
        """
        out = _Tokens()
        last = previous_completion_ids[-1] if len(previous_completion_ids) else None
        if last not in self._stop_token_ids:
            out.add([self._end_id], [-1], sampled=False)
        flat = self._flatten(new_messages, tools, opening=False)
        if not self._extend(out, flat, tools, add_generation_prompt=True, after_reply=True):
            return None
        # Some templates end a turn by opening the next (GLM's <|user|>): the model has sampled that token already.
        skip = 1 if last in self._stop_token_ids and out.ids[:1] == [last] else 0
        return Rendered(out.ids[skip:], out.owners[skip:], [False] * (len(out.ids) - skip))

    def decode(self, token_ids: Sequence[int] | IntArray) -> str:
        """Text, special tokens included."""
        return self._decode(token_ids)

    # ── from messages to what the template gets ────────────────────────────────────────────────────────────

    def _flatten(self, messages: Sequence[Message], tools: Tools, *, opening: bool) -> list[Flat]:
        """The caller's messages in the form this mode sends them; ``opening``: the dialogue begins here."""
        self._check_tools(messages, tools)
        flat: list[Flat] = []
        for index, message in enumerate(messages):
            self._append(flat, index, message, tools)
        if opening and tools and self._tools_mode == "system":
            text = tools_text(tools)
            if flat and flat[0].role == "system":
                flat[0] = Flat("system", (*flat[0].pieces, (f"\n\n{text}", -1)))
            else:
                flat.insert(0, Flat("system", ((text, -1),)))
        return flat

    def _append(self, flat: list[Flat], index: int, message: Message, tools: Tools) -> None:
        role = message.get("role")
        if not isinstance(role, str):
            raise DataError(f"message {index} has no role: {dict(message)!r}")
        content = message.get("content") or ""
        if role == "assistant":
            flat.append(Flat(role, ((self._reply_text(message, tools), index),)))
        elif role == "tool" and self._wrap_results:
            pieces: tuple[tuple[str, int], ...] = (
                ("<tool_response>\n", -1),
                (content, index),
                ("\n</tool_response>", -1),
            )
            if flat and flat[-1].extra.get("tool_results"):
                pieces = (*flat.pop().pieces, ("\n", -1), *pieces)
            flat.append(Flat("user", pieces, {"tool_results": True}))
        else:
            kept = {k: v for k in ("tool_call_id", "name") if (v := message.get(k)) is not None}
            flat.append(Flat(role, ((content, index),), {} if self._tools_mode == "system" else kept))

    def _reply_text(self, message: Message, tools: Tools) -> str:
        """What the model would have sampled for this message, without its end."""
        content, reasoning = message.get("content") or "", message.get("reasoning_content")
        if reasoning is None and content.lstrip().startswith(THINK) and self._template.thinking:
            content = content.lstrip().removeprefix(THINK).lstrip("\n")
        if calls := message.get("tool_calls"):
            shaped = openai_calls(calls)
            written = calls_text(shaped) if self._tools_mode == "system" else self._template.call_text(shaped, tools)
            content = f"{content}\n{written.lstrip()}" if content else written.lstrip()
        opening = "" if self._template.thinking else f"{THINK}\n"
        if reasoning is not None:
            content = f"{opening}{reasoning}\n{UNTHINK}\n\n{content}"
        elif self._template.thinking and UNTHINK not in content:
            content = f"\n{UNTHINK}\n\n{content}"
        return self._template.lead + content

    def _check_tools(self, messages: Sequence[Message], tools: Tools) -> None:
        has_calls = any(m.get("tool_calls") for m in messages)
        if self._tools_mode == "error" and (tools or has_calls):
            names = ", ".join(str(t.get("function", t).get("name")) for t in tools or ())
            raise ConfigError(
                f"the dialogue has tools ({names or 'calls in a message'}) but the renderer is set to tools: error; "
                "choose tools: template (the chat template shows them) or tools: system (the system message does)"
            )
        if self._tools_mode == "template" and (tools or has_calls) and not self._checked_tools:
            anything = {"name": "probe", "parameters": {"type": "object", "properties": {}}}
            self._template.check_tools(tools or [anything])
            self._checked_tools = True

    # ── from the template's text to tokens ─────────────────────────────────────────────────────────────────

    def _extend(
        self, out: _Tokens, rest: list[Flat], tools: Tools, add_generation_prompt: bool, after_reply: bool = False
    ) -> bool:
        """Append replies and what lies between them; False when the template cannot be extended."""
        while rest or after_reply:
            if not after_reply:
                self._add_reply(out, rest.pop(0))
            news = list(itertools.takewhile(lambda m: m.role != "assistant", rest))
            rest = rest[len(news) :]
            goes_on = bool(rest) or add_generation_prompt
            if news or goes_on:
                chunk = self._suffix(news, tools, goes_on)
                if chunk is None:
                    return False
                self._add_chunk(out, *chunk, anchored=True)
            after_reply = False
        return True

    def _add_reply(self, out: _Tokens, reply: Flat) -> None:
        (text, owner), close = reply.pieces[0], self._template.close
        ids = self._encode(text + close)[0] if close else [*self._encode(text)[0], self._end_id]
        out.add(ids, [owner] * len(ids), sampled=True)

    def _add_chunk(
        self, out: _Tokens, text: str, hidden: str, bodies: list[tuple[str, int]], *, anchored: bool
    ) -> None:
        """Encode scaffolding and bodies in one piece, as the template's text is at inference.

        ``anchored``: with the end-of-turn token in front, because tokenizers treat the beginning of a text in
        their own ways, and some end tokens swallow the white space that follows (Phi-3).
        """
        anchor = self._template.marker if anchored else ""
        ids, offsets = self._encode(anchor + text)
        skip = 1 if anchor and ids[:1] == [self._end_id] else 0
        if anchor and not skip:
            ids, offsets = self._encode(text)
            anchor = ""
        regions = [Region(s + len(anchor), e + len(anchor), o) for s, e, o in locate(text, hidden, bodies)]
        out.add(ids[skip:], owners_of(offsets[skip:], regions), sampled=False)

    def _both(
        self, messages: list[Flat], tools: Tools, generation_prompt: bool
    ) -> tuple[str, str, list[tuple[str, int]]]:
        """The template's text with the real contents, the same with sentinels, and the bodies behind them."""
        shown = tools if self._tools_mode == "template" else None
        hidden, bodies = masked(messages)
        real = self._template.text([m.plain() for m in messages], tools=shown, generation_prompt=generation_prompt)
        return real, self._template.text(hidden, tools=shown, generation_prompt=generation_prompt), bodies

    def _suffix(
        self, news: list[Flat], tools: Tools, generation_prompt: bool
    ) -> tuple[str, str, list[tuple[str, int]]] | None:
        """What the template writes after a reply's end-of-turn token, up to the next reply."""
        results = bool(news) and all(m.role == "tool" for m in news)
        before = [Flat("user", ((ASK["content"], -1),)), self._dummy_reply(news)]
        real, hidden, bodies = self._both([*before, *news], tools, generation_prompt)
        shown = tools if self._tools_mode == "template" else None
        alone = self._template.text([m.plain() for m in before], tools=shown)
        cut, alone_cut = self._cut(real), self._cut(alone)
        if cut < 0 or alone_cut < 0 or (results and not real.startswith(alone[:alone_cut])):
            return None
        if not real.startswith(self._template.text([ASK], tools=shown)):
            return None
        return real[cut:], hidden[self._cut(hidden) :], bodies

    def _dummy_reply(self, news: list[Flat]) -> Flat:
        """A reply that the new messages can follow: with reasoning, and with the calls that tool results answer."""
        results = [m for m in news if m.role == "tool"]
        if not results:
            return Flat("assistant", ((REPLY, -1),))
        extra: dict[str, Any] = {"reasoning_content": "palestra7why"}
        if self._tools_mode == "template":
            extra["tool_calls"] = [
                {
                    "id": m.extra.get("tool_call_id", f"call{i:05d}"),
                    "type": "function",
                    "function": {"name": m.extra.get("name", "f"), "arguments": {"x": REPLY}},
                }
                for i, m in enumerate(results)
            ]
        return Flat("assistant", ((REPLY, -1),), extra)

    def _cut(self, text: str) -> int:
        """Just behind the end of the dummy reply; -1 when the template left the reply out."""
        at = text.rfind(REPLY)
        return -1 if at < 0 else self._template.reply_end(text, at + len(REPLY))

    def _render_whole(self, flat: list[Flat], tools: Tools, add_generation_prompt: bool) -> Rendered:
        """The template's own rendering; replies count as sampled from the beginning of their body to their end.

        A prompt may hold replies that cannot be found in it (their reasoning was dropped); a training row may not,
        since it would come out with an empty mask.
        """
        text, hidden, bodies = self._both(flat, tools, add_generation_prompt)
        ids, offsets = self._encode(text)
        regions = locate(text, hidden, bodies)
        replies = {owner for m in flat if m.role == "assistant" for _, owner in m.pieces}
        if len(regions) < len(bodies) and replies and not add_generation_prompt:
            raise ModelError(
                "the chat template rewrites the replies of this dialogue: they cannot be found in its text"
            )
        regions = [
            Region(r.start, max(r.end, self._template.reply_end(text, r.end)), r.owner) if r.owner in replies else r
            for r in regions
        ]
        owners = owners_of(offsets, regions)
        return Rendered(ids, owners, [o in replies for o in owners])

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        if (fast := fast_tokenizer(self._tokenizer)) is not None:
            direct = fast.encode(text, add_special_tokens=False)
            return list(direct.ids), list(direct.offsets)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), list(encoded["offset_mapping"])


class _Tokens:
    """A :class:`Rendered` in the making."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.owners: list[int] = []
        self.sampled: list[bool] = []

    def add(self, ids: Sequence[int], owners: Sequence[int], *, sampled: bool) -> None:
        self.ids += ids
        self.owners += owners
        self.sampled += [sampled] * len(ids)

    def rendered(self) -> Rendered:
        return Rendered(self.ids, self.owners, self.sampled)
