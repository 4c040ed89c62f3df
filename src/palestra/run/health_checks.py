# SPDX-License-Identifier: Apache-2.0
"""The conditions of the health rules: functions of what was logged so far, each None while all is well."""

from __future__ import annotations

import math
from collections.abc import Callable

from palestra.run.health_facts import EQUAL, FAILED, SKIPPED, Finding, Look, Series

Check = Callable[[Look], Finding | None]

SOLVED = 0.95
"""From this success rate on, groups without a difference and a reward that no longer rises are no sickness."""

COLLAPSED = 0.9
"""Share of groups without a difference from which on a step has next to no signal."""

ALONE = {"distill", "gae", "gae_turns", "nothing", "reinforce", "reinforce_baseline", "reinforce_pp"}
"""Advantages that compare no siblings: groups without a difference, and small ones, are as good as others."""

GAP = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest |ratio - 1| of a step's first update that rounding explains: the engine's log-probs are good to 1e-4."""


def above(metric: str, limit: float, n: int, says: str) -> Check:
    """The mean of the last ``n`` values, and most of them, lie above ``limit``."""

    def check(look: Look) -> Finding | None:
        series = look[metric]
        if not series.mostly(n, lambda v: v > limit) or series.last(n).mean <= limit:
            return None
        return Finding(series.since(lambda v: v > limit), says.format(mean=series.last(n).mean))

    return check


# Gradients and distances -----------------------------------------------------------------------------------


def grad_norm_low(look: Look) -> Finding | None:
    norm = look["train/grad_norm"]
    if not norm.mostly(10, lambda v: v < 0.01) or _collapsed(look, 8):
        return None
    return Finding(norm.since(lambda v: v < 0.01), f"the gradient norm is {norm.last(10).mean:.2g}; 0.1 to 10 is usual")


def sft_grad_norm_low(look: Look) -> Finding | None:
    """A small gradient at the bottom of the loss is none."""
    norm, loss = look["sft/grad_norm"], look["sft/loss"]
    if not norm.mostly(10, lambda v: v < 0.01) or loss.last(10).mean < 0.5 * loss.first(10).mean:
        return None
    return Finding(norm.since(lambda v: v < 0.01), f"the gradient norm is {norm.last(10).mean:.2g}; 0.1 to 10 is usual")


def kl_high(look: Look) -> Finding | None:
    """Not for a model from scratch, which is to leave its start far behind."""
    if look.facts.from_scratch or not look.facts.number("algorithm.kl_coef") or look.facts.get("teacher"):
        return None
    return above("train/kl", 0.5, 5, "the KL to the reference is {mean:.2g} nats per token; 0.01 to 0.1 is usual")(look)


def kl_low(look: Look) -> Finding | None:
    """The first steps stand beside the reference in every run."""
    facts, kl = look.facts, look["train/kl"]
    settled = max(20, math.ceil(0.2 * facts.number("train.steps")), facts.warm_steps("rl") + 10)
    if facts.from_scratch or not facts.number("algorithm.kl_coef") or facts.get("teacher") or len(kl) < settled:
        return None
    if not kl.mostly(10, lambda v: v < 0.001) or _rose(look["train/reward"], errors=1.0):
        return None
    said = (
        f"the KL to the reference is {kl.last(10).mean:.2g} nats per token after {len(kl)} steps; 0.01 to 0.1 is usual"
    )
    return Finding(kl.since(lambda v: v < 0.001), said)


def sampler_differs(look: Look) -> Finding | None:
    """From the very first step on, when sampler and trainer hold the same weights."""
    gap, most = look["train/ratio_first_step_max"], _gap(look)
    if not gap.mostly(3, lambda v: v > most) or gap.values[0] <= most:
        return None
    said = f"the ratio is off by {gap.last(3).mean:.2g} before any update; up to {most:g} would be rounding"
    return Finding(gap.steps[0], said)


def stale_sampler(look: Look) -> Finding | None:
    """The versions say it or, where the newest is to sample, a ratio that was right at first and is not since."""
    bound = look.facts.number("train.max_staleness")
    age = look["rollout/staleness_max"]
    if age.mostly(3, lambda v: v > bound):
        said = (
            f"tokens are trained on up to {age.last(3).mean:g} versions after they were sampled; {bound:g} is allowed"
        )
        return Finding(age.since(lambda v: v > bound), said)
    gap, most = look["train/ratio_first_step_max"], _gap(look)
    if bound or not gap.mostly(5, lambda v: v > most) or gap.values[0] > most:
        return None
    said = f"the ratio is off by {gap.last(5).mean:.2g} before any update, and was right at step {gap.steps[0]}"
    return Finding(gap.since(lambda v: v > most), said)


def clip_inactive(look: Look) -> Finding | None:
    """Never in the whole run, although several updates reuse each batch."""
    facts, clipped = look.facts, look["train/clip_fraction"]
    updates = facts.number("algorithm.updates_per_batch", 1) * facts.number("algorithm.minibatches", 1)
    n = max(10, facts.warm_steps("rl") + 5)
    if updates < 2 or len(clipped) < n or clipped.best(1).mean > 0 or _collapsed(look, 5):
        return None
    return Finding(clipped.steps[0], f"no ratio was ever clipped in {len(clipped)} steps of {updates:g} updates each")


# Signal ----------------------------------------------------------------------------------------------------


def group_collapse(look: Look) -> Finding | None:
    """Not when the tasks are solved; but a reward that never varied at all tells nothing, whatever its value. A policy
    that broke has its own alarm."""
    equal, reward = look[EQUAL], look["train/reward"]
    if (
        len(equal) < 8
        or look.facts.get("algorithm.advantage") in ALONE
        or not _collapsed(look, 8)
        or reward_falls(look)
        or (_solved(look, 8) and equal.best(1, -1.0).mean < COLLAPSED)
    ):
        return None
    said = f"{equal.last(8).mean:.0%} of the groups have members with one and the same reward"
    if len(reward) >= 8 and max(reward.values[-8:]) == min(reward.values[-8:]):
        said = f"the reward is always {reward.values[-1]:g}"
    return Finding(equal.since(lambda v: v >= COLLAPSED), said)


def small_group(look: Look) -> Finding | None:
    size, reward = look.facts.number("algorithm.group_size", 8), look["train/reward"]
    if size >= 4 or len(reward) < 5 or look.facts.get("algorithm.advantage") in ALONE:
        return None
    return Finding(
        reward.steps[0], f"an advantage compares an episode with {size - 1:g} other{'s' if size > 2 else ''}"
    )


def reward_flat(look: Look) -> Finding | None:
    """No rise from the first third to the last, in the reward or on held-out tasks, after 40 steps; not where another
    alarm says why."""
    reward, held_out = look["train/reward"], look["eval/accuracy"]
    third = len(reward) // 3
    if len(reward) < 40 or _solved(look, 10) or _collapsed(look, 10):
        return None
    first, last = reward.first(third), reward.last(third)
    rose = last.above(first, 1.0) or (len(held_out) > 1 and held_out.values[-1] > held_out.values[0] + 0.02)
    if rose or any(rule(look) for rule in (reward_falls, kl_high, stale_sampler, format_over_accuracy)):
        return None
    said = (
        f"the reward was {first.mean:.3g} in steps {first.since}-{first.until}, {last.mean:.3g} since step {last.since}"
    )
    return Finding(first.since, said)


def reward_falls(look: Look) -> Finding | None:
    """Far below its best, measured by its size or by its spread within a step, and not so on held-out tasks."""
    reward, spread, held_out = look["train/reward"], look["train/reward_std"], look["eval/accuracy"]
    if _broke_at_once(look):
        said = f"the reward was {reward.values[0]:.3g} at step {reward.steps[0]} and is {reward.last(5).mean:.3g}"
        return Finding(reward.steps[1], f"{said}, the same for all siblings")
    if len(reward) < 15:
        return None
    best, now = reward.best(10), reward.last(10)
    scale = max(abs(best.mean), spread.last(10).mean if len(spread) else 0.0)
    if best.mean - now.mean < 0.3 * scale or not best.above(now, 4.0):
        return None
    fresh = len(held_out) > 1 and held_out.steps[-1] >= now.since
    if fresh and held_out.values[-1] >= 0.9 * held_out.best(1).mean:
        return None
    return Finding(
        best.until, f"the reward was {best.mean:.3g} in steps {best.since}-{best.until} and is {now.mean:.3g}"
    )


def _broke_at_once(look: Look) -> bool:
    """The first step still had differences and a reward, twice what chance explains; then none, and far less of it."""
    reward, spread, equal, groups = (look[n] for n in ("train/reward", "train/reward_std", EQUAL, "rollout/groups"))
    if len(reward) < 6 or not len(spread) or not len(groups) or not _collapsed(look, 5) or equal.values[0] >= COLLAPSED:
        return False
    chance = spread.values[0] / math.sqrt(groups.values[0])
    return reward.values[0] - reward.last(5).mean > max(2 * chance, 0.3 * abs(reward.values[0]))


def format_over_accuracy(look: Look) -> Finding | None:
    """Form outweighs the answer, or form rises and accuracy does not."""
    facts, part = look.facts, look.facts.format_part
    form, right = look[f"reward/{part}"], look[f"reward/{facts.metric}"]
    if part is None or len(form) < 5 or len(right) < 5:
        return None
    if 0 < facts.weight(facts.metric) <= facts.weight(part):
        said = f"the part {part} weighs {facts.weight(part):g}, {facts.metric} only {facts.weight(facts.metric):g}"
        return Finding(form.steps[0], said)
    if len(form) < 20 or right.last(5).mean >= SOLVED:
        return None
    n = max(5, len(form) // 4)
    if form.last(n).mean - form.first(n).mean < 0.05 or not _rose(form, n) or _rose(right, n, errors=1.0):
        return None
    said = f"{part} rose from {form.first(n).mean:.2f} to {form.last(n).mean:.2f}, {_change(facts.metric, right, n)}"
    return Finding(form.first(n).until, said)


def format_falls(look: Look) -> Finding | None:
    """Form falls while accuracy does not: in training, or else on held-out tasks."""
    part, metric = look.facts.format_part, look.facts.metric
    form, right, n = look[f"reward/{part}"], look[f"reward/{metric}"], 10
    if len(form) < 2 * n or len(right) < 2 * n:
        form, right, n = look["eval/format"], look["eval/accuracy"], 1
        if len(form) < 3 or len(right) < 3:
            return None
    best, now = form.best(n), form.last(n)
    lower = form.mostly(min(n, 5) + 1, lambda v: v < best.mean - 0.1)
    if not lower or not best.above(now, 4.0 if n > 1 else 1.0) or right.first(n).above(right.last(n), 1.0):
        return None
    said = f"form fell from {best.mean:.2f} to {now.mean:.2f}, {_change(metric, right, n)}"
    return Finding(best.until, said)


def reward_hacking(look: Look) -> Finding | None:
    """The reward, or a part of it that is paid, rises, and accuracy does not."""
    facts, paid = look.facts, look.facts.get("rewards", {})
    parts = [n.removeprefix("reward/") for n in sorted(look.series) if n.startswith("reward/")]
    other = [p for p in parts if p not in (facts.metric, facts.format_part) and (p not in paid or facts.weight(p) > 0)]
    if format_over_accuracy(look):
        return None
    named = {**{f"the part {p}": f"reward/{p}" for p in other}, "the reward": "train/reward"}  # a part says more
    return next((found for said, series in named.items() if (found := _hacked(look, said, look[series]))), None)


def _hacked(look: Look, name: str, rising: Series) -> Finding | None:
    """Accuracy is that of held-out tasks where there are three evaluations, else that of training."""
    right, held_out = look[f"reward/{look.facts.metric}"], look["eval/accuracy"]
    n = max(5, len(rising) // 4)
    if len(rising) < 20 or not _rose(rising, n, by=0.05):
        return None
    if len(held_out) >= 3:
        first, now = held_out.values[0], held_out.last(2).mean
        if now > first + 0.02 or now >= SOLVED:
            return None
        said = f"held-out accuracy went from {first:.2f} to {now:.2f}"
    elif len(right) >= 20 and not _rose(right, n, errors=1.0) and not _solved(look, n):
        said = _change(look.facts.metric, right, n)
    else:
        return None
    rise = f"{name} rose from {rising.first(n).mean:.3g} to {rising.last(n).mean:.3g}"
    return Finding(rising.first(n).until, f"{rise}, {said}")


def entropy_collapse(look: Look) -> Finding | None:
    """To a tenth of where it began, before the tasks are solved and without the reward still rising."""
    entropy, reward = look["train/entropy"], look["train/reward"]
    if len(entropy) < 15 or _solved(look, 5):
        return None
    first, now = entropy.first(5), entropy.last(5)
    recent = reward.window(len(reward) - 10, len(reward) - 5)
    if now.mean > 0.1 * first.mean or reward.last(5).above(recent, 1.0):
        return None
    said = f"the entropy fell from {first.mean:.2g} to {now.mean:.2g} nats per token"
    return Finding(entropy.since(lambda v: v <= 0.1 * first.mean), said)


# Episodes --------------------------------------------------------------------------------------------------


def length_explosion(look: Look) -> Finding | None:
    """Twice as long, and not more often right; a policy that broke has its own alarm."""
    length, right = look["rollout/sampled_tokens_mean"], look["rollout/success_rate"]
    if len(length) < 10 or reward_falls(look):
        return None
    first, now = length.first(5), length.last(5)
    if now.mean < 2 * first.mean or not now.above(first, 3.0) or _rose(right, errors=2.0):
        return None
    said = f"the model writes {now.mean:.0f} tokens per episode, {first.mean:.0f} in the first steps"
    return Finding(length.since(lambda v: v >= 1.5 * first.mean), said + ", and is not more often right")


_LIMIT_OF = {
    "max_tokens": "limits.max_tokens",
    "max_turns": "limits.max_turns",
    "max_tool_calls": "limits.max_tool_calls",
    "timeout": "limits.timeout_s",
    "context": "engine.max_context",
    "env_truncated": "env",
}


def truncation(look: Look) -> Finding | None:
    """A third of the episodes cut and the share not falling, or replies that fill their limit to the brim; a policy
    that broke has its own alarm."""
    cut, room = look["rollout/truncated_share"], look.facts.number("sampling.max_new_tokens", math.inf)
    tokens, turns = look["rollout/sampled_tokens_mean"], look["rollout/turns_mean"]
    if len(cut) < 10 or len(tokens) < 10 or len(turns) < 10 or reward_falls(look):
        return None
    full = tokens.last(10).mean / max(turns.last(10).mean, 1.0) >= 0.9 * room
    before, now = cut.window(len(cut) - 10, len(cut) - 5), cut.last(5)
    if not full and (cut.last(10).mean < 0.3 or now.mean < 0.8 * before.mean):
        return None
    ends = {end: look[f"rollout/stop/{end}"] for end in _LIMIT_OF}
    shares = {end: series.last(5).mean for end, series in ends.items() if len(series) >= 5}
    top = max(shares, key=lambda end: shares[end], default="env_truncated")
    said = f"{cut.last(10).mean:.0%} of the episodes are cut short, most often by {top.replace('_', ' ')}"
    if full:
        said = f"replies fill max_new_tokens={room:g}, and {said}"
    fits = {_LIMIT_OF[top]} | ({"sampling.max_new_tokens"} if full or top == "env_truncated" else set())
    return Finding(cut.last(10).since, said, tuple(({*_LIMIT_OF.values()} | {"sampling.max_new_tokens"}) - fits))


def episodes_fail(look: Look) -> Finding | None:
    share = look[FAILED]
    if not share.mostly(5, lambda v: v >= 0.2):
        return None
    return Finding(share.since(lambda v: v >= 0.2), f"{share.last(5).mean:.0%} of the episodes fail and teach nothing")


def updates_skipped(look: Look) -> Finding | None:
    """Although there was something to learn: other groups than such as had one reward, or none that could be used."""
    skipped, names = look[SKIPPED], ("rollout/groups_dropped", "rollout/groups_zero_variance", "rollout/groups")
    last = zip(*(look[name].values[-5:] for name in names), strict=False)
    lost = sum(dropped > 0 and dropped + equal >= groups for dropped, equal, groups in last)
    if len(skipped) < 5 or sum(v > 0 for v in skipped.values[-5:]) - lost < 4:
        return None
    return Finding(skipped.since(bool), "update after update is skipped, although there is something to learn")


# Supervised training ---------------------------------------------------------------------------------------


def sft_loss_flat(look: Look) -> Finding | None:
    """Not fallen after 30 steps at full rate; a loss that was low from the start has nowhere to go."""
    loss = look["sft/loss"]
    if len(loss) < 30 + look.facts.warm_steps("sft"):
        return None
    first, low, now = loss.first(10), loss.best(10, -1.0), loss.last(10)
    if first.mean < 0.1 or low.mean < 0.97 * first.mean or now.mean > 1.1 * first.mean:
        return None
    return Finding(first.since, f"the loss was {first.mean:.3g} in the first steps and is {now.mean:.3g}")


def sft_loss_rises(look: Look) -> Finding | None:
    """Above its lowest by a fifth, and by more than a twentieth of what it had fallen."""
    loss = look["sft/loss"]
    if len(loss) < 40:
        return None
    first, low, now = loss.first(5), loss.best(20, -1.0), loss.last(20)
    rise = now.mean - low.mean
    if rise < 0.2 * low.mean or rise < 0.05 * (first.mean - low.mean) or not now.above(low, 4.0):
        return None
    return Finding(low.until, f"the loss fell to {low.mean:.3g} and is {now.mean:.3g} again")


def sft_overfitting(look: Look) -> Finding | None:
    """Held-out accuracy falls while the loss falls; where nothing is held out, a loss near 0 after 10 passes."""
    loss, held_out, epoch = look["sft/loss"], look["eval/accuracy"], look["sft/epoch"]
    if len(loss) < 20:
        return None
    if len(held_out) >= 3:
        best, now = held_out.best(1), held_out.last(1)
        size = look.facts.number("eval.curve_size", 100)
        chance = math.sqrt(2 * max(best.mean * (1 - best.mean), 0.01) / size)
        if best.mean - now.mean < max(0.05, 2 * chance) or sft_loss_rises(look):
            return None
        return Finding(best.until, f"held-out accuracy fell from {best.mean:.2f} to {now.mean:.2f} while the loss fell")
    low = loss.last(10).mean < 0.1 * loss.first(10).mean
    if look.facts.from_scratch or not low or not len(epoch) or epoch.values[-1] <= 10:
        return None
    passes = f"{epoch.values[-1]:.0f} passes over the demonstrations, without held-out tasks"
    return Finding(epoch.since(lambda v: v > 10), f"the loss is {loss.last(10).mean:.2g} after {passes}")


# ------------------------------------------------------------------------------------------------------------


def _collapsed(look: Look, n: int) -> bool:
    equal = look[EQUAL]
    return len(equal) > 0 and equal.last(n).mean >= COLLAPSED


def _solved(look: Look, n: int) -> bool:
    right = look["rollout/success_rate"]
    return len(right) >= n and right.last(n).mean >= SOLVED


def _rose(series: Series, n: int = 5, *, errors: float = 3.0, by: float = 0.0) -> bool:
    """The last ``n`` values lie above the first ``n``, by more than chance and by more than ``by`` of their size."""
    if len(series) < 2 * n:
        return False
    first, last = series.first(n), series.last(n)
    return last.above(first, errors) and last.mean - first.mean > by * max(abs(first.mean), abs(last.mean))


def _gap(look: Look) -> float:
    used = (look.facts.get(key) for key in ("model.dtype", "engine.dtype", "train.compute_dtype"))
    return GAP["bfloat16" if "bfloat16" in used else "float32"]


def _change(name: str, series: Series, n: int) -> str:
    return f"{name} went from {series.first(n).mean:.2f} to {series.last(n).mean:.2f}"
