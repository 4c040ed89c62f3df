# SPDX-License-Identifier: Apache-2.0
"""Where randomness comes from: keys, not streams, so that no order of events can change what is drawn."""

from __future__ import annotations

import hashlib


def noise_key(seed: int, purpose: str, *parts: int | str) -> int:
    """A 64-bit key that depends on its arguments alone: the same in every process, on every machine.

    ``purpose`` keeps uses apart (train, eval, env …): evaluation draws nothing that training would have drawn.

    >>> noise_key(0, "train", 3, "task", 1) == noise_key(0, "train", 3, "task", 1)
    True
    >>> noise_key(0, "train", 3) == noise_key(0, "eval", 3)
    False
    """
    words = repr(tuple(p if isinstance(p, str) else int(p) for p in (seed, purpose, *parts)))
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big")
