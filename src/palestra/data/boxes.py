# SPDX-License-Identifier: Apache-2.0
r"""What stands in LaTeX boxes: the answer of a MATH solution, and of many a model's."""

from __future__ import annotations

import re

BOX = re.compile(r"\\(?:f?boxed|fbox)(?:\s{0,9}\{|[ ](?P<bare>-?\d+))")


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
    """
    found: list[str] = []
    match = BOX.search(text)
    while match is not None:
        if match["bare"]:
            end = match.end()
            found.append(match["bare"])
        else:
            end = closing(text, match.end() - 1)
            if end < 0:
                break  # the text ends inside this box, so no later one can be complete either
            found.append(text[match.end() : end])
        match = BOX.search(text, end)
    return found
