# SPDX-License-Identifier: Apache-2.0
"""Self-posed questions: the model writes a problem, and its calculation is checked."""

from __future__ import annotations

from palestra.data.posed import KEY, NO_PARTS, fault_of, posed_problem
from palestra.env.base import ENVS, Action, Observation, StepResult
from palestra.errors import ConfigError
from palestra.types import Message, Task

INSTRUCTION = (
    "Write one new word problem, with another story and other numbers, that takes about as many steps. Begin "
    "with 'Question:', then write 'Solution:' with each calculation as in <<48/2=24>>24, and end with '#### ' and the "
    "result."
)


@ENVS.register("self_question")
class SelfQuestionEnv:
    """The task is an example; the model poses a problem of its own. Right as far as it can be checked
    (:mod:`palestra.data.posed`): ``posed`` 1.0 and the end. Not: ``posed`` 0.0 and, while turns are left, what is wrong
    as the next user message.

    instruction: what is asked for, behind the example (its question, and its solution where the data has one as
    ``full_answer``). The turn that succeeds keeps the problem in its ``info``; ``palestra data posed`` collects them.

    >>> env = SelfQuestionEnv()
    >>> shown = env.reset(Task("t", "Tom has 3 pens and buys 4. How many now?", "7"), seed=0)
    >>> question = "Ann has 48 clips and half as many pins. How many in all?"
    >>> text = f"Question: {question}\\nSolution: <<48/2=24>>24\\n<<48+24=72>>72\\n#### 72"
    >>> done = env.step(Action({"role": "assistant", "content": text}, text))
    >>> done.reward, done.terminated, done.info["posed"]["answer"][-2:]
    ({'posed': 1.0}, True, '72')
    """

    def __init__(self, max_turns: int = 2, instruction: str = INSTRUCTION) -> None:
        if max_turns < 1:
            raise ConfigError(f"self_question: max_turns is {max_turns}; it must be at least 1")
        self.max_turns = max_turns
        self.instruction = instruction
        self._example = ""
        self._turn = 0

    def reset(self, task: Task, *, seed: int) -> Observation:
        *_, question = task.messages()
        self._example, self._turn = question.get("content", ""), 0
        solution = task.meta.get("full_answer")
        example = f"Question: {self._example}" + (f"\nSolution: {solution}" if solution else "")
        return Observation(({"role": "user", "content": f"{example}\n\n{self.instruction}"},))

    def step(self, action: Action) -> StepResult:
        self._turn += 1
        posed = posed_problem(action.message.get("content", ""))
        fault = NO_PARTS if posed is None else fault_of(*posed, [self._example])
        if posed is not None and not fault:
            info = {KEY: {"question": posed[0], "answer": posed[1]}}
            return StepResult(reward={KEY: 1.0}, terminated=True, info=info)
        if self._turn >= self.max_turns:
            return StepResult(reward={KEY: 0.0}, terminated=True, info={"fault": fault})
        feedback: Message = {"role": "user", "content": fault}
        return StepResult(Observation((feedback,)), reward={KEY: 0.0}, info={"fault": fault})
