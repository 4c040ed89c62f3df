# SPDX-License-Identifier: Apache-2.0
"""Whole dialogues to imitate: what supervised training reads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from palestra.data import arithmetic, gsm8k, word_problems
from palestra.data.noise import Noise
from palestra.data.rows import check_contents, read_jsonl
from palestra.data.source import Cursor, TaskSource
from palestra.errors import ConfigError, DataError, unknown
from palestra.registry import Registry, check_options
from palestra.types import Message, Task


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A finished dialogue and the tools (JSON schemas) that were on offer.

    task: the task it plays, when it is one; its prompt are the first ``len(task.messages())`` messages, and an
    environment may show the task in its own words instead.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = field(default=())
    task: Task | None = None


DIALOGUES: Registry[Callable[..., Sequence[Dialogue]]] = Registry("dialogue source")
"""Dialogue sources by name. A factory takes ``seed`` and the further options of ``data:`` as keywords."""


def make_dialogues(name: str, *, seed: int, **options: Any) -> Sequence[Dialogue]:
    """The dialogues of the registered source ``name``; unknown options are refused with the nearest right one."""
    factory = DIALOGUES[name]
    check_options(f"dialogue source {name!r}", factory, options, ("seed",))
    return factory(seed=seed, **options)


def make_noise(noise: str | Mapping[str, Mapping[str, float]], shapes: Sequence[str]) -> Noise:
    """``clean``, ``default``, or a table shape → slip → probability; shapes: those that the problems have."""
    if isinstance(noise, Mapping):
        known = (*shapes, "other")
        if (wrong := next((shape for shape in noise if shape not in known), None)) is not None:
            raise ConfigError("noise: " + unknown("shape", str(wrong), known))
        return Noise.from_dict(noise)
    named = {"clean": Noise.clean, "default": Noise.default}
    if noise not in named:
        raise ConfigError(unknown("noise", str(noise), named))
    return named[noise]()


def demonstrations(
    source: TaskSource, show: Callable[[Task, random.Random, Noise], list[Message]], count: int, seed: int, noise: Noise
) -> list[Dialogue]:
    """``count`` demonstrations of the source's first tasks, each with its own random stream."""
    tasks, _ = source.take(Cursor(), count)
    return [
        Dialogue(tuple(show(task, random.Random(f"demonstration/{seed}/{i}"), noise)), task=task)
        for i, task in enumerate(tasks)
    ]


@DIALOGUES.register("arithmetic")
def _arithmetic(
    seed: int, count: int = 20_000, noise: str | Mapping[str, Mapping[str, float]] = "default", max_operand: int = 99
) -> list[Dialogue]:
    # Another seed than the tasks of RL: those are to be fresh problems.
    source = arithmetic.arithmetic(split="train", seed=seed + 1_000_003, max_operand=max_operand)
    return demonstrations(source, arithmetic.demonstration, count, seed, make_noise(noise, arithmetic.SHAPES))


@DIALOGUES.register("word_problems")
def _word_problems(
    seed: int, count: int = 200, noise: str | Mapping[str, Mapping[str, float]] = "default", max_operand: int = 99
) -> list[Dialogue]:
    source = word_problems.word_problems(split="train", seed=seed + 1_000_003, max_operand=max_operand)
    return demonstrations(source, word_problems.demonstration, count, seed, make_noise(noise, word_problems.SHAPES))


@DIALOGUES.register("jsonl")
def _jsonl(seed: int, path: str) -> list[Dialogue]:
    """Rows with ``messages`` (and ``tools``), or ``prompt`` and ``completion``; the order of the file."""
    return [row_to_dialogue(row, f"{path}:{line}") for line, row in read_jsonl(path)]


@DIALOGUES.register("gsm8k")
def _gsm8k(seed: int, path: str | None = None, count: int | None = None, boxed: bool = False) -> list[Dialogue]:
    """Worked solutions in the order of the file, each of them playing its task."""
    return [
        replace(
            row_to_dialogue(gsm8k.sft_form(row, boxed=boxed), f"gsm8k:{line}"), task=gsm8k.task_of(row, "train", line)
        )
        for line, row in gsm8k.gsm8k_rows("train", path)[:count]
    ]


def row_to_dialogue(row: Mapping[str, Any], where: str) -> Dialogue:
    """A data row as a dialogue; DataError names the place, what is there and what is needed.

    >>> row_to_dialogue({"prompt": "2+2?", "completion": "4"}, "a.jsonl:1").messages[1]["content"]
    '4'
    """
    if "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise DataError(f"{where}: `messages` must be a list of chat messages with a role each")
        if not any(m["role"] == "assistant" for m in messages):
            raise DataError(f"{where}: no assistant message, so there is nothing to imitate")
        check_contents(messages, where)
        return Dialogue(tuple(messages), tuple(row.get("tools") or ()))
    if "prompt" in row and "completion" in row:
        prompt, completion = row["prompt"], row["completion"]
        first = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        last = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
        check_contents([*first, *last], where)
        return Dialogue((*first, *last), tuple(row.get("tools") or ()))
    raise DataError(
        f"{where}: needs `messages`, or `prompt` and `completion`; it has {', '.join(map(repr, row)) or 'nothing'}"
    )


def order(count: int, seed: int) -> Iterator[int]:
    """Indices 0…count−1 in a new shuffled order each epoch, without end; (seed, epoch) decide.

    >>> import itertools
    >>> sorted(itertools.islice(order(3, 0), 3))
    [0, 1, 2]
    """
    epoch = 0
    while True:
        indices = list(range(count))
        random.Random(f"dialogues/{seed}/{epoch}").shuffle(indices)
        yield from indices
        epoch += 1
