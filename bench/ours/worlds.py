# SPDX-License-Identifier: Apache-2.0
"""The environment, tasks and renderer of the benches: as much work as is asked for, whatever the model says."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palestra.chat.base import Parsed, Rendered, Renderer
from palestra.data.source import SOURCES, ListSource, TaskSource, check_split
from palestra.env.base import ENVS, Action, Observation, StepResult
from palestra.types import IntArray, Message, Task

RESULT = "The result is 4711."
"""What every tool says."""


@ENVS.register("bench_turns")
class Turns:
    """Each reply but the last counts as a call, whose result comes after ``delay_s`` seconds; ``turns`` replies end the
    episode. It pays a number that depends on the text alone, so that members of a group differ.

    >>> env = Turns(turns=2)
    >>> _ = env.reset(Task("t", "go"), seed=0)
    >>> first, last = (env.step(Action({"role": "assistant", "content": "a"}, "a")) for _ in range(2))
    >>> first.observation.messages[0]["content"], first.terminated, last.terminated
    ('The result is 4711.', False, True)
    """

    def __init__(self, turns: int = 1, delay_s: float = 0.0) -> None:
        self.turns, self.delay_s = turns, delay_s
        self.played = 0

    def reset(self, task: Task, *, seed: int) -> Observation:
        self.played = 0
        return Observation(task.messages())

    def step(self, action: Action) -> StepResult:
        self.played += 1
        pay = zlib.crc32(action.text.encode("utf-8", "replace")) % 1009 / 1009
        if self.played >= self.turns:
            return StepResult(reward=pay, terminated=True)
        if self.delay_s:
            time.sleep(self.delay_s)
        result: Message = {"role": "tool", "name": "lookup", "content": RESULT}
        return StepResult(Observation((result,)), reward=pay, tool_calls=1)


@SOURCES.register("bench_prompts")
def bench_prompts(texts: Sequence[str], split: str = "train", seed: int = 0) -> TaskSource:
    """One task per text, in this order, again and again."""
    check_split(split)
    return ListSource(tuple(Task(f"p{i}", text) for i, text in enumerate(texts)))


@dataclass(frozen=True, slots=True)
class Unstopped:
    """A renderer under which no token ends a turn: the length limit does, so every run does the same work."""

    inner: Renderer

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        return self.inner.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def parse_response(self, token_ids: Sequence[int]) -> Parsed:
        return Parsed(self.inner.decode(token_ids))

    def get_stop_token_ids(self) -> list[int]:
        return []

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Rendered | None:
        return self.inner.bridge_to_next_turn(previous_prompt_ids, previous_completion_ids, new_messages, tools=tools)

    def decode(self, token_ids: Sequence[int] | IntArray) -> str:
        return self.inner.decode(token_ids)
