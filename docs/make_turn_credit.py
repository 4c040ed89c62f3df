# SPDX-License-Identifier: Apache-2.0
"""Does credit by turns pay? An environment of two turns where only the first matters: python docs/make_turn_credit.py

The model says one token, and is paid 1 for a digit; then it writes sixteen more, for nothing. With one advantage for
the whole episode those sixteen are praised and blamed for what the first one did; with credit by turns they are left
alone. The built-in model with random weights, no warm-up. Prints the table of docs/results.md: episodes until the last
five steps' mean reward is 0.9.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from palestra.env import ENVS
from palestra.env.base import Action, Observation, StepResult
from palestra.model.tiny import CHARACTERS
from palestra.run.directory import Run
from palestra.run.progress import Progress
from palestra.train.config import RLConfig
from palestra.train.rl import RLTrainer, prepare
from palestra.types import Task

FREE = 16
"""Tokens of the second turn."""
EPISODES = 32
"""Of a step: four groups of eight."""
STEPS, WINDOW, ENOUGH = 80, 5, 0.9
SEEDS = (0, 1, 2)

WAYS: dict[str, dict[str, Any]] = {
    "episode, `group_mean`": {"advantage": "group_mean"},
    "turns, `turn_group_mean`": {"advantage": "turn_group_mean"},
    "episode, `group_zscore`": {"advantage": "group_zscore"},
    "turns, `turn_group_zscore`": {"advantage": "turn_group_zscore"},
    "tokens with a critic, `gae`": {"advantage": "gae", "critic": "separate"},
    "turns with a critic, `gae_turns`": {"advantage": "gae_turns", "critic": "separate"},
}


@ENVS.register("only_the_first_turn")
class OnlyTheFirstTurn:
    """Pays 1 for a digit as the first token; what is written afterwards changes nothing."""

    def reset(self, task: Task, *, seed: int) -> Observation:
        self.turn = 0
        return Observation(task.messages(), stop=tuple(CHARACTERS))

    def step(self, action: Action) -> StepResult:
        self.turn += 1
        if self.turn == 2:
            return StepResult(terminated=True)
        right = action.text[:1].isdigit()
        again = Observation(({"role": "user", "content": "and then?"},), stop=("<never>",))
        return StepResult(again, reward=float(right))


def config(out: Path, seed: int, way: dict[str, Any]) -> RLConfig:
    """A run of one way of giving credit; all else is the same."""
    return RLConfig.model_validate(
        {
            "seed": seed,
            "out": str(out),
            "model": "builtin:calculator",
            "renderer": "plain",
            "env": "only_the_first_turn",
            "data": "arithmetic",
            "sampling": {"max_new_tokens": FREE},
            "limits": {"max_turns": 2},
            "algorithm": {"group_size": 8, "kl_coef": 0.0, "reduction": "token_mean", **way},
            "train": {
                "steps": STEPS,
                "tasks_per_step": EPISODES // 8,
                "learning_rate": 3e-4,
                "warmup_ratio": 0.0,
                "save_every": 0,
                "dump_every": 0,
            },
            "eval": {"size": 0},
        }
    )


def learn(seed: int, way: dict[str, Any], *, steps: int = STEPS) -> tuple[list[float], float]:
    """The mean reward of each step, until it is enough; and seconds."""
    import asyncio

    with tempfile.TemporaryDirectory() as folder:
        settings = config(Path(folder) / "run", seed, way)
        with Run.open(settings.out, settings, resume=False, trackers=()) as run:
            trainer = RLTrainer(prepare(settings), run, progress=Progress(quiet=True))
            began, rewards = time.perf_counter(), []
            try:
                trainer.begin_rl()
                while len(rewards) < steps and not enough(rewards):
                    rewards.append(asyncio.run(trainer.step())["train/reward"])
            finally:
                trainer.engine.close()
    return rewards, time.perf_counter() - began


def enough(rewards: list[float]) -> bool:
    """
    >>> enough([1.0] * 4), enough([0.0] + [0.9] * 5)
    (False, True)
    """
    return len(rewards) >= WINDOW and fmean(rewards[-WINDOW:]) >= ENOUGH - 1e-9


def main() -> None:
    print("| credit | " + " | ".join(f"seed {s}" for s in SEEDS) + " | mean | seconds a run |")
    print("|---" * (len(SEEDS) + 3) + "|")
    for name, way in WAYS.items():
        runs = [learn(seed, way) for seed in SEEDS]
        counts = [len(rewards) * EPISODES for rewards, _ in runs]
        cells = [f"{n:,}" if enough(rewards) else f"> {n:,}" for n, (rewards, _) in zip(counts, runs, strict=True)]
        mean = f"{'> ' * any('>' in c for c in cells)}{fmean(counts):,.0f}"
        print(f"| {name} | {' | '.join(cells)} | {mean} | {fmean(s for _, s in runs):.0f} |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
