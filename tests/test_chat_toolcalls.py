# SPDX-License-Identifier: Apache-2.0
"""Reading and writing tool calls as text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.chat.toolcalls import calls_text, openai_calls, parse_reply, tools_text
from palestra.errors import DataError


def functions(text: str) -> list[Any]:
    return [call["function"] for call in parse_reply(text).tool_calls]


def test_several_calls_keep_their_order_and_their_surrounding_text() -> None:
    one, two = {"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}
    parsed = parse_reply(f"First.\n{calls_text([one, two])}\nThen.")
    assert [c["function"] for c in parsed.tool_calls] == [one, two]
    assert parsed.content == "First.\nThen."
    assert len({c["id"] for c in parsed.tool_calls}) == 2
    assert parsed.malformed is None


def test_arguments_that_are_cut_inside_the_tags_are_malformed_json() -> None:  # et-009
    text = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": </tool_call>'
    parsed = parse_reply(text)
    assert parsed.tool_calls == ()
    assert "JSON" in (parsed.malformed or "")
    assert parsed.content == text


def test_a_missing_outer_brace_is_reported() -> None:  # et-010
    parsed = parse_reply('<tool_call>{"name": "ls", "arguments": {"path": "/"}</tool_call>')
    assert parsed.tool_calls == ()
    assert "JSON" in (parsed.malformed or "")


def test_a_call_cut_by_the_length_limit_is_unclosed() -> None:  # et-011
    parsed = parse_reply('<tool_call>{"name": "write", "arguments": {"text": "abc')
    assert parsed.tool_calls == ()
    assert "unclosed" in (parsed.malformed or "")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<tool_call>{"name": "f", "arguments": {}}', "unclosed"),
        ('{"name": "f", "arguments": {}}</tool_call>', "without <tool_call>"),
        ('<tool_call>{"name": "f"}</tool_call>', "arguments"),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', "name"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "arguments"),
        ('<tool_call>{"name": "f", "arguments": "{"}</tool_call>', "arguments are not valid JSON"),
        ('<tool_call>["f"]</tool_call>', "JSON must be"),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN is not JSON"),
        ('<tool_call>{"name": "f", "arguments": {}} {}</tool_call>', "more than one"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "JSON"),
        ("<tool_call></tool_call>", "JSON"),
    ],
)
def test_whatever_is_no_call_is_malformed_in_one_line(text: str, reason: str) -> None:
    parsed = parse_reply(text)
    assert parsed.tool_calls == ()
    assert reason in (parsed.malformed or "")
    assert "\n" not in (parsed.malformed or "")


def test_one_bad_call_spoils_the_turn() -> None:
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parsed = parse_reply(f"{good}<tool_call>nonsense</tool_call>")
    assert parsed.tool_calls == ()
    assert "tool call 2" in (parsed.malformed or "")


def test_an_argument_may_quote_the_closing_tag() -> None:
    call = {"name": "say", "arguments": {"text": "</tool_call>"}}
    assert functions(calls_text([call])) == [call]


def test_a_call_that_is_only_considered_is_not_made() -> None:
    text = '<think>\nperhaps <tool_call>{"name": "f", "arguments": {}}</tool_call>\n</think>\n\nNo.'
    parsed = parse_reply(text)
    assert parsed.tool_calls == ()
    assert parsed.malformed is None
    assert parsed.content == "No."


def test_a_call_inside_unclosed_reasoning_is_reported() -> None:
    parsed = parse_reply('<think>\nso <tool_call>{"name": "f", "arguments": {}}</tool_call>')
    assert parsed.tool_calls == ()
    assert "unclosed <think>" in (parsed.malformed or "")


def test_reasoning_opened_by_the_prompt_ends_at_its_closing_tag() -> None:  # ct-003
    parsed = parse_reply("3+4 makes 7.\n</think>\n\nSeven.", thinking=True)
    assert (parsed.reasoning_content, parsed.content) == ("3+4 makes 7.", "Seven.")


def test_arguments_as_text_and_as_mapping_are_the_same() -> None:  # ct-008
    as_text, as_mapping = ({"name": "f", "arguments": a} for a in ('{"a": 1}', {"a": 1}))
    assert calls_text([as_text]) == calls_text([as_mapping]) == calls_text(openai_calls([as_text]))


@pytest.mark.parametrize("call", [{"name": "f"}, {"name": "f", "arguments": "{"}, {"arguments": {}}])
def test_a_message_with_a_broken_call_is_a_data_error(call: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"tool_calls\[0\]"):
        openai_calls([call])


def test_schemas_from_a_columnar_table_gain_no_nulls() -> None:  # ct-005
    tools = [
        {"name": "a", "parameters": {"properties": {"x": {"type": "string"}, "y": None}}},
        {"name": "b", "parameters": {"properties": {"x": None, "y": {"type": "integer"}}}},
    ]
    text = tools_text(tools)
    assert "null" not in text
    shown = [json.loads(line) for line in text.splitlines() if line.startswith('{"name": "a"')] + [
        json.loads(line) for line in text.splitlines() if line.startswith('{"name": "b"')
    ]
    assert [list(tool["parameters"]["properties"]) for tool in shown] == [["x"], ["y"]]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), _JSON, max_size=3)), min_size=1, max_size=3))
def test_what_is_written_is_read_back(calls: list[tuple[str, dict[str, Any]]]) -> None:
    shaped = [{"name": name, "arguments": arguments} for name, arguments in calls]
    assert functions(calls_text(shaped)) == shaped


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name"', "{", "}", "x", "\n"]))
)
def test_no_text_raises(pieces: list[str]) -> None:
    parsed = parse_reply("".join(pieces))
    assert not (parsed.malformed and parsed.tool_calls)


def test_half_a_surrogate_that_json_escapes_becomes_a_question_mark() -> None:
    said = r'<tool_call>{"name": "f", "arguments": {"a\ud800": ["\udfff", "\ud83d\ude00"]}}</tool_call>'
    assert parse_reply(said).tool_calls[0]["function"] == {"name": "f", "arguments": {"a?": ["?", "\U0001f600"]}}
