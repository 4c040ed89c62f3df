# SPDX-License-Identifier: Apache-2.0
"""Four arithmetic tools and the environment that offers them."""

from __future__ import annotations

from palestra.env.base import ENVS
from palestra.env.tool_env import ToolEnv
from palestra.env.tools import MAX_RESULT_CHARS, TIMEOUT_S

# Beyond 2**53 a float is no longer one integer.
_EXACT = 2.0**53


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


def _number(value: float) -> float:
    """Whole numbers as integers, so that they are shown without ``.0``."""
    return int(value) if abs(value) < _EXACT and value == int(value) else value


@ENVS.register("calculator_tools")
class ArithmeticToolEnv(ToolEnv):
    """A :class:`ToolEnv` with ``add``, ``subtract``, ``multiply`` and ``divide``."""

    def __init__(
        self,
        system: str | None = None,
        timeout_s: float = TIMEOUT_S,
        max_result_chars: int = MAX_RESULT_CHARS,
        parallel: bool = False,
    ) -> None:
        super().__init__([add, subtract, multiply, divide], system, timeout_s, max_result_chars, parallel)
