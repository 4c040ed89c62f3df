# SPDX-License-Identifier: Apache-2.0
"""Tool calls as text, in the Hermes notation: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

Writing (schemas and calls → text) and reading (a sampled reply → content, reasoning, calls) side by side, so
that one file shows what is promised to the model and what is accepted from it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from palestra.chat.base import Parsed
from palestra.errors import DataError

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, UNTHINK = "<think>", "</think>"

_TOOLS_TEXT = """# Tools
You may call these functions:
<tools>
{schemas}
</tools>
To call one, write a JSON object with its name and arguments inside tags, like this:
<tool_call>
{{"name": "<function-name>", "arguments": {{<arguments>}}}}
</tool_call>"""


class _Malformed(Exception):
    """Why a call cannot be read, in one line."""


def without_nulls(value: Any) -> Any:
    """A schema as its author wrote it: columnar storage fills absent keys of structs with nulls.

    A null is kept where it means something: as an item of a list, and under ``default`` or ``const``.

    >>> without_nulls({"properties": {"x": {"type": "string"}, "y": None}, "required": None})
    {'properties': {'x': {'type': 'string'}}}
    """
    if isinstance(value, Mapping):
        keep = ("default", "const")
        return {k: without_nulls(v) for k, v in value.items() if v is not None or k in keep}
    if isinstance(value, list | tuple):
        return [without_nulls(v) for v in value]
    return value


def openai_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Schemas in the shape ``{"type": "function", "function": {…}}``, whichever of the two shapes they came in."""
    return [{"type": "function", "function": without_nulls(tool.get("function", tool))} for tool in tools]


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """What a system message says about tools when the chat template has no place for them."""
    functions = [tool["function"] for tool in openai_tools(tools)]
    return _TOOLS_TEXT.format(schemas="\n".join(json.dumps(f, ensure_ascii=False) for f in functions))


def openai_calls(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Calls in OpenAI shape with arguments as a mapping.

    Accepts ``{"function": {…}}`` and the bare ``{"name", "arguments"}``, arguments as mapping or JSON text.
    Raises :class:`DataError` for anything else: a call that is dropped here would vanish from the training text.

    >>> openai_calls([{"name": "f", "arguments": '{"a": 1}'}])[0]["function"]
    {'name': 'f', 'arguments': {'a': 1}}
    """
    shaped = []
    for index, call in enumerate(calls):
        function = call.get("function") or call
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise DataError(f"tool_calls[{index}]: the arguments are not JSON ({error}): {arguments!r}") from error
        if not isinstance(function.get("name"), str) or not isinstance(arguments, Mapping):
            raise DataError(f"tool_calls[{index}]: need a name and arguments (a mapping or its JSON): {dict(call)!r}")
        body = {"name": function["name"], "arguments": dict(arguments)}
        shaped.append({"id": call.get("id") or f"call{index:05d}", "type": "function", "function": body})
    return shaped


def calls_text(calls: Sequence[Mapping[str, Any]]) -> str:
    r"""The calls as the model would write them.

    >>> calls_text([{"name": "add", "arguments": {"a": 1}}])
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    """
    bodies = [json.dumps(call["function"], ensure_ascii=False) for call in openai_calls(calls)]
    return "\n".join(f"{OPEN}\n{body}\n{CLOSE}" for body in bodies)


def parse_reply(text: str, *, thinking: bool = False) -> Parsed:
    r"""Read a sampled reply. ``thinking``: the prompt already opened ``<think>``.

    Reasoning is split off first: a call that is only considered inside it is not a call. One call that cannot
    be read makes the whole turn malformed: no call of the turn may run, and ``content`` keeps the full text.

    >>> parse_reply('ok\n<tool_call>{"name": "f", "arguments": {}}</tool_call>').tool_calls[0]["function"]
    {'name': 'f', 'arguments': {}}
    >>> parse_reply("3+4 makes 7.\n</think>\n\nSeven.", thinking=True)
    Parsed(content='Seven.', reasoning_content='3+4 makes 7.', tool_calls=(), malformed=None)
    """
    reasoning, closed, rest = _split_reasoning(text, thinking)
    if not closed:
        inside = OPEN in (reasoning or "")
        return Parsed("", reasoning, (), f"the tool call stands inside unclosed {THINK}" if inside else None)
    if OPEN not in rest and CLOSE not in rest:
        return Parsed(rest, reasoning)
    try:
        content, functions = _read_calls(rest)
    except _Malformed as error:
        return Parsed(rest, reasoning, (), str(error))
    # Nine letters and digits, different from turn to turn: some templates insist on the former.
    stem = f"{zlib.crc32(text.encode('utf-8', 'replace')):08x}"[:6]
    calls = [{"id": f"{stem}{i:03d}", "type": "function", "function": f} for i, f in enumerate(functions)]
    return Parsed(content, reasoning, tuple(calls))


def _split_reasoning(text: str, thinking: bool) -> tuple[str | None, bool, str]:
    """(reasoning, closed, the rest)."""
    opened = text.lstrip().startswith(THINK)
    if not (thinking or opened):
        return None, True, text
    inner = text.lstrip()[len(THINK) :] if opened else text
    reasoning, mark, rest = inner.partition(UNTHINK)
    return reasoning.strip("\n"), bool(mark), rest.lstrip("\n")


def _read_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Visible text, and the functions called in order."""
    visible: list[str] = []
    functions: list[dict[str, Any]] = []
    at = 0
    while (start := text.find(OPEN, at)) >= 0:
        visible.append(text[at:start])
        function, at = _read_call(text, start + len(OPEN), number=len(functions) + 1)
        functions.append(function)
    visible.append(text[at:])
    if any(CLOSE in piece for piece in visible):
        raise _Malformed(f"{CLOSE} without {OPEN}: write the JSON of a call between the two tags")
    return "\n".join(v for piece in visible if (v := piece.strip("\n"))), functions


def _read_call(text: str, start: int, number: int) -> tuple[dict[str, Any], int]:
    """One call whose JSON begins at ``start``; returns it and where the text goes on.

    The JSON decides where the call ends, not the next tag: an argument may quote the tag.
    """
    where = f"tool call {number}"
    start += len(text[start:]) - len(text[start:].lstrip())
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    try:
        function, end = decoder.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        if CLOSE not in text[start:]:
            raise _Malformed(f"{where} is unclosed: its JSON ends before {CLOSE}") from error
        detail = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise _Malformed(f"{where} is not valid JSON: {detail}") from error
    tail = text[end:].lstrip()
    if not tail.startswith(CLOSE):
        reason = "is unclosed:" if CLOSE not in tail else "has more than one JSON object:"
        raise _Malformed(f"{where} {reason} {CLOSE} must follow the JSON")
    return _checked(function, where), len(text) - len(tail) + len(CLOSE)


def _checked(function: Any, where: str) -> dict[str, Any]:
    name = function.get("name") if isinstance(function, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise _Malformed(f"{where}: its arguments are not valid JSON") from error
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise _Malformed(f'{where}: the JSON must be {{"name": "<function-name>", "arguments": {{…}}}}')
    return {"name": _whole(name), "arguments": _whole(arguments)}


def _whole(value: Any) -> Any:
    """JSON can escape half of a surrogate pair; no encoding has it, so a question mark stands for it."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_whole(k): _whole(v) for k, v in value.items()}
    return [_whole(v) for v in value] if isinstance(value, list) else value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
