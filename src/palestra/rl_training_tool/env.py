# SPDX-License-Identifier: Apache-2.0
"""A question and one answer: what a table of prompts is played as. Rewards judge it, the environment pays nothing."""

from __future__ import annotations

from palestra.env.base import Action, Observation, StepResult
from palestra.types import Task


class OneAnswerEnv:
    """Shows the task and ends with the first reply; one that the length limit cut is truncated, not finished.

    >>> env = OneAnswerEnv()
    >>> env.reset(Task("t", "2+2?"), seed=0).messages
    ({'role': 'user', 'content': '2+2?'},)
    >>> env.step(Action({"role": "assistant", "content": "4"}, "4")).terminated
    True
    """

    def reset(self, task: Task, *, seed: int) -> Observation:
        return Observation(tuple(task.messages()))

    def step(self, action: Action) -> StepResult:
        cut_off = action.finish_reason == "length"
        return StepResult(terminated=not cut_off, truncated=cut_off)
