# SPDX-License-Identifier: Apache-2.0
"""What a step's rows need before anything is learned from them: log-probs, values, advantages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from palestra.learn.advantage import ADVANTAGES, AdvantageConfig, whiten
from palestra.learn.batch import PerToken, Rows, micro_batches, pack
from palestra.learn.policy import Policy
from palestra.learn.shaping import kl_penalties, with_penalties
from palestra.learn.value import with_returns, with_values

if TYPE_CHECKING:
    from palestra.learn.update import UpdateConfig


def annotate(policy: Policy, rows: Rows, config: UpdateConfig, *, temperature: float) -> Rows:
    """Rows with advantages and what the loss needs beside them: ``old``, ``ref`` when there is a KL term, and with a
    critic ``values`` and ``returns``."""
    # A penalty in the reward moves baselines, so rows that only serve those have it too.
    baseline = [i for i, s in enumerate(rows.samples) if s.loss_mask.any()]
    indices = baseline if config.kl_in_reward else trained_indices(rows)
    rows = rows.with_(old=tuple(s.logprobs for s in rows.samples))
    recompute = config.old_logprobs == "recompute"
    if config.needs_critic:  # log-probs and values come from one pass
        heat = temperature if recompute else None
        rows = with_values(policy, rows, indices, max_tokens=config.micro_batch_tokens, temperature=heat)
    elif recompute:
        rows = rows.with_(old=_scored(policy, rows, indices, config, temperature, ref=False))
    if config.needs_ref:
        rows = rows.with_(ref=_scored(policy, rows, indices, config, temperature, ref=True))
    return _with_advantages(rows, config)


def _with_advantages(rows: Rows, config: UpdateConfig) -> Rows:
    seen, kl_coef = rows, 0.0
    if config.kl_in_reward:
        kl_coef = config.kl_coef
        seen = with_penalties(rows, kl_penalties(rows, config.kl, kl_coef))
    options = AdvantageConfig(
        eps=config.advantage_eps,
        kl=config.kl,
        kl_coef=kl_coef,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        turn_key=config.turn_key,
    )
    rows = rows.with_(advantages=ADVANTAGES[config.advantage](seen, options))
    if config.needs_critic:
        rows = with_returns(rows, config.advantage)
    if config.whiten_advantages:
        assert rows.advantages is not None
        rows = rows.with_(advantages=whiten(rows.advantages, [s.loss_mask & s.trained for s in rows.samples]))
    return rows


def _scored(
    policy: Policy, rows: Rows, indices: Sequence[int], config: UpdateConfig, temperature: float, *, ref: bool
) -> tuple[PerToken, ...]:
    """Per sample float64[T] log-probs under the reference or the current policy, forward only."""
    out = [np.zeros(len(s.tokens), np.float64) for s in rows.samples]
    score = policy.reference_logprobs if ref else policy.current_logprobs
    nothing = [np.zeros(len(s.tokens)) for s in rows.samples]
    for chosen in micro_batches(rows.samples, indices, config.micro_batch_tokens):
        batch = pack(rows, nothing, chosen, dtype=torch.float64, device=policy.device)
        values = score(batch, temperature=temperature).double().cpu().numpy()
        sequence = batch.sequence.cpu().numpy()
        for at, i in enumerate(batch.indices):
            where = rows.samples[i].loss_mask & (np.arange(len(out[i])) > 0)
            out[i][where] = values[sequence == at]
    return tuple(out)


def trained_indices(rows: Rows) -> list[int]:
    """The samples that carry gradient."""
    return [i for i, s in enumerate(rows.samples) if s.trained_tokens]


__all__ = ["annotate", "trained_indices"]
