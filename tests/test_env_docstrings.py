# SPDX-License-Identifier: Apache-2.0
"""One function, documented in four styles, is one schema."""

from __future__ import annotations

import pytest
from transformers.utils import get_json_schema

from palestra.env.docstrings import describe
from palestra.env.tools import schema_of

GOOGLE = """Forecast for a city.

Args:
    city: Its English name,
        or its code.
    days: How many days (at most 7).

Returns:
    One line per day.
"""
NUMPY = """Forecast for a city.

Parameters
----------
city : str
    Its English name,
    or its code.
days : int, optional
    How many days (at most 7).

Returns
-------
str
    One line per day.

Examples
--------
>>> forecast("Oslo")
'rain'
"""
SPHINX = """Forecast for a city.

:param city: Its English name,
    or its code.
:param int days: How many days (at most 7).
:returns: One line per day.
:rtype: str

>>> forecast("Oslo")
'rain'
"""
EPYDOC = """Forecast for a city.

@param city: Its English name,
    or its code.
@param days: How many days (at most 7).
@return: One line per day.
"""


@pytest.mark.parametrize("text", [GOOGLE, NUMPY, SPHINX, EPYDOC], ids=["google", "numpy", "sphinx", "epydoc"])
def test_every_style_gives_the_description_and_the_parameters_and_nothing_else(text: str) -> None:
    parameters = {"city": "Its English name, or its code.", "days": "How many days (at most 7)."}
    assert describe(text.strip()) == ("Forecast for a city.", parameters)


@pytest.mark.parametrize("text", [GOOGLE, NUMPY, SPHINX, EPYDOC], ids=["google", "numpy", "sphinx", "epydoc"])
def test_the_schema_says_what_transformers_reads_from_the_google_style(text: str) -> None:
    def forecast(city: str, days: int = 1) -> str:
        return f"{city} {days}"

    forecast.__doc__ = GOOGLE
    theirs = get_json_schema(forecast)["function"]
    forecast.__doc__ = text
    ours = schema_of(forecast)["function"]
    assert (ours["name"], ours["description"]) == (theirs["name"], theirs["description"])
    assert ours["parameters"]["required"] == theirs["parameters"]["required"]
    for name, said in theirs["parameters"]["properties"].items():
        mine = ours["parameters"]["properties"][name]
        assert (mine["type"], mine["description"].split()) == (said["type"], said["description"].split())


def test_numpy_may_name_two_parameters_in_a_line_and_a_type_may_hold_brackets() -> None:
    assert describe("Add.\n\nParameters\n----------\na, b : int\n    What to add.")[1] == dict.fromkeys(
        "ab", "What to add."
    )
    assert describe("Add.\n\nArgs:\n    a (`int` of shape `(2, 3)`): the first")[1] == {"a": "the first"}


@pytest.mark.parametrize(
    "text", ["Plain.", "", "See\n:func:`add` for more.", "Odd.\n\n:param no colon", "Keys:\n@param nothing"]
)
def test_what_is_in_no_style_is_description_from_end_to_end(text: str) -> None:
    assert describe(text) == (" ".join(text.split()), {})
