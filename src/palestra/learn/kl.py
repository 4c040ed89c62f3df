# SPDX-License-Identifier: Apache-2.0
"""Estimators of KL(π‖π_ref) per token, from the log-probs of the sampled token (Schulman 2020,
http://joschu.net/blog/kl-approx.html). All are unbiased or nearly so for samples of the *current* policy.

A token that the reference bans (log-prob -inf) has no finite estimate: it counts 0 and has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from palestra.registry import Registry

KL_ESTIMATORS: Registry[Callable[[Tensor, Tensor], Tensor]] = Registry("KL estimator")

MAX_EXPONENT = 20.0
"""exp is taken of at most this: one token that the policy has all but given up must not turn the loss infinite."""


@KL_ESTIMATORS.register("k1")
def k1(logprobs: Tensor, ref: Tensor) -> Tensor:
    """log π − log π_ref: unbiased, may be negative. Its gradient as a loss is zero in expectation."""
    return _gap(logprobs, ref)


@KL_ESTIMATORS.register("k2")
def k2(logprobs: Tensor, ref: Tensor) -> Tensor:
    """½ (log π − log π_ref)²: biased low-variance value, but the gradient of KL(π‖π_ref)."""
    return 0.5 * _gap(logprobs, ref) ** 2


@KL_ESTIMATORS.register("k3")
def k3(logprobs: Tensor, ref: Tensor) -> Tensor:
    """e^x − x − 1 with x = log π_ref − log π: unbiased, never negative; its gradient is that of KL(π_ref‖π).

    >>> import torch
    >>> round(k3(torch.tensor(-2.0), torch.tensor(-0.5)).item(), 6)
    1.981689
    """
    x = -_gap(logprobs, ref)
    return x.clamp(max=MAX_EXPONENT).exp() - x - 1


def _gap(logprobs: Tensor, ref: Tensor) -> Tensor:
    """log π − log π_ref, 0 where the reference bans the token."""
    return torch.where(ref == -torch.inf, 0.0, logprobs - ref)
