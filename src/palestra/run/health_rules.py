# SPDX-License-Identifier: Apache-2.0
"""The health rules, as data: what is looked for, what usually causes it, what to change. See docs/health.md.

A rule looks at windows, never at one value, and stays silent where it cannot apply. Its remedies name config keys;
``{sft}``, ``{train}``, ``{format}`` stand for what the run at hand calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from palestra.run import health_checks as checks
from palestra.run.health_facts import Facts, Finding, Look

NewValue = Callable[[Facts, str, str], Any]
"""(facts, phase, key) → the value to try, or None where there is no room: the remedy is then left out."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing to change: the config key, why, and the value to try (left out: that is for a person to decide)."""

    key: str
    why: str
    value: NewValue | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One way in which a run is sick. check: the condition; cause: what it usually means."""

    name: str
    phase: str
    check: Callable[[Look], Finding | None]
    cause: str
    remedies: tuple[Remedy, ...]


def _slower(facts: Facts, phase: str, key: str) -> float | None:
    return facts.moved_rate(phase, 1 / 5)


def _faster(facts: Facts, phase: str, key: str) -> float | None:
    return facts.moved_rate(phase, 5)


def _times(factor: float, *, lowest: float = 0, highest: float, fallback: float = 0) -> NewValue:
    """The present value times ``factor`` within bounds; ``fallback`` stands for a value of 0 or none."""

    def value(facts: Facts, phase: str, key: str) -> float | int | None:
        now = facts.number(key)
        new = min(max(now * factor, lowest), highest) if now else fallback
        new = int(new) if isinstance(facts.get(key, fallback), int) else round(new, 6)
        return new if (new > now if factor > 1 else new < now) else None

    return value


def _format_weight(facts: Facts, phase: str, key: str) -> float | None:
    new = round(0.1 * facts.weight(facts.metric), 6)
    return new if new < facts.weight(facts.format_part) else None


LOWER_RATE = Remedy("{train}.learning_rate", "smaller steps", _slower)
RAISE_RATE = Remedy("{train}.learning_rate", "larger steps", _faster)
MORE_KL = Remedy("algorithm.kl_coef", "holds the policy near the reference", _times(2, highest=0.2, fallback=0.05))
LESS_KL = Remedy("algorithm.kl_coef", "lets the policy move", _times(0.5, lowest=0.01, highest=1))
TIGHTER_CLIP = Remedy("algorithm.max_grad_norm", "bounds each step", _times(0.5, lowest=0.1, highest=1))
FEWER_UPDATES = Remedy("algorithm.updates_per_batch", "less drift from one batch", _times(0.5, lowest=1, highest=8))
LARGER_GROUP = Remedy("algorithm.group_size", "more chances of a difference", _times(2, lowest=8, highest=16))
HOTTER = Remedy("sampling.temperature", "more variety among siblings", _times(2, highest=1.0))
MIXED_TASKS = Remedy("data", "mix difficulties: some tasks must succeed sometimes, and fail sometimes")
CHECK_REWARDS = Remedy("rewards", "look at episodes (palestra view): does the reward pay what you want?")
PARTIAL_CREDIT = Remedy("rewards", "add partial credit, so that siblings differ before they succeed")
BETTER_START = Remedy("warmup", "a better start: supervised training on demonstrations first")
LESS_FORMAT = Remedy("rewards.{format}", "form is a means", _format_weight)
EARLIER_END = Remedy("train.steps", "stop earlier, or train on more data")
MORE_TOKENS = Remedy("sampling.max_new_tokens", "room to finish a reply", _times(2, highest=8192))
DATA_CHECK = Remedy("{sft}.data", "look at the dialogues: right template, right labels, enough of them?")

RULES: tuple[Rule, ...] = (
    Rule(
        "grad_norm_high",
        "rl",
        checks.above("train/grad_norm", 100, 5, "the gradient norm is {mean:.3g}; 0.1 to 10 is usual"),
        "the learning rate is too high, or single tokens have extreme ratios or advantages",
        (LOWER_RATE, TIGHTER_CLIP, FEWER_UPDATES),
    ),
    Rule(
        "grad_norm_low",
        "rl",
        checks.grad_norm_low,
        "almost nothing reaches the weights: the wrong modules train, or the loss is divided by too much",
        (
            Remedy("lora.target_modules", "check what trains: all-linear reaches the most"),
            Remedy("algorithm.reduction", "sequence_mean divides by tokens and episodes, not by a constant"),
        ),
    ),
    Rule(
        "kl_high",
        "rl",
        checks.kl_high,
        "the policy runs away from the reference: learning rate too high, KL term too weak, or a reward too tempting",
        (LOWER_RATE, MORE_KL, CHECK_REWARDS, TIGHTER_CLIP),
    ),
    Rule(
        "kl_low",
        "rl",
        checks.kl_low,
        "the policy hardly moves: learning rate too low, or KL term too strong",
        (RAISE_RATE, LESS_KL),
    ),
    Rule(
        "group_collapse",
        "rl",
        checks.group_collapse,
        "siblings get equal rewards, so advantages are zero: tasks too hard or too easy, a reward that does not tell "
        "episodes apart, too little variety in sampling",
        (HOTTER, LARGER_GROUP, MIXED_TASKS, PARTIAL_CREDIT, BETTER_START),
    ),
    Rule(
        "reward_flat",
        "rl",
        checks.reward_flat,
        "learning rate too low, KL term too strong, a reward that does not tell good from bad, or a start too weak",
        (RAISE_RATE, LESS_KL, CHECK_REWARDS, BETTER_START),
    ),
    Rule(
        "reward_falls",
        "rl",
        checks.reward_falls,
        "the policy broke: the steps were too large for it",
        (LOWER_RATE, MORE_KL, FEWER_UPDATES, TIGHTER_CLIP),
    ),
    Rule(
        "format_over_accuracy",
        "rl",
        checks.format_over_accuracy,
        "form pays too much: the model learns to look right instead of being right",
        (LESS_FORMAT, CHECK_REWARDS),
    ),
    Rule(
        "format_falls",
        "rl",
        checks.format_falls,
        "only the answer is paid, the policy drifts from its start, or it overfits",
        (Remedy("rewards", "combine parts: accuracy with a small weight for form"), MORE_KL, EARLIER_END),
    ),
    Rule(
        "reward_hacking",
        "rl",
        checks.reward_hacking,
        "the reward can be had without solving the task",
        (CHECK_REWARDS, MORE_KL, EARLIER_END),
    ),
    Rule(
        "small_group",
        "rl",
        checks.small_group,
        "with fewer than 4 siblings the deviation is mostly chance, and so is the advantage",
        (Remedy("algorithm.group_size", "4 to 16 siblings", lambda facts, phase, key: 8),),
    ),
    Rule(
        "length_explosion",
        "rl",
        checks.length_explosion,
        "length is paid or costs nothing, or replies lost their end",
        (Remedy("rewards", "add a length part (length_penalty), or stop paying for length"), MORE_KL),
    ),
    Rule(
        "truncation",
        "rl",
        checks.truncation,
        "limits cut episodes short: an answer that would come later is scored as none",
        (
            MORE_TOKENS,
            Remedy("limits.max_tokens", "room for the whole episode", _times(2, highest=65536)),
            Remedy("limits.max_turns", "more turns", _times(2, highest=64)),
            Remedy("limits.max_tool_calls", "more tool calls", _times(2, highest=128, fallback=16)),
            Remedy("limits.timeout_s", "more time", _times(2, highest=7200)),
            Remedy("engine.max_context", "longer context, where the model bears it"),
            Remedy("env", "raise the environment's own limit"),
        ),
    ),
    Rule(
        "clip_inactive",
        "rl",
        checks.clip_inactive,
        "the steps are too small to matter, or the old log-probs are taken anew for every update",
        (
            RAISE_RATE,
            Remedy("algorithm.old_logprobs", "recorded: the sampler's own", lambda f, p, k: "recorded"),
            Remedy("algorithm.updates_per_batch", "further passes only cost time", lambda f, p, k: 1),
        ),
    ),
    Rule(
        "clip_saturated",
        "rl",
        checks.above("train/clip_fraction", 0.3, 5, "{mean:.0%} of the tokens are clipped; 0 to 20% is usual"),
        "one batch moves the policy too far",
        (LOWER_RATE, FEWER_UPDATES),
    ),
    Rule(
        "entropy_collapse",
        "rl",
        checks.entropy_collapse,
        "the policy became certain before it became right; it explores no more",
        (
            LOWER_RATE,
            Remedy("algorithm.clip_high", "lets unlikely tokens grow (clip-higher)", _times(1.4, highest=0.3)),
            MORE_KL,
            HOTTER,
        ),
    ),
    Rule(
        "sampler_differs",
        "rl",
        checks.sampler_differs,
        "sampler and trainer disagree about the same weights: precision, temperature, dropout or a template",
        (
            Remedy("engine.dtype", "auto: sample on the trainer's own weights", lambda f, p, k: "auto"),
            Remedy("algorithm.old_logprobs", "the trainer's own log-probs", lambda f, p, k: "recompute"),
            Remedy("lora.dropout", "no dropout where the policy is sampled", lambda f, p, k: 0.0),
        ),
    ),
    Rule(
        "stale_sampler",
        "rl",
        checks.stale_sampler,
        "the engine samples with weights from before: new ones do not reach it",
        (
            Remedy("engine", "an engine of your own: does load_weights hand over the weights after every step?"),
            Remedy("engine.on_update", "finish what is in flight before new weights come", lambda f, p, k: "finish"),
            Remedy("train.max_staleness", "the bound on what may be trained on", lambda f, p, k: 0),
            Remedy("engine.dtype", "auto: nothing to copy, so nothing to forget", lambda f, p, k: "auto"),
        ),
    ),
    Rule(
        "episodes_fail",
        "rl",
        checks.episodes_fail,
        "the infrastructure fails: an environment, a tool or the engine; the errors stand in the rollouts file",
        (
            Remedy("train.retries", "more tries", _times(2, highest=5, fallback=1)),
            Remedy("train.concurrency", "less load at once", _times(0.5, lowest=1, highest=256)),
            Remedy("limits.step_timeout_s", "more time for a step", _times(2, highest=1800)),
        ),
    ),
    Rule(
        "updates_skipped",
        "rl",
        checks.updates_skipped,
        "the loss or the gradient is not finite",
        (
            LOWER_RATE,
            Remedy("train.compute_dtype", "a wider range of numbers", lambda f, p, k: "float32"),
            TIGHTER_CLIP,
        ),
    ),
    Rule(
        "sft_grad_norm_high",
        "sft",
        checks.above("sft/grad_norm", 100, 5, "the gradient norm is {mean:.3g}; 0.1 to 10 is usual"),
        "the learning rate is too high",
        (LOWER_RATE, Remedy("{sft}.max_grad_norm", "bounds each step", _times(0.5, lowest=0.1, highest=1))),
    ),
    Rule(
        "sft_grad_norm_low",
        "sft",
        checks.sft_grad_norm_low,
        "almost nothing reaches the weights: check what trains and how the model is set up",
        (Remedy("lora.target_modules", "check what trains: all-linear reaches the most"), DATA_CHECK),
    ),
    Rule(
        "sft_loss_flat",
        "sft",
        checks.sft_loss_flat,
        "the learning rate is too low, or the data teaches nothing",
        (RAISE_RATE, DATA_CHECK, Remedy("{sft}.epochs", "more passes", _times(2, highest=6))),
    ),
    Rule(
        "sft_loss_rises",
        "sft",
        checks.sft_loss_rises,
        "the learning rate is too high, or the model overfits",
        (LOWER_RATE, Remedy("{sft}.epochs", "fewer passes", _times(0.5, lowest=1, highest=3)), DATA_CHECK),
    ),
    Rule(
        "sft_overfitting",
        "sft",
        checks.sft_overfitting,
        "the model learns the demonstrations by heart",
        (
            Remedy("{sft}.weight_decay", "stronger weight decay", _times(10, highest=0.1, fallback=0.01)),
            Remedy("{sft}.epochs", "fewer passes", _times(0.5, lowest=1, highest=3)),
            Remedy("{sft}.steps", "stop earlier"),
            Remedy("{sft}.data", "more demonstrations"),
        ),
    ),
)

__all__ = ["RULES", "Remedy", "Rule"]
