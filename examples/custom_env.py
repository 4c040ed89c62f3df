# SPDX-License-Identifier: Apache-2.0
"""Your own environment, reward and tasks: guess 1, 2 or 3, hear "+" (more) or "-" (less), guess again."""

from palestra import Observation, RLConfig, StepResult, Task, train_rl
from palestra.data.source import SOURCES, GeneratedSource
from palestra.env import ENVS
from palestra.reward.base import REWARDS
from palestra.run.progress import Progress

SOURCES.register("secrets")(lambda split, seed: GeneratedSource(lambda i: Task(f"{split}/{i}", "guess:", i % 3 + 1)))


@ENVS.register("guess")
class GuessEnv:
    def reset(self, task, *, seed):
        self.secret, self.left = str(task.answer), 2
        return Observation(task.messages())

    def step(self, action):
        self.left -= 1
        hint = {"role": "user", "content": "+" if action.text < self.secret else "-"}
        return StepResult(Observation((hint,)), terminated=action.text == self.secret or self.left == 0)


@REWARDS.register("found")
def found(trajectories, answer, **_):
    return [float(t.turns[-1].text == str(secret)) for t, secret in zip(trajectories, answer, strict=True)]


SETTINGS = {"model": "builtin:calculator", "renderer": "plain", "env": "guess", "data": "secrets", "out": "runs/guess"}
SETTINGS |= {"rewards": {"found": 1.0}, "sampling": {"max_new_tokens": 1}}
SETTINGS |= {"algorithm": {"kl_coef": 0.1}, "eval": {"size": 3, "metric": "found"}}  # the KL term keeps it trying
SETTINGS |= {"train": {"steps": 150, "tasks_per_step": 9, "learning_rate": 1e-3}}

if __name__ == "__main__":
    with Progress() as progress:
        train_rl(RLConfig.model_validate(SETTINGS), progress=progress)
