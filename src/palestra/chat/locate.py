# SPDX-License-Identifier: Apache-2.0
"""Where the bodies of messages lie in a rendered text.

A template is rendered twice, once with the real contents and once with sentinels in their place. What stands
between the sentinels is scaffolding, so the real text must read: scaffolding, body, scaffolding, body, …
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Plain ASCII words: a sentinel must come out unchanged whether the template trims it, quotes it or dumps it as JSON.
_SENTINEL = re.compile(r"palestra7sentinel(\d+)x")


def sentinel(index: int) -> str:
    """A text that no template and no tool schema contains."""
    return f"palestra7sentinel{index}x"


class Region(NamedTuple):
    """Characters ``start`` to ``end`` of a rendered text, the body of message ``owner``."""

    start: int
    end: int
    owner: int


@dataclass(frozen=True, slots=True)
class Flat:
    """A message as the template will get it: role, content in pieces, other fields.

    pieces: (text, index of the caller's message it came from; -1 = written by the renderer).
    """

    role: str
    pieces: tuple[tuple[str, int], ...]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def content(self) -> str:
        return "".join(text for text, _ in self.pieces)

    def plain(self) -> dict[str, Any]:
        """The message with its real content."""
        return {"role": self.role, "content": self.content, **self.extra}


def masked(messages: Sequence[Flat]) -> tuple[list[dict[str, Any]], list[tuple[str, int]]]:
    """The messages with a sentinel for each owned piece, and the (body, owner) that each sentinel stands for."""
    hidden: list[dict[str, Any]] = []
    bodies: list[tuple[str, int]] = []
    for message in messages:
        content = ""
        for text, owner in message.pieces:
            if owner >= 0:
                content += sentinel(len(bodies))
                bodies.append((text, owner))
            else:
                content += text
        hidden.append({"role": message.role, "content": content, **message.extra})
    return hidden, bodies


def locate(text: str, hidden_text: str, bodies: Sequence[tuple[str, int]]) -> list[Region]:
    """The regions of ``text`` that are message bodies, in order.

    A template may trim a body; one that rewrites it otherwise, or leaves it out, cannot be attributed, and its
    characters count as scaffolding (which nothing trains on, either way).

    >>> locate("<u> hi </u>", "<u>palestra7sentinel0x</u>", [(" hi ", 4)])
    [Region(start=3, end=7, owner=4)]
    """
    pieces = _SENTINEL.split(hidden_text)
    scaffolds, order = pieces[0::2], [int(p) for p in pieces[1::2]]
    if order != list(range(len(bodies))) or not text.startswith(scaffolds[0]):
        return []
    regions: list[Region] = []
    cursor = len(scaffolds[0])
    for number, (body, owner) in enumerate(bodies):
        following = scaffolds[number + 1]
        forms = dict.fromkeys((body, body.strip(), body.rstrip(), body.lstrip()))
        end = next((cursor + len(f) for f in forms if text.startswith(f + following, cursor)), None)
        if end is None:
            return regions
        regions.append(Region(cursor, end, owner))
        cursor = end + len(following)
    return regions


def owners_of(offsets: Sequence[tuple[int, int]], regions: Sequence[Region]) -> list[int]:
    """For each token (its characters' start and end) the owner of the region it begins in; -1 outside.

    >>> owners_of([(0, 3), (3, 5), (5, 9)], [Region(3, 5, 0)])
    [-1, 0, -1]
    """
    owners: list[int] = []
    at = 0
    for start, _ in offsets:
        while at < len(regions) and regions[at].end <= start:
            at += 1
        inside = at < len(regions) and regions[at].start <= start
        owners.append(regions[at].owner if inside else -1)
    return owners
