# SPDX-License-Identifier: Apache-2.0
r"""What stands in LaTeX boxes: the answer of a MATH solution, and of many a model's."""

from __future__ import annotations

import re

BOX = re.compile(r"\\(?:f?boxed|fbox)(?:\s{0,9}\{|[ ](?P<bare>-?\d+))")
MARKS = re.compile(r"\\.|[{}]", re.DOTALL)


def closing(text: str, start: int) -> int:
    """Index of the brace that closes the one at ``start``; -1 when it is never closed.

    >>> closing("{a{b}}c", 0), closing("{a", 0)
    (5, -1)
    """
    depth = 0
    for at in range(start, len(text)):
        if text[at] == "\\" and text[at + 1 : at + 2] in ("{", "}"):
            continue
        if text[at - 1 : at] == "\\" and text[at] in "{}":
            continue
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at
    return -1


def boxed_contents(text: str) -> list[str]:
    r"""What stands in each complete ``\boxed{}`` or ``\fbox{}``, in order; braces may nest.

    A bare whole number behind ``\boxed`` counts too: some MATH solutions write ``\boxed 5``.

    >>> boxed_contents("\\boxed{4} and \\boxed{\\frac{1}{2}} and \\boxed{9")
    ['4', '\\frac{1}{2}']
    >>> boxed_contents("\\boxed{5 or so, wait: \\boxed{72}")
    ['72']
    """
    found: list[str] = []
    ends = _closings(text)
    match = BOX.search(text)
    while match is not None:
        start, end = match.end(), match.end()
        if match["bare"]:
            found.append(match["bare"])
        elif start - 1 in ends:
            end = ends[start - 1]
            found.append(text[start:end])
        match = BOX.search(text, end)  # one that is never closed may hold a complete one: a box begun anew
    return found


def _closings(text: str) -> dict[int, int]:
    """Where each brace that is closed is closed, in one pass."""
    found: dict[int, int] = {}
    opened: list[int] = []
    for mark in MARKS.finditer(text):
        if mark[0] == "{":
            opened.append(mark.start())
        elif mark[0] == "}" and opened:
            found[opened.pop()] = mark.start()
    return found
