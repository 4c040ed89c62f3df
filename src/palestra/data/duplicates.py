# SPDX-License-Identifier: Apache-2.0
"""Texts that are the same, and texts that are nearly so, without comparing each with each.

Candidates come from MinHash signatures over pairs of words, cut into bands (Broder 1997); each candidate pair is then
compared word by word. Texts with other numbers are never near duplicates: a word problem with new numbers is a new one.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import pairwise

import numpy as np
import numpy.typing as npt

BANDS, ROWS = 21, 3
NEAR = 0.85
CROWD = 50
"""Texts of one band that are compared with one another; in a larger crowd each meets only its neighbours."""

_COEFFICIENTS = np.random.default_rng(0).integers(1, 2**63, (2, BANDS * ROWS, 1), dtype=np.uint64) | np.uint64(1)
WORD = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+|[^\w\s.,;:!?'\"`$“”‘’]|_")


def plain_words(text: str) -> tuple[str, ...]:
    """Words, numbers and signs, without letter case, punctuation and spacing: equal texts have equal words.

    >>> plain_words("Ann has  3 apples, and $4.50!") == plain_words("ann has 3 apples and 4.50")
    True
    """
    return tuple(WORD.findall(unicodedata.normalize("NFKC", text).casefold())) or (text.strip(),)


def similarity(a: Sequence[str], b: Sequence[str]) -> float:
    """Share of the words that two texts have in common, in order: 2·matches / (length + length).

    >>> similarity("one word of five differs".split(), "one word of six differs".split())
    0.8
    """
    return SequenceMatcher(None, a, b, autojunk=False).ratio()


def near_pairs(texts: Sequence[tuple[str, ...]], near: float = NEAR) -> Iterator[tuple[int, int, float]]:
    """Pairs of texts (as words) that are alike to ``near`` or more and have the same numbers, but are not equal.

    >>> a, b = "Ann buys 3 red apples at the market", "Ann buys 3 red apples on the market"
    >>> [(i, j) for i, j, _ in near_pairs([plain_words(t) for t in (a, "something else", b)])]
    [(0, 2)]
    """
    seen: set[tuple[int, int]] = set()
    for crowd in _candidates(texts):
        for at, i in enumerate(crowd):
            for j in crowd[at + 1 : at + 1 + CROWD]:
                if (i, j) in seen or texts[i] == texts[j]:
                    continue
                seen.add((i, j))
                if (alike := similarity(texts[i], texts[j])) >= near:
                    yield i, j, alike


def _candidates(texts: Sequence[tuple[str, ...]]) -> Iterator[list[int]]:
    """Indices, rising, of texts that share a band of their signature and all of their numbers."""
    buckets: dict[tuple[int, bytes, tuple[str, ...]], list[int]] = {}
    for index, words in enumerate(texts):
        numbers = tuple(sorted(w for w in words if w[:1].isdigit()))
        signature = _signature(words)
        for band in range(BANDS):
            part = signature[band * ROWS : (band + 1) * ROWS].tobytes()
            buckets.setdefault((band, part, numbers), []).append(index)
    yield from (crowd for crowd in buckets.values() if len(crowd) > 1)


def _signature(words: Sequence[str]) -> npt.NDArray[np.uint32]:
    """uint32[BANDS·ROWS]: for each of as many hash functions, the least hash of the text's pairs of words."""
    pairs = {f"{a} {b}" for a, b in pairwise(words)} or {words[0]}
    hashes = np.array([zlib.crc32(p.encode()) for p in pairs], np.uint64)
    mixed = (_COEFFICIENTS[0] * hashes + _COEFFICIENTS[1]) >> np.uint64(32)
    least: npt.NDArray[np.uint32] = mixed.min(axis=1).astype(np.uint32)
    return least
