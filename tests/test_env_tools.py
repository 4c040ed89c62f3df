# SPDX-License-Identifier: Apache-2.0
"""Functions as tools: their schema, their arguments, their results."""

from __future__ import annotations

import asyncio
import enum
import signal
import threading
import time
from typing import Any, Literal

import pytest

from palestra.env.tools import Tool, ToolResult, execute, import_object, schema_of
from palestra.errors import ConfigError


class Unit(enum.Enum):
    CELSIUS = "C"
    KELVIN = "K"


def weather(
    city: str, days: int = 1, unit: Unit = Unit.CELSIUS, tags: list[str] | None = None, mode: Literal["a", "b"] = "a"
) -> str:
    """Forecast for a city.

    One line per day.

    Args:
        city: name of the city,
            in English
        days (int): how many days

    Returns:
        text: not a parameter
    """
    return f"{city} {days} {unit.name} {tags} {mode}"


def run(function: Any, arguments: dict[str, Any], **options: Any) -> ToolResult:
    item = Tool.of(function)
    call = {"id": "c", "type": "function", "function": {"name": item.name, "arguments": arguments}}
    return asyncio.run(execute(call, {item.name: item}, **options))


def half(x: float) -> float:
    """Half of it

    >>> half(3)
    1.5
    """
    return x / 2


# ── schema ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_doctests_are_for_people_and_stay_out_of_the_schema() -> None:
    assert schema_of(half)["function"]["description"] == "Half of it"


def test_hints_and_docstring_become_the_schema() -> None:
    assert schema_of(weather) == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Forecast for a city. One line per day.",
            "parameters": {
                "$defs": {"Unit": {"enum": ["C", "K"], "type": "string"}},
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "name of the city, in English"},
                    "days": {"type": "integer", "description": "how many days"},
                    "unit": {"$ref": "#/$defs/Unit"},
                    "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
                    "mode": {"enum": ["a", "b"], "type": "string"},
                },
                "required": ["city"],
            },
        },
    }


def test_parameters_may_have_names_that_pydantic_or_the_schema_use_itself() -> None:
    def odd(json: str, title: str, properties: int, _x: int) -> str:
        return f"{json}{title}{properties}{_x}"

    assert list(schema_of(odd)["function"]["parameters"]["properties"]) == ["json", "title", "properties", "_x"]
    assert run(odd, {"json": "j", "title": "t", "properties": 1, "_x": 2}).text == "jt12"


def test_a_mapping_keeps_the_type_of_its_values() -> None:
    def count(words: dict[str, int], rest: dict[str, list[int]]) -> int:
        return sum(words.values())

    assert schema_of(count)["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "words": {"type": "object", "additionalProperties": {"type": "integer"}},
            "rest": {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "integer"}}},
        },
        "required": ["words", "rest"],
    }


def test_a_parameter_may_be_called_like_the_key_of_the_schema_that_is_left_out() -> None:
    def odd(additionalProperties: bool) -> bool:
        return additionalProperties

    properties = schema_of(odd)["function"]["parameters"]["properties"]
    assert properties == {"additionalProperties": {"type": "boolean"}}


def test_what_cannot_be_described_is_refused_when_the_tool_is_made() -> None:
    def star(*numbers: int) -> None: ...
    def stars(**numbers: int) -> None: ...
    def bare(x, y: int) -> None: ...  # type: ignore[no-untyped-def]
    def strange(x: asyncio.Lock) -> None: ...

    for function, reason in ((star, "numbers"), (stars, "numbers"), (bare, "'x' has no type hint"), (strange, "hint")):
        with pytest.raises(ConfigError, match=reason):
            Tool.of(function)


def test_a_dotted_path_names_a_function() -> None:
    assert Tool.of("palestra.env.arithmetic:divide").function(1, 4) == 0.25
    with pytest.raises(ConfigError, match="did you mean 'divide'"):
        import_object("palestra.env.arithmetic:devide")
    with pytest.raises(ConfigError, match="cannot import 'no_such_module'"):
        import_object("no_such_module:f")
    with pytest.raises(ConfigError, match="'module:name'"):
        import_object("add")


# ── arguments ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_arguments_are_converted_by_their_hints() -> None:
    given = {"city": "Oslo", "days": 2, "unit": "K", "tags": ["x"], "mode": "b"}
    assert run(weather, given).text == "Oslo 2 KELVIN ['x'] b"
    assert run(weather, {"city": "Oslo"}).text == "Oslo 1 CELSIUS None a"


def test_an_integer_is_accepted_for_a_float_but_text_is_not_for_an_integer() -> None:
    def half(x: float) -> float:
        return x / 2

    def twice(x: int) -> int:
        return 2 * x

    assert run(half, {"x": 3}).text == "1.5"
    for wrong in ("3", 3.5, True, None):
        result = run(twice, {"x": wrong})
        assert result.failed
        assert not result.ran
        assert "argument 'x'" in result.text
        assert repr(wrong) in result.text


def test_missing_and_unknown_arguments_are_named() -> None:
    text = run(weather, {"town": "Oslo"}).text
    assert "missing argument 'city'" in text
    assert "unknown argument 'town'" in text
    assert "It takes: city, days, unit, tags, mode" in text


def test_an_unknown_tool_is_answered_with_the_names_there_are() -> None:  # et-019
    call = {"id": "c", "function": {"name": "weather_now", "arguments": {}}}
    result = asyncio.run(execute(call, {"weather": Tool.of(weather)}))
    assert "weather_now" in result.text
    assert "did you mean 'weather'" in result.text
    assert (result.ran, result.failed, result.fatal) == (False, True, None)


# ── results ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_falsy_results_are_results() -> None:  # et-018
    def subtract(a: int, b: int) -> int:
        return a - b

    result = run(subtract, {"a": 5, "b": 5})
    assert (result.text, result.failed) == ("0", False)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        ("", ""),
        (False, "false"),
        (None, "null"),
        ([], "[]"),
        ([1, "é"], '[1, "é"]'),
        ({"a": (1, 2)}, '{"a": [1, 2]}'),
        ({1j}, "{1j} (not JSON: shown as Python prints it)"),
        (b"x", "b'x' (not JSON: shown as Python prints it)"),
    ],
)
def test_every_kind_of_result_has_a_text(value: Any, text: str) -> None:
    def give() -> Any:
        return value

    assert run(give, {}).text == text


def test_a_huge_result_is_cut_and_says_by_how_much() -> None:
    def huge() -> str:
        return "x" * 5000

    assert run(huge, {}).text == "x" * 4096 + "… [904 characters cut]"


def test_a_result_that_refers_to_itself_or_cannot_be_printed_is_text_too() -> None:
    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError("no words")

    def loop() -> Any:
        value: list[Any] = []
        value.append(value)
        return value

    def mute() -> Any:
        return Mute()

    assert run(loop, {}).text.startswith("[[...]]")
    assert run(mute, {}).text == "Error: RuntimeError: no words"


# ── failures ────────────────────────────────────────────────────────────────────────────────────────────────────


def divide(a: float, b: float) -> float:
    return a / b


def test_a_tools_own_error_is_an_observation() -> None:  # et-004
    result = run(divide, {"a": 1, "b": 0})
    assert result.text.startswith("Error: ZeroDivisionError: ")
    assert (result.ran, result.failed, result.fatal) == (True, True, None)


@pytest.mark.parametrize("waits", [False, True], ids=["plain", "async"])
def test_an_error_that_cannot_say_what_it_is_is_an_observation_too(waits: bool) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def plain() -> None:
        raise Mute

    async def later() -> None:
        raise Mute

    result = run(later if waits else plain, {})
    assert (result.text, result.failed) == ("Error: Mute: (a message that cannot be shown)", True)


def test_a_tool_that_wants_to_end_the_process_ends_its_call() -> None:
    def leave() -> None:
        raise SystemExit(3)

    assert run(leave, {}).text == "Error: SystemExit: 3"


def test_a_timeout_error_of_the_tool_itself_is_not_our_timeout() -> None:
    def unreachable() -> None:
        raise TimeoutError("the server is silent")

    async def unreachable_async() -> None:
        raise TimeoutError("the server is silent")

    for function in (unreachable, unreachable_async):
        assert run(function, {}).text == "Error: TimeoutError: the server is silent"


RELEASED = threading.Event()


def sleepy() -> str:
    RELEASED.wait(60)
    return "late"


async def sleepy_async() -> str:
    await asyncio.sleep(60)
    return "late"


@pytest.mark.parametrize("function", [sleepy, sleepy_async])
def test_a_hung_tool_costs_its_timeout(function: Any) -> None:  # et-006
    RELEASED.clear()
    before = set(threading.enumerate())
    start = time.monotonic()
    result = run(function, {}, timeout_s=0.1)
    assert time.monotonic() - start < 3
    assert result.text == f"Error: tool {function.__name__} timed out after 0.1 s"
    assert result.fatal is None
    left = [t for t in threading.enumerate() if t.name.startswith("palestra-") and t not in before]
    assert all(t.daemon for t in left)
    RELEASED.set()
    for thread in left:
        thread.join(3)
    assert not any(t.is_alive() for t in left)


def test_a_method_that_hangs_is_fatal_for_its_object() -> None:
    class Shop:
        async def buy(self, item: str) -> str:
            await asyncio.sleep(60)
            return item

    assert "timed out" in (run(Shop().buy, {"item": "tea"}, timeout_s=0.05).fatal or "")


def test_async_tools_are_awaited_on_every_path() -> None:  # et-024
    async def echo(x: str) -> str:
        await asyncio.sleep(0)
        return x

    def echo_later(x: str) -> Any:
        return echo(x)

    assert run(echo, {"x": "hi"}).text == "hi"
    assert run(echo_later, {"x": "hi"}).text == "hi"


def test_timeouts_do_not_rest_on_signals(monkeypatch: pytest.MonkeyPatch) -> None:  # et-020
    def echo(x: str) -> str:
        return x

    for name in ("SIGALRM", "alarm", "setitimer"):
        monkeypatch.delattr(signal, name, raising=False)
    assert run(echo, {"x": "hi"}, timeout_s=1).text == "hi"
