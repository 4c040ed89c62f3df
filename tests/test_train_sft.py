# SPDX-License-Identifier: Apache-2.0
"""Supervised training: which tokens are learned, what a cut dialogue teaches, and a run that is interrupted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_templates import SMOLLM2, make_tokenizer

from palestra.chat import ChatTemplateRenderer, PlainRenderer, Renderer
from palestra.data.dialogues import Dialogue, make_dialogues
from palestra.errors import DataError
from palestra.learn.batch import Sample
from palestra.model.tiny import calculator_tokenizer, tiny_llama
from palestra.run.progress import Progress
from palestra.train import sft
from palestra.train.config import SFTConfig, SFTSettings
from palestra.types import Message, Task

TOKENIZER = calculator_tokenizer()
PLAIN = PlainRenderer(TOKENIZER)


def dialogue(*messages: tuple[str, str]) -> Dialogue:
    return Dialogue(tuple(Message(role=role, content=content) for role, content in messages))


CALCULATOR = dialogue(
    ("user", "(3+4)*5\n"),
    ("assistant", "<call>add(3,4)</call>"),
    ("tool", "<obs>7</obs>"),
    ("assistant", r"<answer>\boxed{35}</answer>"),
)


def learned(renderer: Renderer, one: Sample) -> str:
    return renderer.decode(one.tokens[one.loss_mask])


def made(*dialogues: Dialogue, renderer: Renderer = PLAIN, max_length: int = 200, **more: Any) -> list[Sample]:
    return sft.dialogue_samples(dialogues, renderer, max_length=max_length, **more)


def test_what_the_calculator_said_and_what_it_was_asked_is_not_learned() -> None:
    (one,) = made(CALCULATOR)
    assert learned(PLAIN, one) == r"<call>add(3,4)</call><answer>\boxed{35}</answer>"
    assert PLAIN.decode(one.tokens) == r"<bos>(3+4)*5" + "\n" + (
        r"<call>add(3,4)</call><obs>7</obs><answer>\boxed{35}</answer>"
    )


def test_of_a_chat_the_replies_and_their_ends_are_learned_and_no_other_role() -> None:
    chat = ChatTemplateRenderer(make_tokenizer(SMOLLM2))
    (one,) = made(
        dialogue(("system", "be brief"), ("user", "3+4?"), ("assistant", "7"), ("user", "5+5?"), ("assistant", "10")),
        renderer=chat,
    )
    assert learned(chat, one) == "7<|im_end|>10<|im_end|>"


def test_tk_013_a_cut_dialogue_is_not_taught_to_end_there() -> None:
    chat = ChatTemplateRenderer(make_tokenizer(SMOLLM2))
    talk = dialogue(("user", "hi"), ("assistant", "one two three four five six"))
    (whole,) = made(talk, renderer=chat)
    end = chat.get_stop_token_ids()[0]
    assert whole.tokens[whole.loss_mask][-1] == end
    (cut,) = made(talk, renderer=chat, max_length=len(whole.tokens) - 6)
    assert len(cut.tokens) == len(whole.tokens) - 6
    assert end not in cut.tokens[cut.loss_mask]
    assert np.array_equal(cut.tokens, whole.tokens[:-6]) and np.array_equal(cut.loss_mask, whole.loss_mask[:-6])


def test_mk_011_a_dialogue_cut_before_its_first_reply_is_dropped_and_none_left_is_an_error() -> None:
    assert len(made(CALCULATOR, dialogue(("user", "1+1\n" * 5), ("assistant", "2")), max_length=14)) == 1
    with pytest.raises(DataError, match="none of the 1 dialogues has an assistant token within max_length=5"):
        made(CALCULATOR, max_length=5)


def test_a_dialogue_of_a_task_begins_as_the_environment_shows_the_task() -> None:
    played = Dialogue(CALCULATOR.messages, task=Task("t", "(3+4)*5\n", 35))

    class Loud:
        """Asks in its own words."""

        def reset(self, task: Task, *, seed: int) -> Any:
            from palestra.env.base import Observation

            return Observation(({"role": "user", "content": f"please: {task.prompt}"},))

    (one,) = made(played, env_factory=Loud)  # type: ignore[arg-type]
    assert PLAIN.decode(one.tokens).startswith("<bos>please: (3+4)*5\n<call>")
    (free,) = made(CALCULATOR, env_factory=Loud)  # type: ignore[arg-type]
    assert PLAIN.decode(free.tokens).startswith("<bos>(3+4)"), "a dialogue without a task stays as it is"


# Training --------------------------------------------------------------------------------------------------


def trained(settings: SFTSettings, *, seed: int = 0) -> tuple[list[dict[str, float]], Any]:
    model = tiny_llama(TOKENIZER, hidden=32, layers=1, heads=2, intermediate=32)
    samples = made(*make_dialogues("arithmetic", seed=0, count=12, noise="clean"))
    policy = sft.make_policy(model, settings, reference=False)
    steps = sft.steps_of(settings, len(samples))
    optimizer, scheduler = sft.make_optimisers(policy, settings, rate=1e-2, steps=steps)
    seen: list[dict[str, float]] = []
    sft.fit(policy, samples, settings, optimizer, scheduler, seed=seed, on_step=lambda step, m: seen.append(m))
    return seen, model


def test_the_loss_falls_and_begins_at_the_entropy_of_a_guess() -> None:
    metrics, _ = trained(SFTSettings(data="arithmetic", batch_size=4, steps=12, warmup_ratio=0.0))
    losses = [m["sft/loss"] for m in metrics]
    assert losses[0] == pytest.approx(np.log(len(TOKENIZER)), rel=0.15)
    assert losses[-1] < 0.75 * losses[0]
    assert metrics[-1]["sft/epoch"] == 12 * 4 / 12


def test_the_cut_into_micro_batches_changes_no_weight_to_speak_of() -> None:
    models = []
    for tokens in (8192, 60):
        _, model = trained(SFTSettings(data="arithmetic", batch_size=4, steps=2, micro_batch_tokens=tokens))
        models.append(model)
    for one, two in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)


def test_steps_follow_from_epochs_and_batch_size_unless_given() -> None:
    assert sft.steps_of(SFTSettings(data="arithmetic", epochs=3, batch_size=8), 20) == 9
    assert sft.steps_of(SFTSettings(data="arithmetic", steps=5), 20) == 5


class Interrupted(Progress):
    """Ctrl-C after a certain step."""

    def __init__(self, at: int) -> None:
        super().__init__(quiet=True)
        self.at = at

    def update(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        if step == self.at:
            raise KeyboardInterrupt
        super().update(step, metrics)


def config(out: Path, **more: Any) -> SFTConfig:
    settings = {"data": {"name": "arithmetic", "count": 10}, "batch_size": 2, "steps": 4, "learning_rate": 1e-3}
    return SFTConfig.model_validate(
        {"model": "builtin:calculator", "renderer": "plain", "sft": settings, "out": str(out)} | more
    )


def weights_in(run: Path, step: int) -> bytes:
    return (run / "checkpoints" / f"step_{step:06d}" / "model.safetensors").read_bytes()


def test_a_resumed_run_ends_with_the_very_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = sft.train_sft(config(tmp_path / "whole"), progress=Progress(quiet=True))
    with pytest.raises(KeyboardInterrupt):
        sft.train_sft(config(tmp_path / "cut"), progress=Interrupted(2))
    resumed = sft.train_sft(config(tmp_path / "cut"), progress=Progress(quiet=True), resume=True)
    assert (whole["steps"], resumed["steps"], whole["dialogues"]) == (4, 4, 10)
    assert resumed["final_loss"] == whole["final_loss"]
    assert weights_in(tmp_path / "cut", 4) == weights_in(tmp_path / "whole", 4)
    assert weights_in(tmp_path / "cut", 4) != weights_in(tmp_path / "cut", 2)
    rows = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "cut" / "summary.json").read_text())["steps"] == 4


def test_the_alarms_of_a_supervised_run_are_counted_in_its_summary(tmp_path: Path) -> None:
    settings = {"data": {"name": "arithmetic", "count": 4}, "batch_size": 2, "steps": 36, "learning_rate": 1e-9}
    summary = sft.train_sft(config(tmp_path / "a", sft=settings | {"warmup_ratio": 0.0}), progress=Progress(quiet=True))
    assert summary["alarms"] == 1, "a rate that moves nothing: sft_loss_flat"
