# SPDX-License-Identifier: Apache-2.0
"""Text that a model wrote, made safe to show: it may hold anything."""

from __future__ import annotations

_INVISIBLE = {i: f"<U+{i:04X}>" for i in (*range(0x200E, 0x2010), *range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_CONTROLS = {i: chr(0x2400 + i) for i in range(0x20) if chr(i) not in "\n\t"} | {0x7F: "␡"}
_C1 = {i: f"<U+{i:04X}>" for i in range(0x80, 0xA0)}
_SURROGATES = dict.fromkeys(range(55296, 57344), "�")
_TABLE = _INVISIBLE | _CONTROLS | _C1 | _SURROGATES


def visible(text: str) -> str:
    """``text`` with control characters, direction marks and lone surrogates made visible, so that it can neither
    steer a terminal nor reorder a page. Line breaks and tabs stay.

    >>> visible("ok\\x1b[2J\\n")
    'ok␛[2J\\n'
    """
    return text.translate(_TABLE)
