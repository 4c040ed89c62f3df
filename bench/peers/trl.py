# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers, a step a request: GRPO, its tool loop, SFT and DPO.

The trainer runs as it always does; a callback holds it before each optimiser step until a step is asked for, and
answers when the step is done. Full fine-tuning without gradient checkpointing (TRL's default is with: it would be
slower), one micro-batch a step, its defaults elsewhere.
"""

from __future__ import annotations

import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.trainer import grpo_trainer

from bench.peers.serve import Channel, Finished, Reply, peak_gib, serve, timed
from bench.peers.trl_learning import learning

PACKAGES = ["trl", "torch", "transformers", "accelerate", "datasets"]
RESULT = "The result is 4711."
MANY = 1_000_000


class _Paced(TrainerCallback):
    """One step for one request; ``parts`` are the seconds of what :func:`_clocked` watches."""

    def __init__(self, channel: Channel, facts: Callable[[], Reply]) -> None:
        self.channel, self.facts = channel, facts
        self.requests: Iterator[dict[str, Any]] = channel.requests()
        self.parts: dict[str, float] = {}
        self.began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if next(self.requests, None) is None:
            raise Finished
        self.parts.clear()
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = time.perf_counter() - self.began
        self.channel.reply(seconds=seconds, split=dict(self.parts), peak_gib=peak_gib(), **self.facts())


def prepare(channel: Channel) -> Callable[[dict[str, Any]], Reply] | None:
    """config: work, model, threads, dtype (bfloat16: autocast over float32 weights) and the sizes of the work."""
    config = channel.config
    torch.set_num_threads(config["threads"])
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(config["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(config["model"])
    return _WORKS[config["work"]](channel, config, model, tokenizer)


def _common(config: dict[str, Any], batch: int) -> dict[str, Any]:
    """What every trainer is told."""
    return {
        "output_dir": tempfile.mkdtemp(prefix="bench-trl-"),
        "per_device_train_batch_size": batch,
        "max_steps": MANY,
        "learning_rate": 1e-6,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "bf16": config.get("dtype") == "bfloat16",
        "gradient_checkpointing": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
    }


def _run(channel: Channel, trainer: Any, paced: _Paced) -> None:
    """Train until nothing more is asked for."""
    trainer.add_callback(paced)
    channel.ready(PACKAGES)
    try:
        trainer.train()
    except Finished:
        return


# GRPO ------------------------------------------------------------------------------------------------------


def _pay(completions: list[Any], **_: Any) -> list[float]:
    """A number that depends on the text alone, so that members of a group differ."""
    return [zlib.crc32(str(c).encode("utf-8", "replace")) % 1009 / 1009 for c in completions]


def _grpo_trainer(config: dict[str, Any], model: Any, tokenizer: Any, **more: Any) -> Any:
    """GRPO without KL on ``texts``, ``samples`` of each, ``new`` tokens in every turn: none ends it earlier."""
    texts, turns = config["texts"], config.get("turns", 1)
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in texts]
    length = turns * config["new"] + (turns - 1) * 64  # results of tools count towards it
    args = trl.GRPOConfig(
        **_common(config, len(texts) * config["samples"]),
        num_generations=config["samples"],
        max_completion_length=length,
        generation_kwargs={"max_new_tokens": config["new"], "min_new_tokens": config["new"]},
        beta=0.0,
        shuffle_dataset=False,
        **({"max_tool_calling_iterations": turns - 1} if turns > 1 else {}),
    )
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=_pay,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **more,
    )


def _grpo(channel: Channel, config: dict[str, Any], model: Any, tokenizer: Any) -> None:
    """Whole steps, with the seconds of generation, forward and backward."""
    trainer = _grpo_trainer(config, model, tokenizer)
    paced = _Paced(channel, dict)
    _clocked(trainer, "_generate_single_turn", "generate_s", paced.parts)
    _clocked(trainer, "_get_per_token_logps_and_entropies", "forward_s", paced.parts)
    _clocked(trainer.accelerator, "backward", "backward_s", paced.parts)
    _run(channel, trainer, paced)


def _clocked(owner: Any, name: str, part: str, parts: dict[str, float]) -> None:
    """Add the seconds of every call of a method to ``parts``."""
    inner = getattr(owner, name)

    def outer(*args: Any, **more: Any) -> Any:
        seconds, result = timed(lambda: inner(*args, **more))
        parts[part] = parts.get(part, 0.0) + seconds
        return result

    setattr(owner, name, outer)


def lookup(key: str) -> str:
    """Look a key up.

    Args:
        key: What to look up.
    """
    return RESULT


def _tools(channel: Channel, config: dict[str, Any], model: Any, tokenizer: Any) -> Callable[[dict[str, Any]], Reply]:
    """Rollouts alone, through TRL's own tool loop. An untrained model never writes a call, so every reply is *read* as
    one; what is sampled stays as it is, and so do the lengths."""

    def read(_tokenizer: Any, ids: list[int], **_: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "lookup", "arguments": {"key": "x"}}}
        return {"role": "assistant", "content": tokenizer.decode(ids), "tool_calls": [call]}

    grpo_trainer.parse_response = read
    tokenizer.response_template = tokenizer.response_schema = {}
    trainer = _grpo_trainer(config, model, tokenizer, tools=[lookup])
    trainer.model.train()
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in config["texts"]]
    inputs = [row for row in rows for _ in range(config["samples"])]
    expected = len(inputs) * config["turns"] * config["new"]

    def measure(_: dict[str, Any]) -> Reply:
        seconds, out = timed(lambda: trainer._generate_and_score_completions([dict(row) for row in inputs]))
        tokens = int((out["completion_mask"] * out["tool_mask"]).sum())
        if tokens != expected:
            raise RuntimeError(f"TRL sampled {tokens} tokens, not {expected}: its tool loop has changed")
        return {"seconds": seconds, "tokens": tokens}

    return measure


# SFT and DPO -----------------------------------------------------------------------------------------------


def _words(tokenizer: Any) -> list[int]:
    """Ids of ordinary tokens that survive decoding and encoding one by one."""
    ids = range(len(tokenizer))
    kept = [i for i in ids if tokenizer.encode(tokenizer.decode([i]), add_special_tokens=False) == [i]]
    return [i for i in kept if i not in tokenizer.all_special_ids][:4096]


def _sft(channel: Channel, config: dict[str, Any], model: Any, tokenizer: Any) -> None:
    """Steps on ``batch`` sequences of ``length`` tokens, all trained on."""
    words, length = _words(tokenizer), config["length"]
    data = [{"input_ids": [words[(7 * i + j) % len(words)] for j in range(length)]} for i in range(config["batch"])]
    args = trl.SFTConfig(**_common(config, config["batch"]), max_length=length, packing=False)
    trainer = trl.SFTTrainer(model=model, args=args, train_dataset=Dataset.from_list(data), processing_class=tokenizer)
    _counted(channel, trainer)


def _dpo(channel: Channel, config: dict[str, Any], model: Any, tokenizer: Any) -> None:
    """Steps on ``batch`` pairs whose sides have about ``length`` tokens each, half of them the prompt."""
    words, half = _words(tokenizer), config["length"] // 2

    def text(seed: int, count: int) -> str:
        return str(tokenizer.decode([words[(seed + 11 * j) % len(words)] for j in range(count)]))

    data = [
        {"prompt": text(i, half), "chosen": text(i + 1, half - 1), "rejected": text(i + 2, half - 1)}
        for i in range(config["batch"])
    ]
    args = trl.DPOConfig(**_common(config, config["batch"]), max_length=config["length"])
    trainer = trl.DPOTrainer(model=model, args=args, train_dataset=Dataset.from_list(data), processing_class=tokenizer)
    _counted(channel, trainer)


def _counted(channel: Channel, trainer: Any) -> None:
    """Run with the real tokens of each step's batch counted."""
    inner, seen = trainer.compute_loss, [0]

    def outer(model: Any, inputs: dict[str, Any], *args: Any, **more: Any) -> Any:
        mask = inputs.get("attention_mask")
        seen[0] = int(mask.sum()) if mask is not None else inputs["input_ids"].numel()
        return inner(model, inputs, *args, **more)

    trainer.compute_loss = outer
    _run(channel, trainer, _Paced(channel, lambda: {"tokens": seen[0]}))


_WORKS: dict[str, Callable[..., Callable[[dict[str, Any]], Reply] | None]] = {
    "step": _grpo,
    "episodes": _tools,
    "sft": _sft,
    "dpo": _dpo,
    "learning": learning,
}


if __name__ == "__main__":
    serve(prepare, PACKAGES)
