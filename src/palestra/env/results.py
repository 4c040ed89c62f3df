# SPDX-License-Identifier: Apache-2.0
"""What a tool returned, as text for the model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

import numpy as np
import pydantic
from pydantic_core import to_jsonable_python


def result_text(value: Any) -> str:
    """A result as the model reads it: text as it is, everything else as JSON, and what is no JSON as its repr.

    Data classes and pydantic models are objects (of a data class what its repr shows), sets sorted lists, arrays nested
    lists, dates and decimals text.

    >>> [result_text(v) for v in ("", 0, None, False, [1, "é"], {1j})]
    ['', '0', 'null', 'false', '[1, "é"]', '{1j} (not JSON: shown as Python prints it)']
    >>> result_text({"day": np.datetime64("2026-01-31"), "odd": {3, 1}, "row": np.ones(2, np.float32)})
    '{"day": "2026-01-31", "odd": [1, 3], "row": [1.0, 1.0]}'
    """
    if isinstance(value, str):
        return value
    try:
        return json.dumps(_plain(value), ensure_ascii=False)
    except Exception:  # a foreign class may fail in any way when it is asked for its fields
        return f"{value!r} (not JSON: shown as Python prints it)"


def cut(text: str, max_chars: int) -> str:
    """The first ``max_chars`` characters, and how many are missing.

    >>> cut("abcdef", 4)
    'abcd… [2 characters cut]'
    """
    return text if len(text) <= max_chars else f"{text[:max_chars]}… [{len(text) - max_chars} characters cut]"


def _plain(value: Any) -> Any:
    """Of what JSON has. Raises TypeError or ValueError for what it has no form for."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        found = {_key(k): _plain(v) for k, v in value.items()}
        if len(found) != len(value):
            raise TypeError("two keys are one in JSON")
        return found
    if isinstance(value, list | tuple | KeysView | ValuesView | ItemsView):
        return [_plain(v) for v in value]
    if isinstance(value, set | frozenset):  # in an order that does not depend on the process
        return sorted((_plain(v) for v in value), key=_order)
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind in "mV":
            raise TypeError("no form in JSON")
        return _plain((value.astype(str) if value.dtype.kind == "M" else value).tolist())
    if isinstance(value, pydantic.BaseModel):
        return _plain(value.model_dump(by_alias=True, serialize_as_any=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.repr}
    if isinstance(value, bytes | bytearray | memoryview | complex | type | Iterator):
        raise TypeError("no form in JSON")
    return to_jsonable_python(value)


def _order(plain: Any) -> tuple[bool, float, str]:
    """Numbers first, by size; then the rest, as it is written."""
    number = isinstance(plain, int | float)
    return not number, plain if number else 0, "" if number else json.dumps(plain, sort_keys=True)


def _key(value: Any) -> Any:
    plain = _plain(value)
    if plain is not None and not isinstance(plain, str | int | float):
        raise TypeError("a key in JSON is text")
    return plain
