# SPDX-License-Identifier: Apache-2.0
"""What an environment is: it shows messages, takes actions, pays rewards and says when it is over.

One object per episode. Methods may be plain or async; plain ones run on their own threads, so they may block.

>>> class Echo:
...     def reset(self, task, *, seed):
...         return Observation(task.messages())
...     def step(self, action):
...         return StepResult(reward=float("hi" in action.text), terminated=True)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from palestra.registry import Registry
from palestra.types import Message, Task


@dataclass(frozen=True, slots=True)
class Observation:
    """What the model is shown next: messages, the tools it may call (JSON schemas), strings that end its turn."""

    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the model as the environment sees it.

    message: the parsed assistant message (``tool_calls`` in OpenAI shape when the renderer found some).
    text: what was sampled, decoded, stop strings included. malformed: why a tool call could not be parsed
    (one line), or None. finish_reason: eos, stop, length or abort. A call that was cut by ``length`` is never
    parsed as a call.
    max_tool_calls: how many calls may still be executed in this episode (None = no limit).
    step_budget_s: how long the step may take (None = no limit): a little less than ``limits.step_timeout_s``, after
    which it is given up as a tool failure.
    """

    message: Message
    text: str
    malformed: str | None = None
    finish_reason: str = "eos"
    max_tool_calls: int | None = None
    step_budget_s: float | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an action led to.

    reward: a number (filed under ``env``), a mapping of named numbers, or None when nothing is paid.
    terminated: the task came to its end. truncated: a limit of the environment cut it short.
    tool_calls: calls executed in this step. tool_failure: the environment declares a failure final.
    info: for people and metrics; learning never reads it.
    """

    observation: Observation = field(default_factory=Observation)
    reward: float | Mapping[str, float] | None = None
    terminated: bool = False
    truncated: bool = False
    tool_calls: int = 0
    tool_failure: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


class Env(Protocol):
    """One episode's environment.

    ``aclose`` is optional, and so is ``never_blocks = True``: a promise that ``reset`` and ``step`` are plain methods
    which only compute, for microseconds. They are then called where the episodes are driven, and not on a thread of
    their own, which costs more than they do; nothing could end one that hangs after all. ``timeout_s`` is optional
    too: the environment's own limit in seconds for what a step does; where a step took as long, its answer is
    journalled, so that a resumed run meets it again.
    """

    def reset(self, task: Task, *, seed: int) -> Observation | Awaitable[Observation]: ...

    def step(self, action: Action) -> StepResult | Awaitable[StepResult]: ...


EnvFactory = Callable[..., Env]
ENVS: Registry[EnvFactory] = Registry("env")
"""Environments by name. A factory takes the options of ``env:`` in a config as keywords and returns a new
object for each episode."""
