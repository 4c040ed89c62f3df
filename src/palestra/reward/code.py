# SPDX-License-Identifier: Apache-2.0
r"""Code judged by unit tests, each completion in its own sandbox (:mod:`palestra.reward.sandbox`).

A task's ``tests`` are statements (``assert f(2) == 4``, or a whole ``def check(…)`` with its call) or
``{"input": stdin, "output": stdout}`` pairs. Where a test is ``assert EXPRESSION == LITERAL``, the sandbox only
evaluates the expression and the comparison is made outside, so code cannot pass it without knowing the value; in
every other statement the left side of such a comparison is reduced to built-in types first, so that an object that
is equal to everything gains nothing. Output is compared outside too. What is left to a statement alone
(``assert f(2)``) can be forged by code that looks for the harness: prefer the other two.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from palestra.errors import RewardError
from palestra.reward.base import FACTORIES, REWARDS, RewardFunction
from palestra.reward.functions import Completion, final_texts
from palestra.reward.reading import REASONING, REASONING_END
from palestra.reward.sandbox import SandboxLimits, run_python
from palestra.types import Trajectory

FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
PYTHON = ("", "py", "python", "python3")


@dataclass(frozen=True, slots=True)
class Test:
    """One test: code and how it is judged. ``expected`` is the literal, or the output; stdin only for programs."""

    __test__ = False  # for pytest, which collects by name

    kind: str
    code: str = ""
    expected: Any = None
    stdin: str = ""


def extract_code(text: str) -> str | None:
    """The last fenced block of Python, of the whole text when it has no fence at all; None when there is none.

    >>> extract_code("First:\\n```python\\nx = 1\\n```\\nBetter:\\n```py\\nx = 2\\n```\\nDone.")
    'x = 2\\n'
    """
    text = REASONING_END.sub("", REASONING.sub(" ", text))
    blocks = [code for language, code in FENCE.findall(text) if language.lower() in PYTHON]
    if blocks:
        return str(blocks[-1])
    return None if "```" in text or not text.strip() else text


def parse_tests(tests: str | Sequence[Any]) -> list[Test]:
    """Tests as a task gives them; a text of several plain asserts is as many tests.

    >>> [t.kind for t in parse_tests(["assert f(2) == 4\\nassert f(0) == 0", "assert f(3)"])]
    ['value', 'value', 'passes']
    >>> parse_tests([{"input": "2\\n", "output": "4\\n"}])[0].expected
    '4\\n'
    """
    found: list[Test] = []
    for test in [tests] if isinstance(tests, str | Mapping) else tests:
        if isinstance(test, Mapping):
            if not {"input", "output"} <= set(test):
                raise RewardError(f"a unit test has {', '.join(map(str, test)) or 'nothing'}: give input and output")
            found.append(Test("output", expected=str(test["output"]), stdin=str(test["input"])))
        else:
            found += _statements(str(test))
    if not found:
        raise RewardError("a task has no unit tests: give at least one")
    return found


def _statements(source: str) -> list[Test]:
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise RewardError(f"a unit test is not Python ({error.msg}): {source[:80]!r}") from None
    if not all(isinstance(node, ast.Assert) for node in body):
        return [Test("passes", ast.unparse(_BuiltIn().visit(ast.parse(source))))]
    return [_assertion(node) for node in body if isinstance(node, ast.Assert)]


def _assertion(node: ast.Assert) -> Test:
    if _against_literal(node.test):
        compare: Any = node.test
        return Test("value", ast.unparse(compare.left), ast.literal_eval(compare.comparators[0]))
    return Test("passes", ast.unparse(_BuiltIn().visit(ast.Module([node], []))))


def _against_literal(node: ast.expr) -> bool:
    """Whether this is ``EXPRESSION == LITERAL``."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq):
        return False
    try:
        ast.literal_eval(node.comparators[0])
    except (ValueError, TypeError):
        return False
    return True


class _BuiltIn(ast.NodeTransformer):
    """``a == LITERAL`` → ``_plain(a) == LITERAL``; the sandbox has ``_plain``."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if _against_literal(node):
            node.left = ast.Call(ast.Name("_plain", ast.Load()), [node.left], [])
        return node


def run_tests(code: str, tests: Sequence[Test], limits: SandboxLimits | None = None) -> list[bool]:
    """Which tests the code passes. Statements share one run, in order, and its time; each output has its own.

    >>> run_tests("def f(x): return x * x", parse_tests(["assert f(2) == 4", "assert f(3) == 6", "assert f(1)"]))
    [True, False, True]
    >>> run_tests("print(int(input()) ** 2)", parse_tests([{"input": "3", "output": "9"}]))
    [True]
    """
    called = [i for i, test in enumerate(tests) if test.kind != "output"]
    passed = [False] * len(tests)
    if called:
        jobs = [{"kind": tests[i].kind, "code": tests[i].code} for i in called]
        for record in run_python(code, tests=jobs, limits=limits).records:
            at = record.get("test")
            if isinstance(at, int) and 0 <= at < len(called):
                passed[called[at]] = _passes(tests[called[at]], record)
    for i, test in enumerate(tests):
        if test.kind == "output":
            run = run_python(code, stdin=test.stdin, limits=limits)
            passed[i] = run.exit_code == 0 and _lines(run.stdout) == _lines(str(test.expected))
    return passed


def _passes(test: Test, record: Mapping[str, Any]) -> bool:
    if test.kind == "passes":
        return record.get("passed") is True
    try:
        return bool(_literal(str(record["value"])) == test.expected)
    except (KeyError, ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return False


def _literal(text: str) -> Any:
    """A repr as the value it is; ``inf`` and ``nan`` are no literals in Python."""

    class Floats(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return ast.Constant(float(node.id)) if node.id in ("inf", "nan") else node

    return ast.literal_eval(Floats().visit(ast.parse(text, mode="eval")))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


@FACTORIES.register("unit_tests")
def unit_tests(
    partial: bool = False,
    column: str = "tests",
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    processes: int = 8,
    require: Sequence[str] = (),
    workers: int | None = None,
) -> RewardFunction:
    """1.0 when the last block of code passes all tests of its task, else 0.0; ``partial`` pays the share passed.

    column: of the data, holding the tests; a task without tests abstains. timeout_s, memory_mb, processes,
    require: see :class:`~palestra.reward.sandbox.SandboxLimits`. workers: sandboxes at once (default: one per CPU).

    >>> text = "```python\\ndef double(x):\\n    return x + x\\n```"
    >>> tests = ["assert double(2) == 4", "assert double(3) == 5"]
    >>> unit_tests(partial=True)(completions=[text, "no code"], tests=[tests, tests])
    [0.5, 0.0]
    """
    limits = SandboxLimits(timeout_s, memory_mb, processes=processes, require=tuple(require))

    def one(text: str, tests: Any) -> float | None:
        if tests is None:
            return None
        code, wanted = extract_code(text), parse_tests(tests)
        if code is None:
            return 0.0
        passed = run_tests(code, wanted, limits)
        return sum(passed) / len(passed) if partial else float(all(passed))

    def reward(
        completions: Sequence[Completion], trajectories: Sequence[Trajectory] | None = None, **columns: Any
    ) -> list[float | None]:
        if column not in columns:
            raise RewardError(f"unit_tests reads the column {column!r}, and the data has: {', '.join(sorted(columns))}")
        texts = final_texts(completions, trajectories)
        with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
            return list(pool.map(one, texts, columns[column]))

    return reward


REWARDS.register("unit_tests")(unit_tests())
