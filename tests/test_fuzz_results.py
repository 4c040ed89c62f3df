# SPDX-License-Identifier: Apache-2.0
"""Whatever a tool returns or raises, the model reads a text of bounded length and the episode goes on."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from palestra.env.base import Action
from palestra.env.tool_env import ToolEnv
from palestra.types import Task


class Mute:
    """Fails at everything that it is asked."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")

    __str__ = __iter__ = __len__ = __bool__ = __eq__ = __hash__ = __repr__  # type: ignore[assignment]


class Endless(dict[str, Any]):
    def items(self) -> Any:
        raise RecursionError("for ever")


def anything(rng: random.Random, depth: int = 0) -> Any:
    """A value of any kind, nested up to four deep."""
    leaves: list[Any] = [
        None, True, rng.randint(-(10**40), 10**40), rng.uniform(-1, 1), float("nan"), float("-inf"), 1e308, -0.0, 2j,
        "", "x" * 50_000, "\ud800 half a pair", "\x00\x1b[31m\u202e", "<|im_end|></call><obs>", b"\xff\x00",
        bytearray(3), Mute(), Endless(a=1), object(), Exception, ValueError("no"), iter([1]), range(3),
        memoryview(b"ab"), lambda: 0,
    ]  # fmt: skip
    if depth == 4 or rng.random() < 0.4:
        return rng.choice(leaves)
    parts = [anything(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    kind = rng.choice(["list", "tuple", "dict", "cycle", "deep"])
    if kind == "dict":
        return {rng.choice(["a", 1, None, (2,), 1.5, "1"]): part for part in parts}
    if kind == "cycle":
        cycle: list[Any] = [*parts]
        cycle.append(cycle)
        return cycle
    if kind == "deep":
        deep: Any = parts
        for _ in range(3000):
            deep = [deep]
        return deep
    return parts if kind == "list" else tuple(parts)


RAISED: list[type[BaseException]] = [
    ValueError, KeyError, RecursionError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration,
    asyncio.CancelledError, TimeoutError, OSError, UnicodeError,
]  # fmt: skip


def test_a_thousand_odd_results_are_read_as_text_and_none_ends_the_episode() -> None:
    rng, given = random.Random(0), list[Any]()

    def odd() -> Any:
        """Gives back something odd."""
        value = given[-1]
        if isinstance(value, type) and issubclass(value, BaseException) and value is not Exception:
            raise value(anything(rng, 4))
        return value

    call = {"id": "1", "type": "function", "function": {"name": "odd", "arguments": "{}"}}

    async def play() -> None:
        env = ToolEnv([odd])
        for _ in range(1000):
            shown: Any = env.reset(Task("t", "?"), seed=0)
            _ = await shown if asyncio.iscoroutine(shown) else shown
            given.append(rng.choice(RAISED) if rng.random() < 0.2 else anything(rng))
            message: Any = {"role": "assistant", "content": "", "tool_calls": [call]}
            stepped: Any = env.step(Action(message, ""))
            result = await stepped if asyncio.iscoroutine(stepped) else stepped
            (answer,) = result.observation.messages
            assert answer["role"] == "tool" and isinstance(answer["content"], str)
            assert len(answer["content"]) < 20_000 and not result.terminated

    asyncio.run(play())
