# SPDX-License-Identifier: Apache-2.0
"""What an agent acts on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from palestra.env.arithmetic import ArithmeticToolEnv, PocketCalculatorEnv
from palestra.env.base import ENVS, Action, Env, EnvFactory, Observation, StepResult
from palestra.env.calculator import CalculatorEnv
from palestra.env.self_question import SelfQuestionEnv
from palestra.env.self_refine import SelfRefineEnv
from palestra.env.threads import run_on_thread
from palestra.env.tool_env import ToolEnv
from palestra.env.tools import import_object, schema_of, tool
from palestra.registry import check_options


def make_env(name: str, **options: Any) -> Callable[[], Env]:
    """A factory of fresh environments, one per episode. ``name``: a registered one, or ``"module:Class"``.

    Names and options are checked here, before the first rollout: :class:`ConfigError` names the nearest right one.

    >>> make_env("calculator", max_step=3)
    Traceback (most recent call last):
    palestra.errors.ConfigError: env 'calculator': unknown option 'max_step': did you mean 'max_steps'? Known: max_steps
    """
    factory: EnvFactory = import_object(name) if ":" in name else ENVS[name]
    check_options(f"env {name!r}", factory, options)
    return functools.partial(factory, **options)


__all__ = [
    "ENVS",
    "Action",
    "ArithmeticToolEnv",
    "CalculatorEnv",
    "Env",
    "EnvFactory",
    "Observation",
    "PocketCalculatorEnv",
    "SelfQuestionEnv",
    "SelfRefineEnv",
    "StepResult",
    "ToolEnv",
    "make_env",
    "run_on_thread",
    "schema_of",
    "tool",
]
