# SPDX-License-Identifier: Apache-2.0
"""TRL learns the demo's problems: GRPO with a ``rollout_func`` that plays the calculator.

TRL's tool loop speaks JSON calls of a chat template, and the demo's model a text protocol, so the way TRL offers is a
``rollout_func``. It is written as a user would who cares for speed (calculator.py): all episodes of a step in one
``generate``, a turn at a time, only those that still play; the protocol's closing tags are single tokens here, so they
end a row as the end-of-text token does, without the slower search for stop strings.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from typing import Any

import trl
from datasets import Dataset
from transformers import TrainerCallback

from bench.peers.calculator import WHOLE, Player, right
from bench.peers.serve import Channel, Finished


def accuracy(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    """1 or 0."""
    return [float(right(text, gold)) for text, gold in zip(completions, answer, strict=True)]


def form(completions: list[str], **_: Any) -> list[float]:
    """1 where calls and answer are well formed and nothing else is said."""
    return [float(WHOLE.fullmatch(text) is not None) for text in completions]


class _Blocks(TrainerCallback):
    """A block of steps for each request; its seconds, and the accuracy after it, which is not timed."""

    def __init__(self, channel: Channel, player: Player, held_out: list[Any], updates: int) -> None:
        self.channel, self.player, self.held_out, self.updates = channel, player, held_out, updates
        self.requests: Iterator[dict[str, Any]] = channel.requests()
        self.left, self.began = 0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.left == 0:
            request = next(self.requests, None)
            if request is None:
                raise Finished
            self.left, self.began = request["steps"] * self.updates, time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            seconds = time.perf_counter() - self.began
            episodes = self.player.play([prompt for prompt, _ in self.held_out], greedy=True)
            texts = [self.player.tokenizer.decode(e.tokens) for e in episodes]
            score = sum(right(t, gold) for t, (_, gold) in zip(texts, self.held_out, strict=True)) / len(texts)
            self.channel.reply(seconds=seconds, accuracy=score, steps=state.global_step // self.updates)


def learning(channel: Channel, config: dict[str, Any], model: Any, tokenizer: Any) -> None:
    """config: problems and held_out, lists of (prompt, answer); steps, tasks, samples, updates, turns, new, and the
    optimiser's learning_rate, warmup_ratio, betas, weight_decay: those of our run."""
    player = Player(model, tokenizer, config["turns"], config["new"])
    batch = config["tasks"] * config["samples"]

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        episodes = player.play(prompts, greedy=False)
        return {
            "prompt_ids": [e.prompt for e in episodes],
            "completion_ids": [e.tokens for e in episodes],
            "logprobs": None,
            "env_mask": [e.mask for e in episodes],
        }

    args = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="bench-trl-"),
        per_device_train_batch_size=batch,
        num_generations=config["samples"],
        num_iterations=config["updates"],
        max_completion_length=config["turns"] * (config["new"] + 16),
        max_steps=config["steps"] * config["updates"],
        learning_rate=config["learning_rate"],
        warmup_steps=round(config["warmup_ratio"] * config["steps"]) * config["updates"],
        lr_scheduler_type="linear",
        adam_beta1=config["betas"][0],
        adam_beta2=config["betas"][1],
        weight_decay=config["weight_decay"],
        beta=0.0,
        loss_type="grpo",
        reward_weights=[1.0, 0.1],
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=config["seed"],
    )
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in config["problems"]]
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=[accuracy, form],
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    trainer.add_callback(_Blocks(channel, player, config["held_out"], config["updates"]))
    channel.ready(["trl", "torch", "transformers", "accelerate", "datasets"])
    try:
        trainer.train()
    except Finished:
        return
