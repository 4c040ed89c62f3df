# SPDX-License-Identifier: Apache-2.0
"""Returns and generalised advantage estimation over what the model wrote, tokens or turns.

Tokens of the prompt and of tools are no actions. They have no reward, no value and no place in time: what is computed
here equals what the same call gives with those tokens taken out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from palestra.types import BoolArray

Floats = npt.NDArray[np.float64]


def gae(
    rewards: npt.ArrayLike,
    values: npt.ArrayLike,
    mask: npt.ArrayLike | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: float = 0.0,
) -> tuple[Floats, Floats]:
    """Advantages and returns, float64[T] each, 0 where ``mask`` is False (GAE, arXiv:1506.02438, eq. 16).

    δ_t = r_t + γ·V_{t+1} − V_t, A_t = δ_t + γλ·A_{t+1}, R_t = A_t + V_t, where t + 1 is the model's next own token.
    rewards, values, mask: [T]; without a mask all count. bootstrap: V after the last token, see
    :func:`bootstrap_value`. Raises ValueError for a reward where the mask is False: it would be lost.

    >>> advantages, returns = gae([0, 0, 1.0], [0.5, 0.6, 0.7])
    >>> advantages.round(6).tolist(), returns.round(6).tolist()
    ([0.46575, 0.385, 0.3], [0.96575, 0.985, 1.0])
    """
    r, own = _own(rewards, mask)
    v = np.asarray(values, np.float64)[own]
    following = np.append(v[1:], bootstrap)
    deltas = r + gamma * following - v
    advantages = np.zeros(len(own))
    advantages[own] = _discounted(deltas, gamma * lam)
    returns = np.zeros(len(own))
    returns[own] = advantages[own] + v
    return advantages, returns


def returns_to_go(rewards: npt.ArrayLike, mask: npt.ArrayLike | None = None, *, gamma: float = 1.0) -> Floats:
    """G_t = r_t + γ·G_{t+1}, float64[T], over the tokens (or turns) where ``mask`` is True; 0 elsewhere.

    Raises ValueError for a reward where the mask is False.

    >>> returns_to_go([0.5, 0.0, 1.0], gamma=0.5).tolist()
    [0.75, 0.5, 1.0]
    """
    r, own = _own(rewards, mask)
    returns = np.zeros(len(own))
    returns[own] = _discounted(r, gamma)
    return returns


def bootstrap_value(next_value: float, *, terminated: bool, truncated: bool) -> float:
    """The value that stands for what would have come after the last token.

    An episode that its environment ended is worth nothing more, also when it met a limit on the same step; one that
    only a limit cut would have gone on, and is worth ``next_value``.

    >>> bootstrap_value(0.8, terminated=True, truncated=True), bootstrap_value(0.8, terminated=False, truncated=True)
    (0.0, 0.8)
    """
    return next_value if truncated and not terminated else 0.0


def explained_variance(values: npt.ArrayLike, returns: npt.ArrayLike) -> float | None:
    """1 − Var(R − V)/Var(R): 1 = the critic predicts returns, 0 = no better than their mean; None where all returns
    are the same.

    >>> explained_variance([0.0, 1.0, 1.0], [0.0, 1.0, 2.0])
    0.66...
    """
    r = np.asarray(returns, np.float64)
    if not len(r) or np.ptp(r) == 0:
        return None
    return float(1 - np.var(r - np.asarray(values, np.float64)) / np.var(r))


def _own(rewards: npt.ArrayLike, mask: npt.ArrayLike | None) -> tuple[Floats, BoolArray]:
    """The rewards of the model's own tokens, and which those are."""
    r = np.asarray(rewards, np.float64)
    own = np.ones(len(r), np.bool_) if mask is None else np.asarray(mask).astype(np.bool_)
    if np.any(r[~own]):
        raise ValueError("a reward on a token that the model did not write; pay the turn's last sampled token")
    return r[own], own


def _discounted(values: Floats, factor: float) -> Floats:
    """Σ_k factor^k·x_{t+k} from each t on."""
    out = np.zeros_like(values)
    running = 0.0
    for t in range(len(values) - 1, -1, -1):
        running = float(values[t]) + factor * running
        out[t] = running
    return out
