# SPDX-License-Identifier: Apache-2.0
"""The critic's part of a step: values of what was sampled, advantages from them, and the loss that teaches them.

V(s_t) is the value of the state *before* token t, read where the token is predicted. Tokens of the prompt and of tools
have none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from palestra.learn.advantage import ADVANTAGES, AdvantageConfig, episodes_of
from palestra.learn.batch import Batch, PerToken, Rows, micro_batches, pack
from palestra.learn.gae import bootstrap_value, explained_variance, gae
from palestra.learn.loss import LossOutputs, value_loss
from palestra.learn.policy import Policy
from palestra.learn.shaping import paid_tokens
from palestra.learn.turns import paid_turns, split_turns, spread_turns, turn_of_token, turn_starts


@ADVANTAGES.register("gae")
def gae_tokens(rows: Rows, config: AdvantageConfig) -> tuple[PerToken, ...]:
    """GAE(γ, λ) over an episode's own tokens (arXiv:1506.02438, eq. 16), a turn's reward on its last one. Time goes on
    from one row of an episode to the next; an episode that a limit cut is worth V of its last state beyond."""
    assert rows.values is not None
    paid = paid_tokens(rows, config.kl, config.kl_coef)
    out: dict[int, PerToken] = {}
    for members in episodes_of(rows).values():
        advantages, _ = gae(
            np.concatenate([paid[i] for i in members]),
            np.concatenate([rows.values[i] for i in members]),
            np.concatenate([rows.samples[i].loss_mask for i in members]),
            gamma=config.gamma,
            lam=config.gae_lambda,
            bootstrap=_beyond(rows, members[-1]),
        )
        cuts = np.cumsum([len(rows.samples[i].tokens) for i in members])[:-1]
        out |= zip(members, np.split(advantages, cuts), strict=True)
    return tuple(out[i] for i in range(len(rows)))


@ADVANTAGES.register("gae_turns")
def gae_turns(rows: Rows, config: AdvantageConfig) -> tuple[PerToken, ...]:
    """GAE(γ, λ) over an episode's turns: a turn is one action, its value that of the state before its first token, its
    advantage that of each of its tokens. γ and λ count turns."""
    assert rows.values is not None
    paid = paid_turns(rows, config)
    out: dict[int, PerToken] = {}
    for members in episodes_of(rows).values():
        advantages, _ = gae(
            np.concatenate([paid[i] for i in members]),
            np.concatenate([rows.values[i][turn_starts(rows.samples[i])] for i in members]),
            gamma=config.gamma,
            lam=config.gae_lambda,
            bootstrap=_beyond(rows, members[-1]),
        )
        for i, values in zip(members, split_turns(advantages, rows, members), strict=True):
            out[i] = spread_turns(values.tolist(), rows.samples[i].loss_mask, rows.samples[i].turn_ends)
    return tuple(out[i] for i in range(len(rows)))


def _beyond(rows: Rows, last: int) -> float:
    """What would have come after the episode's last token."""
    assert rows.after is not None
    cut = rows.samples[last].truncated
    return bootstrap_value(rows.after[last], terminated=not cut, truncated=cut)


# Values ----------------------------------------------------------------------------------------------------


def with_values(
    policy: Policy, rows: Rows, indices: Sequence[int], *, max_tokens: int, temperature: float | None = None
) -> Rows:
    """The rows with the critic's ``values`` and ``after``; with a temperature also ``old``, the policy's log-probs of
    the same pass. 0 for samples that are not among ``indices``."""
    old: list[PerToken] = [np.zeros(len(s.tokens)) for s in rows.samples]
    values: list[PerToken] = [np.zeros(len(s.tokens)) for s in rows.samples]
    after = [0.0] * len(rows)
    for chosen in micro_batches(rows.samples, indices, max_tokens):
        batch = pack(rows, [np.zeros(len(s.tokens)) for s in rows.samples], chosen, device=policy.device)
        if temperature is None:
            seen = policy.current_values(batch)
        else:
            seen = policy.current_outputs(batch, temperature=temperature)
            _scatter(seen.logprobs, batch, rows, old)
        assert seen.values is not None and seen.after is not None
        _scatter(seen.values, batch, rows, values)
        for i, beyond in zip(batch.indices, seen.after.tolist(), strict=True):
            after[i] = beyond
    rows = rows.with_(values=tuple(values), after=tuple(after))
    return rows if temperature is None else rows.with_(old=tuple(old))


def _scatter(numbers: Tensor, batch: Batch, rows: Rows, into: Sequence[PerToken]) -> None:
    """(M,) → each sample's own tokens."""
    found, sequence = numbers.cpu().double().numpy(), batch.sequence.cpu().numpy()
    for at, i in enumerate(batch.indices):
        where = rows.samples[i].loss_mask & (np.arange(len(into[i])) > 0)
        into[i][where] = found[sequence == at]


def with_returns(rows: Rows, advantage: str) -> Rows:
    """The rows with what their values are pulled towards, R = A + V before any whitening, and how many tokens each
    value stands for: one, or by turns all of the turn's at its first and none elsewhere."""
    assert rows.values is not None and rows.advantages is not None
    returns = tuple(a + v for a, v in zip(rows.advantages, rows.values, strict=True))
    counts: list[PerToken] = []
    for s in rows.samples:
        count = s.loss_mask.astype(np.float64)
        if advantage == "gae_turns":
            count = np.zeros(len(s.tokens))
            count[turn_starts(s)] = np.bincount(turn_of_token(s)[s.loss_mask], minlength=len(s.turn_ends))
        counts.append(count)
    return rows.with_(returns=returns, value_counts=tuple(counts))


def critic_loss(values: Tensor, batch: Batch, *, clip: float | None) -> LossOutputs:
    """½·Σ w·max((V − R)², (V_old + clamp(V − V_old, ±clip) − R)²), values (M,) with gradient; w as in the policy's
    loss, where a value stands for several tokens their sum."""
    assert batch.values is not None and batch.returns is not None and batch.value_counts is not None
    own = batch.value_counts > 0
    weights = (batch.weights * batch.value_counts)[own]
    out = value_loss(values[own], batch.values[own], batch.returns[own], weights, clip=clip)
    return LossOutputs(0.5 * out.loss, out.metrics)


def value_metrics(rows: Rows) -> dict[str, float]:
    """How good the critic was before the step, over the values that train."""
    if rows.values is None or rows.returns is None or rows.value_counts is None:
        return {}
    if not any(s.trained_tokens for s in rows.samples):
        return {}
    own = [s.trained & (n > 0) for s, n in zip(rows.samples, rows.value_counts, strict=True)]
    values = np.concatenate([v[m] for v, m in zip(rows.values, own, strict=True)])
    returns = np.concatenate([r[m] for r, m in zip(rows.returns, own, strict=True)])
    metrics = {"train/value_mean": float(values.mean()), "train/return_mean": float(returns.mean())}
    explained = explained_variance(values, returns)
    return metrics if explained is None else metrics | {"train/explained_variance": explained}


__all__ = ["critic_loss", "gae_tokens", "gae_turns", "value_metrics", "with_returns", "with_values"]
