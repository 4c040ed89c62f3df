# SPDX-License-Identifier: Apache-2.0
"""Estimators of KL(π‖π_ref) per token, from the log-probs of the sampled token (Schulman 2020,
http://joschu.net/blog/kl-approx.html). All are unbiased or nearly so for samples of the *current* policy.

A right value is not yet a right gradient. In the loss, where the estimate itself is differentiated, k2 has the gradient
of KL(π‖π_ref), k3 that of KL(π_ref‖π) and k1 none; in the reward, where it only weighs the score function, k1 is right
and k2 and k3 may push *away* from the reference. :func:`check_kl` refuses the wrong places.

A token that the reference bans (log-prob -inf) has no finite estimate: it counts 0 and has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from palestra.errors import ConfigError
from palestra.registry import Registry

KLPlace = Literal["loss", "reward"]
KL_ESTIMATORS: Registry[Callable[[Tensor, Tensor], Tensor]] = Registry("KL estimator")

FULL = "full"
"""Not an estimator: the divergence of whole distributions (:func:`palestra.learn.distill.reverse_kl`)."""

MAX_EXPONENT = 20.0
"""exp is taken of at most this: one token that the policy has all but given up must not turn the loss infinite."""


def bounded_exp(x: Tensor) -> Tensor:
    """e^x up to e^20; beyond, a constant without gradient."""
    return x.clamp(max=MAX_EXPONENT).exp()


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
    return bounded_exp(x) - x - 1


def importance_corrected(kl: Tensor, log_ratio: Tensor) -> Tensor:
    """ρ·KL with ρ = π/π_old, for tokens sampled from π_old; ρ keeps its gradient (DeepSeek-V3.2, arXiv:2512.02556).

    For an estimator that is unbiased at every π (k1, k3) this is unbiased under π_old, and so is its gradient, which
    is then that of KL(π‖π_ref) itself.

    >>> import torch
    >>> value = k3(torch.tensor(-1.0), torch.tensor(-1.5))
    >>> round(importance_corrected(value, torch.tensor(0.8).log()).item(), 6)
    0.085225
    """
    return bounded_exp(log_ratio) * kl


def check_kl(kl: str, place: KLPlace, *, importance: bool) -> None:
    """Refuse a KL term whose gradient is not one of a divergence; raises ConfigError."""
    if kl == FULL and (place == "reward" or importance):
        raise ConfigError(
            "algorithm.kl=full is a term of the loss and exact at every token: set algorithm.kl_in=loss and "
            "algorithm.kl_importance=false"
        )
    if place == "reward" and kl in ("k2", "k3"):
        raise ConfigError(
            f"algorithm.kl={kl} in the reward does not pull towards the reference and may push away from it; set "
            "algorithm.kl=k1, or algorithm.kl_in=loss"
        )
    if place == "reward" and importance:
        raise ConfigError("algorithm.kl_importance weighs the KL term of the loss; with kl_in=reward leave it out")
    if place == "loss" and kl == "k1" and not importance:
        raise ConfigError(
            "algorithm.kl=k1 in the loss has a gradient of zero on average; set algorithm.kl=k2, which has nearly the "
            "same mean while the policies are close and the gradient of KL(π‖π_ref), or algorithm.kl_in=reward"
        )
    if kl == "k2" and importance:
        raise ConfigError("algorithm.kl_importance is for k1 and k3; k2 has the right gradient without it")


def _gap(logprobs: Tensor, ref: Tensor) -> Tensor:
    """log π − log π_ref, 0 where the reference bans the token."""
    return torch.where(ref == -torch.inf, 0.0, logprobs - ref)
