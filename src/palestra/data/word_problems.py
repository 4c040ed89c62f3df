# SPDX-License-Identifier: Apache-2.0
"""Generated word problems of one to three operations, and demonstrations with one tool call per operation."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache

from palestra.data.noise import Noise
from palestra.data.phrasings import NAMES, TEST, THINGS, TRAIN
from palestra.data.source import SOURCES, GeneratedSource, check_split
from palestra.errors import ConfigError
from palestra.types import Message, Task

LIMIT = 10_000
SHAPES = ("1-step", "2-step", "3-step")
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a // b,
}
SYMBOLS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
WRONG = {"add": "multiply", "subtract": "add", "multiply": "add", "divide": "subtract"}


def problem(
    index: int,
    seed: int = 0,
    split: str = "train",
    max_operand: int = 99,
    operations: int = 3,
    min_operations: int = 1,
) -> Task:
    """The problem at ``index``; the same arguments always give the same one.

    Operands are 2..``max_operand``, results 0..9999 and whole. ``test`` adds phrasings that ``train`` never shows.
    Phrasings are dealt like cards: each comes once before any comes again, so few problems show them all.
    ``meta``: ``operations`` (names, in order), ``operands`` (the first, then one per operation), ``shape``
    (``1-step`` to ``3-step``), ``steps`` (how many), ``phrasing`` (its number), ``unseen`` (the phrasing occurs only
    in ``test``).

    >>> task = problem(6)
    >>> task.prompt, task.answer, task.meta["operations"]
    ('57 eggs are packed into bags of 3. How many bags are filled?', 19, ('divide',))
    """
    rng = random.Random(f"word_problems/{seed}/{split}/{index}")
    phrasings = [p for p in (TRAIN if split == "train" else TRAIN + TEST) if min_operations <= len(p[0]) <= operations]
    round_, place = divmod(index, len(phrasings))
    ops, text = phrasings[_dealt(f"word_problems/{seed}/{split}/round {round_}", len(phrasings))[place]]
    operands = _operands(ops, rng, max_operand)
    filled = dict(zip("abcd", operands, strict=False))
    prompt = text.format(n=rng.choice(NAMES), t=rng.choice(THINGS), **filled)
    meta = {
        "operations": ops,
        "operands": operands,
        "shape": f"{len(ops)}-step",
        "steps": len(ops),
        "phrasing": (TRAIN + TEST).index((ops, text)),
        "unseen": (ops, text) in TEST,
    }
    return Task(f"word_problems/{split}/{seed}/{index}", prompt, results(ops, operands)[-1], meta)


@lru_cache(maxsize=64)
def _dealt(key: str, count: int) -> list[int]:
    order = list(range(count))
    random.Random(key).shuffle(order)
    return order


def results(ops: tuple[str, ...], operands: tuple[int, ...]) -> list[int]:
    """The result after each operation.

    >>> results(("multiply", "add"), (3, 4, 5))
    [12, 17]
    """
    value, found = operands[0], []
    for op, operand in zip(ops, operands[1:], strict=True):
        value = OPERATIONS[op](value, operand)
        found.append(value)
    return found


def _operands(ops: tuple[str, ...], rng: random.Random, max_operand: int) -> tuple[int, ...]:
    while True:  # a draw fits with a probability of a few per cent at least, so this ends soon
        operands = tuple(rng.randint(2, max_operand) for _ in range(len(ops) + 1))
        value = operands[0]
        for op, operand in zip(ops, operands[1:], strict=True):
            if (op == "divide" and value % operand) or (op == "subtract" and operand >= value):
                break
            value = OPERATIONS[op](value, operand)
            if value >= LIMIT:
                break
        else:
            return operands


@SOURCES.register("word_problems")
def word_problems(
    split: str = "train", seed: int = 0, max_operand: int = 99, operations: int = 3, min_operations: int = 1
) -> GeneratedSource:
    """Endless word problems of ``min_operations`` to ``operations`` steps; ``test`` has phrasings that ``train`` has
    not."""
    check_split(split)
    if max_operand < 12:
        raise ConfigError(f"data.max_operand is {max_operand}: divisions need at least 12 to come out even")
    if operations not in (1, 2, 3):
        raise ConfigError(f"data.operations is {operations}: choose 1, 2 or 3 steps at most")
    if not 1 <= min_operations <= operations:
        raise ConfigError(f"data.min_operations is {min_operations}: choose 1 to {operations} (data.operations)")
    return GeneratedSource(lambda index: problem(index, seed, split, max_operand, operations, min_operations))


def demonstration(task: Task, rng: random.Random, noise: Noise) -> list[Message]:
    """One dialogue with a pocket calculator: the question, one call per turn with its true result, the answer in words.

    >>> from palestra.types import Task
    >>> task = Task("t", "3 bags of 4?", 12, {"operations": ("multiply",), "operands": (3, 4), "shape": "1-step"})
    >>> for m in demonstration(task, random.Random(0), Noise.clean()):
    ...     print(m["role"], m["content"] or m["tool_calls"][0]["function"])
    user 3 bags of 4?
    assistant {'name': 'calculate', 'arguments': {'expression': '3 * 4'}}
    tool 12
    assistant The answer is 12.
    """
    ops, operands = list(task.meta["operations"]), task.meta["operands"]
    slips = noise.slips(task.meta["shape"])
    if len(ops) == 1 and slips.stop_early:
        raise ConfigError(f"noise of shape {task.meta['shape']!r}: one step cannot stop early; use operand instead")
    slip = slips.draw(rng)
    messages: list[Message] = [*task.messages()]
    if slip == "operand":
        return [*messages, _answer(operands[0])]
    wrong_at = {"wrong_first": 0, "wrong_last": len(ops) - 1}.get(slip)
    value = operands[0]
    for i, (op, operand) in enumerate(zip(ops, operands[1:], strict=True)):
        value = _call(messages, WRONG[op] if i == wrong_at else op, value, operand, f"call_{i}")
        if slip == "stop_early":
            break
    return [*messages, _answer(operands[0] if slip == "wrong_answer" else value)]


def _call(messages: list[Message], op: str, a: int, b: int, call_id: str) -> int:
    result = OPERATIONS[op](a, b)
    function = {"name": "calculate", "arguments": {"expression": f"{a} {SYMBOLS[op]} {b}"}}
    messages.append(
        {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}
    )
    messages.append({"role": "tool", "tool_call_id": call_id, "name": "calculate", "content": str(result)})
    return result


def _answer(value: int) -> Message:
    return {"role": "assistant", "content": f"The answer is {value}."}
