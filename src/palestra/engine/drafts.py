# SPDX-License-Identifier: Apache-2.0
"""Guesses at the next tokens, from what was written before: speculative decoding without a second model.

Agents repeat themselves: the frame of a tool call is the same in every turn and episode. Guessed tokens ride along in
the forward pass that decodes the one before them; each position is sampled as ever, with its own logits and noise, and
a guess counts only where it is what was sampled. So guesses change the number of passes and not what is sampled
(Leviathan et al. 2023, with n-grams for a draft model and equality for the acceptance test, which shared noise makes
exact).
"""

from __future__ import annotations

from collections.abc import Sequence

ORDERS = (4, 2, 1)
"""Lengths of the contexts that are remembered; the longest one that was met before decides."""
SURE = 2
"""A guess is made where a context's last continuations, this many, were the same."""
MAX_CONTEXTS = 1 << 18
"""What is remembered is dropped when it has grown to this many contexts (some 45 MB)."""


class Drafts:
    """What followed each short context the last time.

    >>> drafts = Drafts()
    >>> for _ in range(2):
    ...     drafts.learn([1, 2, 3, 4, 5], 4)
    >>> drafts.guess([9, 2], 8), drafts.guess([9, 2], 2), drafts.guess([9], 8)
    ([3, 4, 5], [3, 4], [])
    """

    def __init__(self) -> None:
        self._following: dict[tuple[int, ...], tuple[int, int]] = {}  # context → token, times in a row

    def learn(self, tokens: Sequence[int], new: int) -> None:
        """Remember the last ``new`` tokens by what they followed."""
        if len(self._following) > MAX_CONTEXTS:
            self._following.clear()
        reach = max(ORDERS)
        recent = tokens[max(0, len(tokens) - new - reach) :]
        for at in range(max(1, len(recent) - new), len(recent)):
            token = recent[at]
            for order in ORDERS:
                if order <= at:
                    context = tuple(recent[at - order : at])
                    before, times = self._following.get(context, (token, 0))
                    self._following[context] = (token, min(times + 1, SURE) if before == token else 1)

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` tokens that are likely to come next, as far as one is sure of each."""
        known = list(tokens[-max(ORDERS) :])
        start = len(known)
        while len(known) - start < most:
            found = None
            for order in ORDERS:
                if order <= len(known) and (found := self._following.get(tuple(known[-order:]))) is not None:
                    break
            if found is None or found[1] < SURE:
                break
            known.append(found[0])
        return known[start:]


__all__ = ["Drafts"]
