# SPDX-License-Identifier: Apache-2.0
"""Numbers about numbers: intervals, pass@k, pass^k, a paired test."""

from __future__ import annotations

import math
from collections.abc import Sequence

_Z95 = 1.96


def mean(values: Sequence[float]) -> float | None:
    """The mean over examples; None of none.

    >>> mean([1.0, 0.0, 1.0, 0.0, 1.0]), mean([])
    (0.6, None)
    """
    return math.fsum(values) / len(values) if values else None


def std_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean, from the population deviation: sqrt(p (1 - p) / n) for zeros and ones.

    >>> round(std_error([1.0, 0.0] * 100), 6)
    0.035355
    """
    centre = mean(values)
    if centre is None:
        return None
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values)) / len(values)


def normal_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the mean by normal approximation: mean ± 1.96 standard errors."""
    centre, error = mean(values), std_error(values)
    return None if centre is None or error is None else (centre - _Z95 * error, centre + _Z95 * error)


def wilson_interval(successes: float, n: int) -> tuple[float, float] | None:
    """The 95 % interval of a share by Wilson (1927), which stays inside [0, 1] and is honest near its ends.

    >>> tuple(round(x, 4) for x in wilson_interval(10, 10))
    (0.7225, 1.0)
    """
    if n == 0:
        return None
    share, z2 = successes / n, _Z95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """Unbiased pass@k of n samples of which c are right: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, eq. 1).

    None when k > n: fewer samples than asked for cannot tell. Computed as a product, so nothing overflows. Raises
    ValueError unless 0 <= c <= n and k >= 1.

    >>> round(pass_at_k(10, 3, 5), 6), pass_at_k(3, 0, 7)
    (0.916667, None)
    """
    if not 0 <= c <= n or k < 1:
        raise ValueError(f"pass_at_k needs 0 <= c <= n and k >= 1, not n={n}, c={c}, k={k}")
    if k > n:
        return None
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def pass_hat_k(n: int, c: int, k: int) -> float | None:
    """Unbiased pass^k, the chance that k tries all succeed: C(c, k) / C(n, k) (Yao et al. 2024, arXiv:2406.12045).

    None when k > n. Raises ValueError unless 0 <= c <= n and k >= 1.

    >>> pass_hat_k(4, 3, 1), pass_hat_k(4, 3, 2), pass_hat_k(4, 3, 4), pass_hat_k(4, 3, 5)
    (0.75, 0.5, 0.0, None)
    """
    if not 0 <= c <= n or k < 1:
        raise ValueError(f"pass_hat_k needs 0 <= c <= n and k >= 1, not n={n}, c={c}, k={k}")
    return None if k > n else math.prod((c - i) / (n - i) for i in range(k))


def sign_test(better: int, worse: int) -> float:
    """Exact two-sided p-value that as uneven a split of changes, or a more uneven one, comes from a fair coin.

    For pairs of right and wrong this is McNemar's exact test: only the pairs that changed count.

    >>> sign_test(5, 0), sign_test(3, 3), sign_test(0, 0)
    (0.0625, 1.0, 1.0)
    """
    n = better + worse
    tail = sum(math.comb(n, i) for i in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / float(2**n))


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value below which ``share`` of the values lie, by linear interpolation; None of none.

    >>> quantile([4.0, 1.0, 2.0, 3.0], 0.5), quantile([], 0.5)
    (2.5, None)
    """
    if not values:
        return None
    ranked = sorted(values)
    at = share * (len(ranked) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (at - low) * (ranked[high] - ranked[low])
