# SPDX-License-Identifier: Apache-2.0
"""Writes docs/configuration.md from the config classes themselves: python docs/make_configuration.py

A key's meaning is what the docstring of its class says behind ``key:``; keys that explain themselves there only by
their name have a line in ``MEANINGS``. A key without either, or a line for a key that is gone, is an error, so the
page cannot fall behind the code.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from palestra.config import Config
from palestra.engine.local import EngineConfig
from palestra.learn.update import UpdateConfig
from palestra.model.lora import LoraConfig
from palestra.rollout.episode import Limits, SamplingConfig
from palestra.train.config import (
    PRESETS,
    RAILS,
    AlgorithmConfig,
    Choice,
    EvalConfig,
    EvalSettings,
    ModelConfig,
    OptimConfig,
    RLConfig,
    SFTConfig,
    SFTSettings,
    TaskConfig,
    TrainSettings,
)
from palestra.train.preference_config import PairConfig, PairSettings, PreferConfig, RewardModelConfig
from palestra.train.sample_config import SampleConfig, SampleSettings

PAGE = Path(__file__).with_name("configuration.md")

HEAD = """# Configuration

Written by `docs/make_configuration.py` from the code; edit the docstrings there, not this page.

A config is one YAML file with one root: `RLConfig` for `palestra rl`, `SFTConfig` for `palestra sft`, `PreferConfig`
for `palestra prefer`, `RewardModelConfig` for `palestra reward-model`, `EvalConfig` for `palestra eval`, `SampleConfig`
for `palestra sample`. Any key can be given on the command line as `key.sub=value`. A key that nobody reads is refused,
with the nearest right one. `palestra VERB CONFIG.yaml --dry-run` prints every key as it will be used. How YAML is read:
[formats.md](formats.md).

`Choice` means a registered thing by name with its own options beside it, `env: {name: calculator, max_steps: 4}`, or
the name alone, `env: calculator`. `model: PATH` stands for `model: {path: PATH}` in the same way.
"""

ROOTS: tuple[type[Config], ...] = (RLConfig, SFTConfig, PreferConfig, RewardModelConfig, EvalConfig, SampleConfig)

MEANINGS: dict[type[Config], dict[str, str]] = {
    TaskConfig: {
        "seed": "Of everything random: the adapter's weights, the tasks and their order, sampling.",
        "out": "The run directory; one run each.",
        "model": "Which model, see ModelConfig.",
        "data": "A source of tasks: `arithmetic`, `word_problems`, `gsm8k`, `jsonl`, `table`, `math`, `stream`, "
        "`curriculum`, `reasoning_gym`, or your own.",
        "env": "What the agent acts on: `calculator`, `calculator_tools`, `pocket_calculator`, `self_refine`, "
        "`self_question`, `tool_env`, your own, or `module:Class`.",
        "renderer": "How messages become tokens: `chat` (the model's own template; option `tools`: template, system or "
        "error) or `plain` (contents one after another).",
        "rewards": "Part → weight, or part → {function, weight, gate, options}. A function is registered, or "
        "`module:function`. `env` and `env/part` weigh what the environment pays. Left out: what the environment pays.",
        "sampling": "How each turn is sampled, see SamplingConfig.",
        "limits": "What an episode may use, see Limits.",
        "engine": "Options of the in-process engine, see EngineConfig.",
    },
    RLConfig: {
        "lora": "Train a LoRA adapter; left out, all weights train.",
        "warmup": "Supervised training on demonstrations before RL; left out, none.",
        "algorithm": "What is learned from a group, see AlgorithmConfig.",
        "train": "The loop, see TrainSettings.",
        "eval": "Evaluation before, during and after, see EvalSettings.",
        "trackers": "Besides JSONL and TensorBoard: `wandb`, `trackio`.",
    },
    SFTConfig: {
        "seed": "Of the adapter's weights and the order of dialogues.",
        "out": "The run directory; one run each.",
        "model": "Which model, see ModelConfig.",
        "lora": "Train a LoRA adapter; left out, all weights train.",
        "renderer": "How messages become tokens, as above.",
        "sft": "The training itself, see SFTSettings.",
        "save_every": "Optimiser steps between checkpoints (0 = only at the end).",
        "keep_last": "How many checkpoints stay.",
        "trackers": "Besides JSONL and TensorBoard: `wandb`, `trackio`.",
    },
    PairConfig: {
        "seed": "Of the adapter's and the scalar head's weights, the order of pairs, and dropout.",
        "out": "The run directory; one run each.",
        "model": "Which model, see ModelConfig.",
        "lora": "Train a LoRA adapter; left out, all weights train.",
        "renderer": "How messages become tokens, as above.",
        "save_every": "Optimiser steps between checkpoints (0 = only at the end).",
        "keep_last": "How many checkpoints stay.",
        "trackers": "Besides JSONL and TensorBoard: `wandb`, `trackio`.",
    },
    PreferConfig: {"prefer": "The training itself, see PreferenceSettings."},
    RewardModelConfig: {"reward_model": "The training itself, see RewardModelSettings."},
    SampleConfig: {"sample": "What is played and what is made of it, see SampleSettings."},
    SampleSettings: {
        "tasks": "Tasks of the training split; fewer where there are fewer.",
        "group_size": "Episodes per task (also `n` or `num_generations`).",
    },
    EvalConfig: {"eval": "What is measured, see EvaluationSettings."},
    Choice: {"name": "The registered name."},
    ModelConfig: {"device": "`auto` (CUDA, else MPS, else CPU), `cpu`, `cuda` or `mps`."},
    OptimConfig: {
        "warmup_ratio": "Share of the steps over which the rate rises linearly; then it falls linearly to 0.",
        "weight_decay": "Of matrices; norms and biases do not decay.",
        "betas": "Of AdamW.",
        "gradient_checkpointing": "A second forward pass instead of memory.",
    },
    SFTSettings: {
        "epochs": "Passes over the dialogues, unless `steps` is given.",
        "steps": "Optimiser steps, instead of `epochs`.",
        "micro_batch_tokens": "Bounds the memory of one forward and backward pass; does not change the result.",
        "max_grad_norm": "The gradient is scaled down to this norm.",
    },
    PairSettings: {
        "eval_every": "Steps between measurements of `held_out` (0 = only before and after).",
        "epochs": "Passes over the pairs, unless `steps` is given.",
        "steps": "Optimiser steps, instead of `epochs`.",
        "micro_batch_tokens": "Bounds the memory of one forward and backward pass; does not change the result.",
        "max_grad_norm": "The gradient is scaled down to this norm.",
    },
    TrainSettings: {
        "steps": "Steps of the loop; the learning-rate schedule ends with the last one.",
        "tasks_per_step": "Groups per step.",
        "save_every": "Steps between checkpoints (0 = only before the first and after the last step).",
        "keep_last": "How many checkpoints stay.",
        "dump_every": "Steps between rollout files; the first and the last step always have one, and so has the first "
        "after each checkpoint.",
    },
    AlgorithmConfig: {
        "preset": "Names a set of parts, see below.",
        "group_size": "Episodes per task (also `num_generations`); at least 2 where the advantage compares siblings.",
    },
    UpdateConfig: {
        "advantage": "`group_zscore`, `group_mean`, `group_mean_batch_std`, `rloo`, `rloo_zscore`, `reinforce`, "
        "`reinforce_baseline`, `reinforce_pp`, `reinforce_pp_baseline`, `turn_group_mean`, `turn_group_zscore`, `gae`, "
        "`gae_turns`, `best_of_group`, `distill`, `nothing`, or your own.",
        "advantage_eps": "Added to the deviation of a group.",
        "loss": "`clip`, `reinforce`, `gspo`, `gspo_token`, `cispo`, or your own.",
        "clip_low": "The ratio counts from 1 − clip_low; 1 = no lower bound.",
        "clip_high": "The ratio counts up to 1 + clip_high.",
        "kl": "Estimator of the KL term: `k2`, `k3` or `full` (exact, from whole distributions) in the loss, `k1` in "
        "the reward (or in the loss with `kl_importance`).",
        "updates_per_batch": "Passes over the same rows, each one optimiser step per minibatch.",
        "minibatches": "Parts to which each pass deals the groups (or the episodes), as seed and step fix.",
        "reduction": "`sequence_mean` (per episode, then over episodes), `token_mean` or `constant`.",
        "micro_batch_tokens": "Bounds the memory of one forward and backward pass; does not change the result.",
        "max_grad_norm": "The gradient is scaled down to this norm.",
    },
    EvalSettings: {
        "data": "Another source than the training data's held-out split.",
        "curve_size": "Held-out tasks of the evaluations in between.",
        "temperature": "0 = greedy.",
        "split": "Which split of the data is held out.",
    },
    EngineConfig: {},
    LoraConfig: {},
    Limits: {},
    SamplingConfig: {
        "max_new_tokens": "Tokens per turn.",
        "temperature": "T of softmax(logits / T); the trainer uses the same.",
        "top_p": "Evaluation only; training refuses to cut the distribution.",
        "top_k": "As `top_p`.",
        "min_p": "As `top_p`.",
        "stop": "Strings that end a turn, beside the environment's and the model's own end tokens.",
    },
}


def page() -> str:
    """The whole page.

    >>> "| `group_size` | int | 8 |" in page()
    True
    """
    check_meanings()
    parts = [HEAD]
    for cls in sections():
        parts += [f"## {cls.__name__}", lead(cls), table(cls)]
    parts += ["## Presets", presets(), "## Learning-rate rails", rails()]
    return "\n\n".join(p.strip() for p in parts) + "\n"


def sections() -> list[type[Config]]:
    """The roots, then every config they hold, in the order of first mention."""
    found: list[type[Config]] = []
    waiting = list(ROOTS)
    while waiting:
        cls = waiting.pop(0)
        if cls not in found:
            found.append(cls)
            waiting += [c for f in cls.model_fields.values() for c in configs_in(f.annotation)]
    return found


def configs_in(annotation: Any) -> Iterator[type[Config]]:
    """The configs among the alternatives of a type, except a plain choice by name."""
    for option in typing.get_args(annotation) or (annotation,):
        if isinstance(option, type) and issubclass(option, Config) and option is not Choice:
            yield option


def prose(cls: type[Config]) -> str:
    """A docstring as one line, without its examples and cross-reference marks."""
    text = " ".join((cls.__doc__ or "").partition(">>>")[0].split())
    return re.sub(r":class:`~?(?:\w+\.)*(\w+)`", r"``\1``", text)


def lead(cls: type[Config]) -> str:
    """What a docstring says before its first ``key:``."""
    text = prose(cls)
    first = min((m.start() for m in named(cls, text)), default=len(text))
    return text[:first].replace("``", "`").strip()


def named(cls: type[Config], text: str) -> Iterator[re.Match[str]]:
    """Where a docstring explains keys: ``key:`` or ``key, key:`` at the start of a sentence."""
    keys = "|".join(sorted(map(re.escape, cls.model_fields), key=len, reverse=True))
    return re.finditer(rf"(?:(?<=^)|(?<=[.)] ))(?:``)?((?:{keys})(?:, (?:{keys}))*)(?:``)?(?: \([^)]*\))?: ", text)


def described(cls: type[Config]) -> dict[str, str]:
    """key → meaning, from the docstring of the class alone."""
    text = prose(cls)
    marks = list(named(cls, text))
    ends = [*(m.start() for m in marks), len(text)][1:]
    meanings: dict[str, str] = {}
    for mark, end in zip(marks, ends, strict=True):
        said = text[mark.end() : end].strip().replace("``", "`")
        plain = re.match(r"[a-z]+\b", said)  # a value such as bfloat16 stays as it is
        meanings |= dict.fromkeys(mark[1].split(", "), said[:1].upper() + said[1:] if plain else said)
    return meanings


def meaning(cls: type[Config], key: str) -> str:
    """What a key means: the table's line or the docstring's, the most derived class first."""
    for base in cls.__mro__:
        if isinstance(base, type) and issubclass(base, Config):
            found = MEANINGS.get(base, {}).get(key) or described(base).get(key)
            if found:
                return found
    raise KeyError(f"{cls.__name__}.{key} has no meaning: say it in the docstring of its class")


def check_meanings() -> None:
    """Raises KeyError for a line about a key that does not exist."""
    for cls, lines in MEANINGS.items():
        for key in lines:
            if key not in cls.model_fields:
                raise KeyError(f"{cls.__name__} has no key {key!r} any more: take its line out of MEANINGS")


def table(cls: type[Config]) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, field in cls.model_fields.items():
        cells = (f"`{key}`", kind(field.annotation), default(field), meaning(cls, key).replace("|", "\\|"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def kind(annotation: Any) -> str:
    """A type as a reader of YAML knows it.

    >>> kind(int | None), kind(typing.Literal["a", "b"]), kind(tuple[float, float])
    ('int or none', '`a`, `b`', 'list of float')
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{a}`" for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("none" if a is type(None) else kind(a) for a in args)
    if origin is tuple:
        return f"list of {kind(args[0])}"
    if origin is dict:
        return "mapping"
    return {str: "text"}.get(annotation, getattr(annotation, "__name__", str(annotation)))


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Choice):
        return f"`{value.name}`"
    if isinstance(value, Config):
        return "its defaults"
    if value is None:
        return "none"
    return f"`{list(value)}`" if isinstance(value, tuple) else f"`{value}`" if isinstance(value, str) else str(value)


def presets() -> str:
    lines = ["| preset | parts |", "|---|---|"]
    for name, parts in PRESETS.items():
        lines.append(f"| `{name}` | {', '.join(f'{k}: {v}' for k, v in parts.items())} |")
    return "Every part can be overridden by its own key.\n\n" + "\n".join(lines)


def rails() -> str:
    lines = ["| training | lowest | default | highest |", "|---|---|---|---|"]
    for (name, adapter), (low, usual, high) in RAILS.items():
        lines.append(f"| {name.upper()}{' with LoRA' if adapter else ''} | {low:g} | {usual:g} | {high:g} |")
    text = (
        "What a pretrained model usually bears; `guard` says what happens outside. Built-in models are exempt. "
        "Defaults are what the Agentic-RL chapter advises (SFT 5e-5, with LoRA 1e-4, RL 1e-6 to 1e-5). The ranges are "
        "wider: upwards as far as the examples with SmolLM2-135M went and stayed healthy (SFT 1e-4, with LoRA 5e-4, RL "
        "with LoRA 1e-4), downwards because a careful rate is slow rather than sick."
    )
    return text + "\n\n" + "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
