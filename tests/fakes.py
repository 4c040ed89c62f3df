# SPDX-License-Identifier: Apache-2.0
"""Small stand-ins for tests of episodes: a word tokenizer that re-encodes differently, a renderer, environments."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from palestra.chat.base import Parsed, Rendered
from palestra.engine.scripted import ScriptedEngine
from palestra.env.base import Action, Observation, StepResult
from palestra.rollout.episode import Limits, SamplingConfig, run_episode
from palestra.types import Episode, Message, Task

T = TypeVar("T")

BOS, END, NEWLINE, ASK, SAY = 0, 1, 2, 3, 4
WORDS = ("<s>", "</s>", "\n", "<user>", "<assistant>", "he", "llo", "hello", "go", " ", "!", "call;", "x", "long")


class WordTokenizer:
    """``hello`` is one token when encoded, but may be sampled as ``he`` + ``llo``: decode → encode is not the identity.

    ``encoded`` keeps every text that was encoded.
    """

    eos_token_id = END
    bos_token_id = BOS

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def __len__(self) -> int:
        return len(WORDS)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        self.encoded.append(text)
        ids: list[int] = []
        rest = text
        while rest:
            word = max((w for w in WORDS if rest.startswith(w)), key=len)
            ids.append(WORDS.index(word))
            rest = rest[len(word) :]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(WORDS[i] for i in ids if not (skip_special_tokens and i <= SAY))


@dataclass
class FakeRenderer:
    """``<s>`` (``<user>`` | ``<assistant>`` body ``</s>`` newline)* ``<assistant>``. ``call;`` is a tool call each.

    extends: whether ``bridge_to_next_turn`` can extend; some templates cannot.
    """

    tokenizer: WordTokenizer = field(default_factory=WordTokenizer)
    extends: Callable[[Sequence[Message]], bool] = lambda messages: True
    stops: tuple[int, ...] = (END,)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        ids, owners = [BOS], [-1]
        for index, message in enumerate(messages):
            body = self.tokenizer.encode(message["content"])
            mark = SAY if message["role"] == "assistant" else ASK
            ids += [mark, *body, END, NEWLINE]
            owners += [-1, *[index] * len(body), -1, -1]
        if add_generation_prompt:
            ids, owners = [*ids, SAY], [*owners, -1]
        return Rendered(ids, owners)

    def parse_response(self, token_ids: Sequence[int]) -> Parsed:
        text = self.decode([t for t in token_ids if t != END])
        calls = [
            {"id": str(i), "type": "function", "function": {"name": "go", "arguments": "{}"}}
            for i in range(text.count("call;"))
        ]
        return Parsed(text, tool_calls=tuple(calls))

    def get_stop_token_ids(self) -> list[int]:
        return list(self.stops)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Rendered | None:
        if not self.extends(new_messages):
            return None
        closed = bool(previous_completion_ids) and previous_completion_ids[-1] == END
        new = self.render(new_messages, add_generation_prompt=True)
        head = [NEWLINE] if closed else [END, NEWLINE]
        return Rendered(head + new.token_ids[1:], [-1] * len(head) + new.message_indices[1:])

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode([int(t) for t in token_ids])


def said(content: str) -> Observation:
    return Observation(({"role": "user", "content": content},))


class StepsEnv:
    """Answers with the given results in turn, and keeps the actions it got. A result may be an exception."""

    def __init__(self, *results: StepResult | Exception, first: str = "go", stop: tuple[str, ...] = ()) -> None:
        self.results = list(results)
        self.first = first
        self.stop = stop
        self.actions: list[Action] = []
        self.seed: int | None = None
        self.closed = 0

    def reset(self, task: Task, *, seed: int) -> Observation:
        self.seed = seed
        return Observation(({"role": "user", "content": self.first},), stop=self.stop)

    def step(self, action: Action) -> StepResult:
        self.actions.append(action)
        result = self.results[len(self.actions) - 1]
        if isinstance(result, Exception):
            raise result
        return result

    async def aclose(self) -> None:
        self.closed += 1


DONE = StepResult(reward=1.0, terminated=True)
MORE = StepResult(said("go"))
TASK = Task("t", "go", "hello")


def run(work: Awaitable[T]) -> T:
    async def main() -> T:
        return await asyncio.wait_for(work, 30)

    return asyncio.run(main())


def play(
    env: Any,
    script: Any,
    *,
    renderer: FakeRenderer | None = None,
    engine: Any = None,
    limits: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    task: Task = TASK,
    seed: int = 0,
    **options: Any,
) -> Episode:
    """One episode from start to end, on the fakes."""
    renderer = renderer or FakeRenderer()
    return run(
        run_episode(
            task,
            env=env,
            engine=engine or ScriptedEngine(script, renderer.tokenizer),
            renderer=renderer,
            limits=Limits(**(limits or {})),
            sampling=SamplingConfig(**(sampling or {})),
            seed=seed,
            **options,
        )
    )
