# SPDX-License-Identifier: Apache-2.0
"""Arithmetic as tools: four functions, or a pocket calculator that takes one operation at a time."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import ClassVar

from palestra.env.base import ENVS
from palestra.env.tool_env import ToolEnv
from palestra.env.tools import MAX_RESULT_CHARS, TIMEOUT_S

# Beyond 2**53 a float is no longer one integer.
_EXACT = 2.0**53
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)"
_ONE_OPERATION = re.compile(rf"\s*({_NUMBER})\s*([-+*/])\s*({_NUMBER})\s*")
_OPERATORS: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


def add(a: float, b: float) -> float:
    """a + b"""
    return _number(a + b)


def subtract(a: float, b: float) -> float:
    """a - b"""
    return _number(a - b)


def multiply(a: float, b: float) -> float:
    """a * b"""
    return _number(a * b)


def divide(a: float, b: float) -> float:
    """a / b"""
    return _number(a / b)


def calculate(expression: str) -> float:
    """One operation (+ - * /) on two numbers

    >>> calculate("12 * 7"), calculate("7/2")
    (84, 3.5)
    >>> calculate("3 * 4 + 5")
    Traceback (most recent call last):
    ValueError: write one operation on two numbers, such as 12 * 7, not '3 * 4 + 5'
    """
    found = _ONE_OPERATION.fullmatch(expression)
    if found is None:
        raise ValueError(f"write one operation on two numbers, such as 12 * 7, not {expression[:60]!r}")
    left, symbol, right = found.groups()
    return _number(_OPERATORS[symbol](float(left), float(right)))


def _number(value: float) -> float:
    """Whole numbers as integers, so that they are shown without ``.0``."""
    return int(value) if abs(value) < _EXACT and value == int(value) else value


@ENVS.register("calculator_tools")
class ArithmeticToolEnv(ToolEnv):
    """A :class:`ToolEnv` with ``add``, ``subtract``, ``multiply`` and ``divide``."""

    functions: ClassVar[tuple[Callable[..., float], ...]] = (add, subtract, multiply, divide)

    def __init__(
        self,
        system: str | None = None,
        timeout_s: float = TIMEOUT_S,
        max_result_chars: int = MAX_RESULT_CHARS,
        parallel: bool = False,
    ) -> None:
        super().__init__(self.functions, system, timeout_s, max_result_chars, parallel)


@ENVS.register("pocket_calculator")
class PocketCalculatorEnv(ArithmeticToolEnv):
    """Its only tool is ``calculate``: one operation a call, so most problems take several turns."""

    functions = (calculate,)
