# SPDX-License-Identifier: Apache-2.0
"""What the model gets to see: everything so far, or whatever an agent with a memory of its own prefers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from palestra.types import Message, Turn


@dataclass(frozen=True, slots=True)
class Context:
    """The next view: turns kept verbatim (the very objects), then messages.

    When ``kept`` is all that the model's present view holds, the view grows and the episode stays one
    trajectory. Otherwise a new trajectory opens: its prompt is rendered from the messages of the kept turns and
    ``messages``, and nothing in that prompt is trained on again.
    """

    kept: tuple[Turn, ...]
    messages: tuple[Message, ...]


class Agent(Protocol):
    """Chooses the model's context before each turn."""

    def context(self, history: Sequence[Turn], new: Sequence[Message]) -> Context:
        """history: every turn of the episode so far. new: what the environment just showed."""
        ...


class GrowingAgent:
    """Keeps everything: one episode, one trajectory.

    >>> GrowingAgent().context([], [{"role": "user", "content": "2+2?"}]).messages[0]["content"]
    '2+2?'
    """

    def context(self, history: Sequence[Turn], new: Sequence[Message]) -> Context:
        return Context(tuple(history), tuple(new))
