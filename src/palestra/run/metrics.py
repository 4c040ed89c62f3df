# SPDX-License-Identifier: Apache-2.0
"""The names under which numbers are logged: ``area/name``, the unit as suffix (``_s`` seconds, ``_tokens``).

One table, one line of help each. A family such as ``reward/<part>`` is declared by its prefix.
"""

from __future__ import annotations

from collections.abc import Iterable

from palestra.errors import ConfigError, unknown

METRICS: dict[str, str] = {
    "sft/loss": "mean negative log-likelihood per trained token, in nats",
    "sft/tokens": "tokens of the step's dialogues, prompts included",
    "sft/learning_rate": "learning rate of the step",
    "sft/epoch": "passes over the demonstrations so far",
    "sft/grad_norm": "gradient norm before clipping",
    "sft/updates_skipped": "1 when the step's loss or gradient was not finite and was not applied",
    "train/loss": "loss of the step's first update, before any weight has moved",
    "train/reward": "mean weighted reward over scored episodes",
    "train/reward_std": "standard deviation of that reward",
    "train/kl": "mean KL(policy || reference) per trained token, in nats",
    "train/kl_sum": "the same, summed over an episode",
    "train/learning_rate": "learning rate of the step's last update",
    "train/epoch": "passes over the tasks so far",
    "train/grad_norm": "gradient norm before clipping, averaged over the step's updates",
    "train/clip_fraction": "share of trained tokens whose ratio was clipped",
    "train/ratio_mean": "mean ratio pi/pi_old over trained tokens; near 1",
    "train/ratio_min": "smallest such ratio, before any clip",
    "train/ratio_max": "largest such ratio, before any clip",
    "train/sampler_ratio_min": "smallest trainer/sampler probability ratio of a trained token",
    "train/sampler_ratio_mean": "mean of that ratio; near 1",
    "train/sampler_ratio_max": "largest of that ratio",
    "train/sampler_ratio_cut": "share of trained tokens whose importance weight was truncated or masked",
    "train/kl_coef": "weight of the KL term in the step",
    "train/ratio_first_step_max": "largest |ratio - 1| in the step's first update; not 0: sampler and trainer differ",
    "train/entropy": "mean entropy of the policy at trained tokens, in nats",
    "train/value_loss": "value loss of the step's first update, without its coefficient",
    "train/value_clip_fraction": "share of values that moved further than the clip and count by their clipped error",
    "train/value_mean": "mean value of the critic before the step, where it trains",
    "train/return_mean": "mean of what those values are pulled towards",
    "train/explained_variance": "1 - Var(return - value) / Var(return) before the step; 0: no better than a constant",
    "train/tokens": "tokens trained on in the step",
    "train/row_tokens": "tokens of the step's rows, prompts and observations included",
    "train/rows_without_signal": "rows not computed: their advantages are 0 and nothing else has a gradient",
    "train/updates": "optimiser updates in the step",
    "train/updates_skipped": "optimiser updates skipped in the step (something not finite, or nothing to learn)",
    "train/updates_not_finite": "1 when a loss or gradient of the step was not finite, which ended its updates",
    "rollout/episodes": "episodes collected in the step",
    "rollout/groups": "groups collected in the step",
    "rollout/groups_zero_variance": "groups whose members all got the same reward: no advantage",
    "rollout/groups_discarded": "those of them that dynamic sampling kept out of the update",
    "rollout/groups_missing": "groups of the step that were no use and for which no other task was drawn any more",
    "rollout/gen_batches": "times that tasks were drawn in the step; more than 1: groups were refilled",
    "rollout/groups_dropped": "groups left out because no reward in them could be used",
    "rollout/stage": "gates of the curriculum that were passed before the step",
    "rollout/errors": "episodes excluded because of a failure of the infrastructure",
    "rollout/success_rate": "share of scored episodes that solved the task",
    "rollout/sampled_tokens": "tokens the model wrote in the step",
    "rollout/sampled_tokens_mean": "tokens the model wrote per episode",
    "rollout/turns_mean": "turns per episode",
    "rollout/tool_calls_mean": "executed tool calls per episode",
    "rollout/tool_errors_mean": "tool calls per episode that failed, were unreadable or refused; only with tools",
    "rollout/tool_calls_refused_mean": "tool calls per episode beyond the limit, not executed; only with tools",
    "rollout/rewritten": "times that a context was rewritten in the step's episodes; only where one was",
    "rollout/truncated_share": "share of episodes cut short by a limit",
    "rollout/staleness_max": "most policy versions between sampling and training of a token",
    "rollout/reward_errors": "episodes that some reward function failed to score because it raised",
    "rollout/rewards_missing": "episodes left out of mean and deviation because a reward was None or not finite",
    "eval/accuracy": "share of held-out tasks solved",
    "eval/format": "share of held-out episodes in the right form",
    "eval/reward": "mean weighted reward on held-out tasks",
    "eval/sampled_tokens_mean": "tokens the model wrote per held-out episode",
    "eval/turns_mean": "turns per held-out episode",
    "eval/truncated_share": "share of held-out episodes cut short by a limit",
    "eval/errors": "held-out episodes excluded because of a failure of the infrastructure",
    "time/rollout_s": "seconds spent collecting episodes",
    "time/prefill_s": "of those, forward passes over prompts and observations",
    "time/decode_s": "of those, forward passes that sample",
    "time/sampling_s": "of those, from logits to tokens",
    "time/tools_s": "of those, waiting for tools: neither the engine nor the event loop had anything to do",
    "time/python_s": "of those, Python: scheduling, stop strings, rendering, environments that do not wait",
    "time/forward_s": "seconds of the update's forward passes and losses",
    "time/backward_s": "seconds of its backward passes",
    "time/optimizer_s": "seconds of its gradient clipping and optimiser steps",
    "time/wait_s": "seconds that learning waited for the step's episodes, where they are played beside earlier steps",
    "time/reward_s": "seconds spent scoring them",
    "time/reference_s": "seconds spent on log-probabilities without gradients",
    "time/update_s": "seconds spent on forward, backward and optimiser",
    "time/sync_s": "seconds spent handing weights to the engine",
    "time/eval_s": "seconds spent evaluating",
    "time/checkpoint_s": "seconds spent writing checkpoints",
    "time/step_s": "seconds of the whole step",
    "speed/sampled_tokens_per_s": "tokens sampled per second of rollout",
    "speed/prefill_tokens": "tokens of prompts and observations that went through a forward pass",
    "speed/guessed_share": "share of sampled tokens that were guessed ahead, without a forward pass of their own",
    "speed/trained_tokens_per_s": "tokens trained on per second of update",
}

_COMPARED = {
    "loss": "mean loss of the compared pairs",
    "margin": "mean reward of the chosen reply less that of the rejected one",
    "ties": "share of pairs whose replies score the same",
    "chosen_reward": "mean reward of chosen replies",
    "rejected_reward": "mean reward of rejected replies",
}
_COMPARED_LOGPROBS = {
    "chosen_logprob": "mean log-probability of chosen replies, summed over their tokens",
    "rejected_logprob": "mean log-probability of rejected replies, summed over their tokens",
    "log_ratio": "mean log pi/pi_ref of the replies",
    "baseline_kl": "KTO's estimate of the KL to the reference",
}
_COMPARED_STEP = {
    "accuracy": "share of pairs whose chosen reply scores strictly higher",
    "grad_norm": "gradient norm before clipping",
    "learning_rate": "learning rate of the step",
    "epoch": "passes over the pairs so far",
    "tokens": "tokens of the replies in the step",
    "updates_skipped": "optimiser updates skipped because loss or gradient was not finite",
}
METRICS |= {
    f"{area}/{name}": text
    for area, parts in (
        ("prefer", _COMPARED | _COMPARED_LOGPROBS | _COMPARED_STEP),
        ("reward_model", _COMPARED | _COMPARED_STEP),
        ("eval", _COMPARED | _COMPARED_LOGPROBS),
    )
    for name, text in parts.items()
}

FAMILIES: dict[str, str] = {
    "reward/": "mean of one named part of the reward, unweighted, over the episodes it scored",
    "eval/reward/": "the same on held-out tasks",
    "eval/stop/": "share of held-out episodes that ended for this reason",
    "rollout/stop/": "share of episodes that ended for this reason",
    "rollout/logged/": "mean of a number that reward functions logged about episodes (TRL's log_metric, log_extra)",
    "rollout/error/": "episodes that failed for this reason",
}


def help_of(name: str) -> str | None:
    """One line about a metric, or None for a name that is not registered.

    >>> help_of("reward/format")
    'mean of one named part of the reward, unweighted, over the episodes it scored'
    >>> help_of("train/lose") is None
    True
    """
    if name in METRICS:
        return METRICS[name]
    matches = [prefix for prefix in FAMILIES if name.startswith(prefix) and len(name) > len(prefix)]
    return FAMILIES[max(matches, key=len)] if matches else None


def check(names: Iterable[str], *, strict: bool) -> None:
    """Refuse names that do not look like ``area/name`` and, when ``strict``, those that nobody registered.

    >>> check(["train/lose"], strict=True)
    Traceback (most recent call last):
    palestra.errors.ConfigError: unknown metric 'train/lose': did you mean 'train/loss'? Register it in run/metrics.py
    """
    for name in names:
        area, _, rest = name.partition("/")
        if not area or not rest:
            raise ConfigError(f"metric {name!r} is not of the form area/name")
        if strict and help_of(name) is None:
            said = unknown("metric", name, METRICS).partition(" Known:")[0]
            raise ConfigError(f"{said} Register it in run/metrics.py")
