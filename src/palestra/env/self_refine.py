# SPDX-License-Identifier: Apache-2.0
"""Self-refinement: answer, hear that it was wrong, try again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from palestra.env.base import ENVS, Action, Observation, StepResult
from palestra.errors import ConfigError, unknown
from palestra.reward.answers import is_correct
from palestra.types import Message, Task

FEEDBACK = "That answer is not correct. Find the mistake in your steps and give the corrected answer in \\boxed{}."
INSTRUCTION = "Reason step by step and put the final answer in \\boxed{}."
_MODES = ("boxed", "numeric", "math")

Check = Callable[[str, str], bool]
"""(what the model wrote, the right answer) → is it right."""


@ENVS.register("self_refine")
class SelfRefineEnv:
    r"""A question with up to ``max_turns`` answers. Right: reward 1.0 and the end. Wrong: reward 0.0 and, while
    turns are left, ``feedback`` as the next user message.

    A wrong last answer *terminates*: the attempts are the task's own rule, not a limit that cut it short, and a
    learner that leaves truncated episodes out must still see it.

    mode: where the answer is read from: ``boxed`` (``\boxed{}`` only), ``numeric`` or ``math`` (see
    :mod:`palestra.reward.answers`). system: a system message in front. instruction: added to the question ("" =
    nothing). check: replaces the comparison.

    >>> env = SelfRefineEnv(check=lambda text, gold: gold in text)
    >>> shown = env.reset(Task("t", "1+1?", "2"), seed=0)
    >>> env.step(Action({"role": "assistant", "content": "3"}, "3")).reward
    0.0
    >>> env.step(Action({"role": "assistant", "content": "2"}, "2")).terminated
    True
    """

    def __init__(
        self,
        max_turns: int = 3,
        feedback: str = FEEDBACK,
        mode: Literal["boxed", "numeric", "math"] = "boxed",
        system: str | None = None,
        instruction: str = INSTRUCTION,
        check: Check | None = None,
    ) -> None:
        if max_turns < 1:
            raise ConfigError(f"self_refine: max_turns is {max_turns}; it must be at least 1")
        if mode not in _MODES:
            raise ConfigError(unknown("self_refine mode", str(mode), _MODES))
        self.max_turns = max_turns
        self.feedback = feedback
        self.system = system
        self.instruction = instruction
        self._check: Check = check or partial(is_correct, mode=mode)
        self._gold = ""
        self._turn = 0

    def reset(self, task: Task, *, seed: int) -> Observation:
        if task.answer is None:
            raise ValueError(f"task {task.id!r} has no answer: self_refine needs one to judge by")
        self._gold, self._turn = str(task.answer), 0
        *before, question = task.messages()
        asked: Message = {**question}
        if self.instruction:
            asked["content"] = f"{question.get('content', '')}\n{self.instruction}"
        opening: tuple[Message, ...] = ({"role": "system", "content": self.system},) if self.system else ()
        return Observation((*opening, *before, asked))

    def step(self, action: Action) -> StepResult:
        self._turn += 1
        right = self._check(action.message.get("content", ""), self._gold)
        info = {"attempt": self._turn, "right": right}
        if right or self._turn >= self.max_turns:
            return StepResult(reward=float(right), terminated=True, info=info)
        return StepResult(Observation(({"role": "user", "content": self.feedback},)), reward=0.0, info=info)
