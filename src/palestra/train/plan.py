# SPDX-License-Identifier: Apache-2.0
"""``--dry-run``: what a config amounts to, before anything is spent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from palestra.chat import Renderer
from palestra.config import Config, dump
from palestra.data.dialogues import make_dialogues
from palestra.env import Env
from palestra.model.lora import add_lora, base_model, is_adapter, trainable_report
from palestra.train import setup
from palestra.train.config import EvalConfig, RLConfig, SFTConfig, SFTSettings, learning_rate
from palestra.train.evaluation import plan_eval
from palestra.train.prefer import prepare
from palestra.train.prefer import steps_of as preference_steps
from palestra.train.preference_config import PairConfig, PairSettings, PreferConfig, RewardModelConfig
from palestra.train.reference import load_teacher
from palestra.train.sample_config import SampleConfig
from palestra.train.sft import dialogue_samples, steps_of

_GIB = 2**30


def describe(config: Config) -> str:
    """The resolved config and its consequences as text: groups, tokens, optimiser steps, divisors, parameters,
    memory. Loads the model (for its sizes) and checks every name and data file; writes nothing."""
    plans = {RLConfig: _rl, SFTConfig: _sft, PreferConfig: _prefer, RewardModelConfig: _reward_model}
    lines = (plans | {SampleConfig: _sample, EvalConfig: plan_eval})[type(config)](config)  # type: ignore[operator]
    return dump(config).rstrip() + "\n\n" + "\n".join(f"# {line}" for line in lines) + "\n"


@dataclass(frozen=True, slots=True)
class _Model:
    """Sizes that the estimates need."""

    parameters: int
    trainable: int
    hidden: int
    layers: int
    vocabulary: int
    bytes_each: int

    def training_bytes(self, tokens: int, logits: int, *, copies: int, checkpointing: bool) -> int:
        """Weights, gradients and Adam's two moments (for short weights with float32 masters and gradients), about 16
        activations of the hidden size per token and layer (one with checkpointing), and three float32 copies of the
        logits of ``logits`` trained tokens."""
        trained = self.bytes_each + 8 if self.bytes_each >= 4 else 16
        weights = self.parameters * self.bytes_each * copies + self.trainable * trained
        activations = tokens * self.hidden * self.layers * 4 * (1 if checkpointing else 16)
        return weights + activations + 3 * 4 * logits * self.vocabulary


def _measure(model: nn.Module) -> _Model:
    report = trainable_report(model)
    config = base_model(model).config.get_text_config()  # type: ignore[union-attr, operator]
    weight = next(model.parameters())
    return _Model(
        report.total,
        report.trainable,
        int(config.hidden_size),
        int(config.num_hidden_layers),
        int(config.vocab_size),
        weight.element_size(),
    )


def _rl(config: RLConfig) -> list[str]:
    loaded = setup.load(config.model)
    world = setup.make_world(config, loaded)
    held_out = len(setup.eval_tasks(config, config.eval, config.eval.size)) if config.eval.size else 0
    model = add_lora(loaded.model, config.lora) if config.lora is not None else loaded.model
    size, train, algorithm = _measure(model), config.train, config.algorithm
    episodes = train.tasks_per_step * algorithm.group_size
    longest = min(config.limits.max_tokens, config.limits.max_turns * config.sampling.max_new_tokens)
    adapter = config.lora is not None
    rate, warning = learning_rate(train, "rl", lora=adapter, from_scratch=config.model.from_scratch)
    teacher = load_teacher(config, loaded)
    copies = 1 + (teacher is None and algorithm.kl_coef > 0 and not adapter)
    copies += algorithm.needs_critic and algorithm.critic == "separate"
    memory = size.training_bytes(
        algorithm.micro_batch_tokens,
        algorithm.micro_batch_tokens,
        copies=copies,
        checkpointing=train.gradient_checkpointing,
    )
    memory += _ahead_bytes(config, size)
    divisor = {
        "sequence_mean": "each episode's own trained tokens, then the number of episodes",
        "token_mean": "all trained tokens of the step",
        "constant": f"the step's episodes × {algorithm.divisor_tokens} tokens",
    }[algorithm.reduction]
    kl = "no KL term, no reference in memory"
    if algorithm.kl_coef:
        kl = f"KL {algorithm.kl} × {algorithm.kl_coef:g} in the {algorithm.kl_in}"
    elif teacher is not None:
        kl = "no KL term beside it"
    tasks = "endless" if world.tasks.size is None else f"{world.tasks.size:,}"
    lines = [
        f"model: {trainable_report(model)}",
        f"tasks: {tasks} for training, {held_out:,} held out for evaluation",
        f"a step: {train.tasks_per_step} tasks × {algorithm.group_size} episodes = {episodes} episodes, "
        f"each up to {longest:,} sampled tokens over {config.limits.max_turns} turns",
        f"the run: {train.steps} steps, {train.steps * episodes:,} episodes, "
        f"{train.steps * algorithm.updates_per_batch * algorithm.minibatches:,} optimiser steps at learning rate "
        f"{rate:g} ({round(train.steps * train.warmup_ratio)} warm-up steps, then linear to 0)",
        f"loss: {algorithm.advantage}, {algorithm.loss}, divided by {divisor}; {kl}",
        f"memory: about {memory / _GIB:.1f} GiB for an update of {algorithm.micro_batch_tokens:,} tokens",
    ]
    lines[3:3] = [*_drawn_again(config), *_ahead(config, size)]
    if teacher is not None:
        weights = sum(p.numel() * p.element_size() for p in teacher.model.parameters())
        lines[1:1] = [f"teacher: {teacher.source}, {weights / _GIB:.1f} GiB beside the memory below"]
    if config.warmup is not None:
        lines.insert(3, "warm-up: " + _supervised(config.warmup, config, world.renderer, world.env_factory))
    return [*lines, *([f"warning: {warning}"] if warning else [])]


def _drawn_again(config: RLConfig) -> list[str]:
    """What happens to groups that nothing can be learned from."""
    algorithm, tasks = config.algorithm, config.train.tasks_per_step
    said = []
    if algorithm.dynamic_sampling:
        said.append("dynamic sampling: groups of equal rewards are left out of the update")
    if algorithm.max_gen_batches > 1:
        most = tasks * algorithm.max_gen_batches
        said.append(
            f"refill: groups left out or failed are replaced by fresh tasks, drawn at most {algorithm.max_gen_batches} "
            f"times a step: at most {most} tasks × {algorithm.group_size} = {most * algorithm.group_size:,} episodes"
        )
    if algorithm.mask_truncated:
        said.append("episodes that a limit ends have no gradient")
    return said


def _ahead(config: RLConfig, size: _Model) -> list[str]:
    """Which policy plays, where it is not the one that learns."""
    lag = config.train.max_staleness
    if not lag:
        return []
    version, copy = ("versions", "copies") if lag > 1 else ("version", "copy")
    return [
        f"played while earlier steps are learned from, by the policy {lag} {version} older: {lag} more {copy} of the "
        f"weights that train, {_ahead_bytes(config, size) / _GIB:.3f} GiB of the memory below"
    ]


def _ahead_bytes(config: RLConfig, size: _Model) -> int:
    """Weights of older policies: the engine's, and those that wait for it."""
    return config.train.max_staleness * size.trainable * size.bytes_each


def _sft(config: SFTConfig) -> list[str]:
    loaded = setup.load(config.model)
    renderer = setup.renderer_for(config.renderer, loaded)
    model = add_lora(loaded.model, config.lora) if config.lora is not None else loaded.model
    tokens = config.sft.micro_batch_tokens
    memory = _measure(model).training_bytes(tokens, tokens, copies=1, checkpointing=config.sft.gradient_checkpointing)
    return [
        f"model: {trainable_report(model)}",
        _supervised(config.sft, config, renderer),
        "loss: cross-entropy of the assistant's tokens, divided by all trained tokens of the step",
        f"memory: about {memory / _GIB:.1f} GiB for an update of {tokens:,} tokens",
    ]


def _supervised(
    settings: SFTSettings,
    config: RLConfig | SFTConfig,
    renderer: Renderer,
    env_factory: Callable[[], Env] | None = None,
) -> str:
    """The dialogues are rendered as the run will, for only then is it known which of them are too long."""
    dialogues, said = make_dialogues(settings.data.name, seed=config.seed, **settings.data.options), list[str]()
    how: Any = {"max_length": settings.max_length, "env_factory": env_factory, "tell": said.append}
    kept = len(dialogue_samples(dialogues, renderer, **how))
    adapter = config.lora is not None
    rate, _ = learning_rate(settings, "sft", lora=adapter, from_scratch=config.model.from_scratch)
    steps = steps_of(settings, kept)
    told = f"{kept:,} dialogues, {steps:,} optimiser steps of {settings.batch_size} dialogues at learning rate {rate:g}"
    return "; ".join([told, *said])


def _prefer(config: PreferConfig) -> list[str]:
    settings, loss = config.prefer, config.prefer.chosen_loss
    options = ", ".join(f"{k} {v}" for k, v in settings.loss_config.model_dump().items())
    copies = 1
    if not loss.reference:
        reference = "no reference"
    elif settings.precompute_reference:
        reference = "reference log-probs computed once, before training"
    elif config.lora is not None:
        reference = "the reference is the base under the adapter"
    else:
        reference, copies = "the reference is a copy of what trains", 2
    first, second, *rest = _pairs(config, settings, "rl", paired=loss.paired, copies=copies)
    return [first, second, f"loss: {settings.loss.name} ({options}), mean over the step; {reference}", *rest]


def _reward_model(config: RewardModelConfig) -> list[str]:
    settings = config.reward_model
    first, second, *rest = _pairs(config, settings, "sft", paired=True, spare_tokens=1)
    centred = f" + {settings.center_coefficient:g}·(r_chosen + r_rejected)²" if settings.center_coefficient else ""
    return [first, second, f"loss: −log σ(r_chosen − r_rejected){centred}, mean over the step", *rest]


def _pairs(
    config: PairConfig,
    settings: PairSettings,
    kind: Literal["sft", "rl"],
    *,
    paired: bool,
    copies: int = 1,
    spare_tokens: int = 0,
) -> list[str]:
    prepared = prepare(config, settings, paired=paired, spare_tokens=spare_tokens)
    unit = "pairs" if paired else "labelled replies"
    adapter = is_adapter(prepared.model)
    rate, warning = learning_rate(settings, kind, lora=adapter, from_scratch=config.model.from_scratch)
    tokens, count = settings.micro_batch_tokens, len(prepared.data)
    memory = _measure(prepared.model).training_bytes(
        tokens, tokens, copies=copies, checkpointing=settings.gradient_checkpointing
    )
    held_out = len(prepared.held_out) if prepared.held_out is not None else 0
    return [
        f"model: {trainable_report(prepared.model)}",
        f"{count:,} {unit}, {held_out:,} held out; {preference_steps(settings, count):,} optimiser steps of "
        f"{settings.batch_size} at learning rate {rate:g}",
        f"memory: about {memory / _GIB:.1f} GiB for an update of {tokens:,} tokens",
        *(f"warning: {text}" for text in (warning, *prepared.left_out) if text),
    ]


def _sample(config: SampleConfig) -> list[str]:
    loaded = setup.load(config.model)
    world, chosen = setup.make_world(config, loaded), config.sample
    tasks = chosen.tasks if world.tasks.size is None else min(chosen.tasks, world.tasks.size)
    lines = [
        f"model: {sum(p.numel() for p in loaded.model.parameters()):,} parameters",
        f"{tasks:,} tasks × {chosen.group_size} episodes = {tasks * chosen.group_size:,} episodes, each up to "
        f"{config.episode_tokens:,} sampled tokens, temperature {config.sampling.temperature:g}",
    ]
    if (kept := chosen.dialogues) is not None:
        least = "" if kept.threshold is None else f" with a reward of at least {kept.threshold:g}"
        lines.append(f"dialogues: the best {kept.keep} of each task{least}, in {config.out}/dialogues.jsonl")
    if chosen.pairs is not None:
        lines.append(f"pairs: up to {chosen.pairs.per_task} of each task, in {config.out}/pairs.jsonl")
    return lines
