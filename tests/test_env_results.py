# SPDX-License-Identifier: Apache-2.0
"""What the model reads of a result that is no text."""

from __future__ import annotations

import datetime
import decimal
import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pydantic
import pytest

from palestra.env.results import cut, result_text


@dataclass
class Point:
    x: int
    tags: set[str] = field(default_factory=lambda: {"b", "a", "c"})


class City(pydantic.BaseModel):
    name: str
    founded: datetime.date
    at: Point


class Shape(pydantic.BaseModel):
    name: str


class Circle(Shape):
    radius: int


class Holder(pydantic.BaseModel):
    shape: Shape


@dataclass
class Secret:
    question: str
    gold: str = field(repr=False)


class Colour(enum.Enum):
    RED = "red"


class Broken(pydantic.BaseModel):
    @pydantic.computed_field
    def area(self) -> int:
        raise RuntimeError("no area")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Point(1), '{"x": 1, "tags": ["a", "b", "c"]}'),
        (
            City(name="Köln", founded=datetime.date(50, 1, 2), at=Point(3, set())),
            '{"name": "Köln", "founded": "0050-01-02", "at": {"x": 3, "tags": []}}',
        ),
        (datetime.datetime(2026, 1, 31, 12, 30), '"2026-01-31T12:30:00"'),
        (decimal.Decimal("0.10"), '"0.10"'),
        ({10, 9, 2.5, "z", "a"}, '[2.5, 9, 10, "a", "z"]'),
        (np.float32(0.5), "0.5"),
        (np.int64(7), "7"),
        (np.bool_(True), "true"),
        (np.arange(4).reshape(2, 2), "[[0, 1], [2, 3]]"),
        ({np.int64(1): [Colour.RED], Colour.RED: None}, '{"1": ["red"], "red": null}'),
        ({"zoe": 3, "adam": 1}.keys(), '["zoe", "adam"]'),  # a ranking keeps its order
        (np.array(["2026-01-31T12"], "datetime64[ns]"), '["2026-01-31T12:00:00.000000000"]'),
        (Holder(shape=Circle(name="c", radius=2)), '{"shape": {"name": "c", "radius": 2}}'),
        (Secret("asked", "gold"), '{"question": "asked"}'),  # as its own repr has it
    ],
)
def test_what_has_a_form_in_json_is_json(value: Any, text: str) -> None:
    assert result_text(value) == text


@pytest.mark.parametrize(
    "value",
    [
        *({(1, 2): 3}, [b"x"], object, np.array([1j]), iter([1]), print),
        np.timedelta64(5, "ns"),  # a number alone would say nothing of its unit
        np.array([(1, 2.5)], dtype=[("id", int), ("price", float)]),
        {datetime.date(2026, 1, 1): 1, "2026-01-01": 2},  # one of the two would be lost
    ],
)
def test_what_has_none_is_shown_as_python_prints_it(value: Any) -> None:
    assert result_text(value) == f"{value!r} (not JSON: shown as Python prints it)"


def test_a_class_that_fails_when_it_is_asked_for_its_fields_is_shown_or_raises_its_own_error() -> None:
    with pytest.raises(RuntimeError, match="no area"):  # its repr asks for the same field
        result_text(Broken())


def test_a_long_one_is_cut_like_text() -> None:
    assert cut(result_text(np.zeros(3, np.int64)), 4) == "[0, … [5 characters cut]"
