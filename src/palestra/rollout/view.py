# SPDX-License-Identifier: Apache-2.0
"""One growing token sequence: what the engine saw so far, and the turns it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from palestra.chat.base import Renderer, spans_of
from palestra.types import Author, IntArray, Message, Span, StopReason, Trajectory, Turn

Tools = tuple[Mapping[str, Any], ...]


class View:
    """A trajectory being made. Tokens enter through :meth:`extend` (the renderer's, as spans) and :meth:`record`
    (the model's, as sampled); nothing that is here is ever encoded again.

    kept: turns of earlier views that this one's first prompt retells.
    """

    def __init__(self, renderer: Renderer, tools: Tools, kept: tuple[Turn, ...], session: str) -> None:
        self.session = session
        self.turns: list[Turn] = []
        self._renderer = renderer
        self._tools = tools
        self._kept = kept
        self._shown: tuple[Message, ...] = ()
        self._waiting: tuple[Span, ...] = ()  # the renderer's spans before the completion to come
        self._prompt: list[int] = []
        self._completion: list[int] = []

    @property
    def prompt(self) -> IntArray:
        """int32[n]: the tokens to sample from."""
        return np.asarray(self._prompt, dtype=np.int32)

    def holds(self, kept: Sequence[Turn], tools: Tools) -> bool:
        """True when this view shows exactly these turns, so that it can grow."""
        mine = (*self._kept, *self.turns)
        return tools == self._tools and len(mine) == len(kept) and all(a is b for a, b in zip(mine, kept, strict=True))

    def extend(self, messages: Sequence[Message]) -> bool:
        """Show new messages and ask for the next action. False, and nothing changed, when the renderer cannot add
        them without rewriting what is already here."""
        if self.turns:
            rendered = self._renderer.bridge_to_next_turn(
                self._prompt, self._completion, messages, tools=self._tools or None
            )
            told: Sequence[Message] = messages
        else:
            told = [m for turn in self._kept for m in (*turn.observation, turn.action)] + list(messages)
            rendered = self._renderer.render(told, tools=self._tools or None, add_generation_prompt=True)
        if rendered is None:
            return False
        self._waiting = spans_of(rendered, told, self._renderer.decode)
        self._shown = tuple(messages)
        self._prompt = [*self._prompt, *self._completion, *rendered.token_ids]
        self._completion = []
        return True

    def record(
        self,
        sampled: Sequence[Span],
        action: Message,
        finish_reason: str,
        rewards: Mapping[str, float],
        tool_calls: int,
        info: Mapping[str, Any],
    ) -> Turn:
        """Take the completion and what came of it: the turn, now part of this view."""
        if any(s.author is not Author.MODEL for s in sampled):
            raise ValueError("a completion holds a span that the model did not write")
        turn = Turn((*self._waiting, *sampled), self._shown, action, finish_reason, rewards, tool_calls, info)
        self._waiting = ()
        self._completion = [int(t) for s in sampled for t in s.tokens]
        self.turns.append(turn)
        return turn

    def trajectory(self, stop: StopReason) -> Trajectory:
        return Trajectory(tuple(self.turns), stop)
