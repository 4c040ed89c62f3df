# SPDX-License-Identifier: Apache-2.0
r"""The calculator: a text protocol of calls, observations and one boxed answer.

model:  <call>add(3,4)</call>
env:    <obs>7</obs>
model:  <answer>\boxed{7}</answer>
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from palestra.env.base import ENVS, Action, Observation, StepResult
from palestra.errors import ConfigError
from palestra.reward.calculator import ANSWER, INTEGER
from palestra.types import Task

STOP = ("</call>", "</answer>")

_CALL = re.compile(r"<call>(\w+)\(([^)]*)\)</call>")
_ARGUMENTS = re.compile(rf"\s*({INTEGER})\s*,\s*({INTEGER})\s*")
_OPERATIONS: dict[str, Callable[[int, int], int]] = {"add": operator.add, "mul": operator.mul}
_SHOWN = 20  # characters of a bad call that its error repeats


@ENVS.register("calculator")
class CalculatorEnv:
    r"""Two operations, ``add`` and ``mul``; ends on an answer (terminated) or after ``max_steps`` turns without one
    (truncated).

    Whatever the model writes leads to an observation, never to an exception, and every turn without an answer
    counts: a call, a call that fails, and neither call nor answer. Of several calls in a text the first counts,
    and an answer wins over a call. Nothing is paid here: reward functions look at the trajectory. ``info`` holds
    ``tool_result`` after a call, ``final`` after an answer.

    >>> env = CalculatorEnv()
    >>> env.reset(Task("t", "(3+4)*5\n", 35), seed=0).stop
    ('</call>', '</answer>')
    >>> def act(text): return env.step(Action({"role": "assistant", "content": text}, text))
    >>> act("<call>add(3,4)</call>").observation.messages[0]["content"]
    '<obs>7</obs>'
    >>> act(r"<answer>\boxed{35}</answer>").info
    {'final': 35}
    """

    never_blocks = True

    def __init__(self, max_steps: int = 4) -> None:
        if max_steps < 1:
            raise ConfigError(f"calculator: max_steps is {max_steps}; it must be at least 1")
        self.max_steps = max_steps
        self.steps = 0

    def reset(self, task: Task, *, seed: int) -> Observation:
        self.steps = 0
        return Observation(task.messages(), stop=STOP)

    def step(self, action: Action) -> StepResult:
        if answer := ANSWER.search(action.text):
            return StepResult(Observation(stop=STOP), terminated=True, info={"final": int(answer[1])})
        self.steps += 1
        result, error = _calculate(action.text)
        text = f"<obs>{result if error is None else f'error: {error}'}</obs>"
        return StepResult(
            Observation(({"role": "tool", "content": text},), stop=STOP),
            truncated=self.steps >= self.max_steps,
            tool_calls=int(error is None),
            info={"tool_errors": 1} if error is not None else {"tool_result": result},
        )


def _calculate(text: str) -> tuple[int | None, str | None]:
    """(result, None) of the first call in the text, or (None, what is wrong)."""
    call = _CALL.search(text)
    if call is None:
        return None, "no call or answer"
    operation = _OPERATIONS.get(call[1])
    if operation is None:
        return None, f"unknown op {call[1][:_SHOWN]}"
    arguments = _ARGUMENTS.fullmatch(call[2])
    if arguments is None:
        return None, f"invalid args {call[2][:_SHOWN]}"
    return operation(int(arguments[1]), int(arguments[2])), None
