# SPDX-License-Identifier: Apache-2.0
"""Generated two-step arithmetic for the calculator environment, and demonstrations of how it is used.

A problem is ``(a∘b)∘c`` or ``a∘(b∘c)`` with + and *, the bracket always written: ``(3+4)*5``. The bracket side
and the operation inside it are the problem's *shape*, on which the demonstrations' mistakes depend.
"""

from __future__ import annotations

import hashlib
import random

from palestra.data.noise import Noise
from palestra.data.source import SOURCES, GeneratedSource, check_split
from palestra.errors import ConfigError
from palestra.types import Message, Task

SYMBOLS = {"add": "+", "mul": "*"}
OTHER = {"add": "mul", "mul": "add"}
SHAPES = ("left-add", "left-mul", "right-add", "right-mul")
HELD_OUT = 8  # one expression in this many belongs to the test split


def apply(op: str, a: int, b: int) -> int:
    """The calculator's own arithmetic.

    >>> apply("mul", 7, 5)
    35
    """
    return a + b if op == "add" else a * b


def is_test(expr: str) -> bool:
    """Whether an expression is held out: decided by its hash, so the splits never share one."""
    return hashlib.blake2b(expr.encode(), digest_size=8).digest()[0] % HELD_OUT == 0


def problem(index: int, seed: int = 0, split: str = "train", max_operand: int = 99) -> Task:
    """The problem at ``index``; the same arguments always give the same one.

    ``meta``: ``expr``; ``shape`` (bracket side and first operation, as in ``left-add``); ``operations`` (the two
    in the order they must be done); ``operands`` (as written); ``steps``, which are 2.

    >>> task = problem(0, seed=1)
    >>> task.prompt, task.answer, task.meta["shape"]
    ('(64*96)+69\\n', 6213, 'left-mul')
    """
    rng = random.Random(f"arithmetic/{seed}/{split}/{index}")
    while True:
        side = rng.choice(("left", "right"))
        first, last = rng.choice(tuple(SYMBOLS)), rng.choice(tuple(SYMBOLS))
        a, b, c = (rng.randint(1, max_operand) for _ in range(3))
        if side == "left":
            expr = f"({a}{SYMBOLS[first]}{b}){SYMBOLS[last]}{c}"
            answer = apply(last, apply(first, a, b), c)
        else:
            expr = f"{a}{SYMBOLS[last]}({b}{SYMBOLS[first]}{c})"
            answer = apply(last, a, apply(first, b, c))
        if is_test(expr) == (split == "test"):
            break
    meta = {"expr": expr, "shape": f"{side}-{first}", "operations": (first, last), "operands": (a, b, c), "steps": 2}
    return Task(f"arithmetic/{split}/{seed}/{index}", f"{expr}\n", answer, meta)


@SOURCES.register("arithmetic")
def arithmetic(split: str = "train", seed: int = 0, max_operand: int = 99) -> GeneratedSource:
    """Endless two-step problems with operands 1..``max_operand``; ``test`` shares no expression with ``train``."""
    check_split(split)
    if max_operand < 3:
        raise ConfigError(f"data.max_operand is {max_operand}: with fewer than 3 there is too little to hold out")
    return GeneratedSource(lambda index: problem(index, seed, split, max_operand))


def demonstration(task: Task, rng: random.Random, noise: Noise) -> list[Message]:
    """One dialogue with the calculator: prompt, calls with their true results, answer; a mistake by ``noise``.

    Results are always those of the call that is written: only the choices are wrong.

    >>> for m in demonstration(problem(0, seed=1), random.Random(0), Noise.clean()): print(m["role"], m["content"])
    user (64*96)+69
    <BLANKLINE>
    assistant <call>mul(64,96)</call>
    tool <obs>6144</obs>
    assistant <call>add(6144,69)</call>
    tool <obs>6213</obs>
    assistant <answer>\\boxed{6213}</answer>
    """
    slip = noise.slips(task.meta["shape"]).draw(rng)
    first, last = task.meta["operations"]
    a, b, c = task.meta["operands"]
    left = task.meta["shape"].startswith("left")
    messages: list[Message] = [*task.messages()]
    if slip == "operand":
        return [*messages, _answer(a)]
    inner = _call(messages, OTHER[first] if slip == "wrong_first" else first, *((a, b) if left else (b, c)))
    if slip == "stop_early":
        return [*messages, _answer(inner)]
    outer = _call(messages, OTHER[last] if slip == "wrong_last" else last, *((inner, c) if left else (a, inner)))
    return [*messages, _answer(a if slip == "wrong_answer" else outer)]


def _call(messages: list[Message], op: str, a: int, b: int) -> int:
    result = apply(op, a, b)
    messages.append({"role": "assistant", "content": f"<call>{op}({a},{b})</call>"})
    messages.append({"role": "tool", "content": f"<obs>{result}</obs>"})
    return result


def _answer(value: int) -> Message:
    return {"role": "assistant", "content": f"<answer>\\boxed{{{value}}}</answer>"}
