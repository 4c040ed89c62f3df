# SPDX-License-Identifier: Apache-2.0
"""What the samples of a micro-batch have in common, as a tree: every beginning that several share is stored once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from palestra.types import IntArray

if TYPE_CHECKING:
    from palestra.learn.batch import Sample


@dataclass(slots=True)
class Piece:
    """Consecutive new tokens of one sample (or a shared prompt) and the flat rows they come after."""

    tokens: IntArray
    prefix: list[int]
    start: int = 0


TRUNK = 32
"""A prefix shared by a whole micro-batch (a system prompt with its tools) is stored once from this length on;
a shorter one would save less than its kernels cost."""

BRANCH = 16
"""Members of a group that go on alike after their prompt share those tokens too when it saves at least this many."""


def layout(samples: Sequence[Sample], indices: Sequence[int]) -> tuple[list[Piece], list[int], list[list[int]]]:
    """A tree: what all samples begin with, what a group begins with, and each way its members go on from there.

    A token's hidden state depends on what stands before it and on nothing else, so equal beginnings are computed
    once, sampled tokens included; the gradient is the sum over all who share them. Returns the pieces in flat order,
    the samples in that order, and the flat row of each of a sample's tokens.
    """
    pieces: list[Piece] = []
    order: list[int] = []
    row_of: list[list[int]] = []
    count = 0

    def add(tokens: IntArray, prefix: list[int]) -> list[int]:
        nonlocal count
        if not len(tokens):
            return prefix
        pieces.append(Piece(tokens, prefix, count))
        count += len(tokens)
        return prefix + list(range(count - len(tokens), count))

    def grow(members: Sequence[int], start: int, prefix: list[int]) -> None:
        """One branch: what its members have in common from ``start`` on, then a branch for each way they part."""
        end = _common(samples, members)
        flat_rows = add(samples[members[0]].tokens[start:end], prefix)
        for branch in _branches(samples, members, end):
            if len(samples[branch[0]].tokens) == end:  # these members end here
                order.extend(branch)
                row_of.extend([flat_rows] * len(branch))
            else:
                grow(branch, end, flat_rows)

    trunk, groups = shared_beginnings(samples, indices)
    root = add(samples[indices[0]].tokens[:trunk], [])
    for _, members in groups:
        grow(members, trunk, root)
    return pieces, order, row_of


def _branches(samples: Sequence[Sample], members: Sequence[int], at: int) -> list[list[int]]:
    """``members``, alike up to ``at``, by how they go on; those that would share too little stay apart."""
    by_next: dict[int, list[int]] = {}
    for i in members:
        by_next.setdefault(int(samples[i].tokens[at]) if at < len(samples[i].tokens) else -1, []).append(i)
    branches: list[list[int]] = []
    for following, branch in by_next.items():
        saved = (_common(samples, branch) - at) * (len(branch) - 1)
        if following == -1 or saved >= BRANCH:
            branches.append(branch)
        else:
            branches.extend([i] for i in branch)
    return branches


def shared_beginnings(samples: Sequence[Sample], indices: Sequence[int]) -> tuple[int, list[tuple[int, list[int]]]]:
    """The length of the trunk, and per group that of its shared beginning (trunk included) with its members."""
    groups: dict[str, list[int]] = {}
    for i in indices:
        groups.setdefault(samples[i].group, []).append(i)
    trunk = _common(samples, indices) if len(groups) > 1 else 0
    if trunk < TRUNK:
        trunk = 0
    return trunk, [(_common(samples, m) if len(m) > 1 else trunk, m) for m in groups.values()]


def _common(samples: Sequence[Sample], members: Sequence[int]) -> int:
    """How many leading tokens all members have in common."""
    first = samples[members[0]].tokens
    limit = len(first)
    for i in members[1:]:
        n = min(limit, len(samples[i].tokens))
        same = samples[i].tokens[:n] == first[:n]
        limit = n if same.all() else int(same.argmin())
    return limit
