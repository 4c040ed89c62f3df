# SPDX-License-Identifier: Apache-2.0
"""Plain Python functions as tools: hints and docstring become the schema, a call becomes an observation.

Whatever a call does (unknown name, wrong arguments, an exception, a result that is no text) ends as text for the
model. Only a mistake in the tool's *declaration* raises, when the tool is made.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, TypeVar, get_type_hints

import pydantic
from typing_extensions import TypedDict

from palestra.env.docstrings import describe
from palestra.env.results import cut, result_text
from palestra.env.threads import message_of, run_on_thread
from palestra.errors import ConfigError, unknown

F = TypeVar("F", bound=Callable[..., Any])
MAX_RESULT_CHARS = 4096
TIMEOUT_S = 10.0

_MARKED: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def tool(function: F) -> F:
    """Mark a public method of a :class:`~palestra.env.tool_env.ToolEnv` as a tool of its episodes. It may be a static
    or a class method, whichever of the two decorators comes first."""
    _MARKED.add(_plain(function))
    return function


def tool_methods(env: object) -> list[Callable[..., Any]]:
    """The bound methods of ``env`` that are marked :func:`tool`, in the order they were written."""
    marked: dict[str, None] = {}
    for cls in reversed(type(env).__mro__):
        for name, member in vars(cls).items():
            if inspect.isfunction(_plain(member)) and _plain(member) in _MARKED:
                marked[name] = None
    return [getattr(env, name) for name in marked]


def _plain(member: Any) -> Any:
    return member.__func__ if isinstance(member, staticmethod | classmethod) else member


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. ``schema``: OpenAI shape. ``stateful``: a method of an object, whose state
    may be half-changed after a timeout."""

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]
    arguments: pydantic.TypeAdapter[dict[str, Any]]
    stateful: bool

    @classmethod
    def of(cls, function: Callable[..., Any] | str) -> Tool:
        """From a function, a bound method, or a ``"module:function"`` path. Raises :class:`ConfigError` for one
        that cannot be described: a parameter without hint, ``*args``, ``**kwargs``, a hint without JSON form."""
        target = import_object(function) if isinstance(function, str) else function
        if not callable(target):
            raise ConfigError(f"tool {function!r} is not a function")
        name = getattr(target, "__name__", type(target).__name__)
        summary, described = describe(inspect.getdoc(target) or "")
        adapter = _arguments(target, name, described)
        parameters = _tidy(adapter.json_schema())
        body = {"name": name, "description": summary, "parameters": parameters}
        return cls(name, target, {"type": "function", "function": body}, adapter, inspect.ismethod(target))


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call came to. text: the observation. ran: the function was started. failed: the text tells of an
    error. fatal: why the environment cannot go on, or None."""

    text: str
    ran: bool = True
    failed: bool = False
    fatal: str | None = None


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a function, from its type hints and its docstring (Google, numpy, Sphinx or epydoc).

    A parameter with a default is not required. Raises :class:`ConfigError` as :meth:`Tool.of` does.

    >>> def add(a: int, b: int = 0) -> int:
    ...     '''Add two numbers.
    ...
    ...     Args:
    ...         a: the first
    ...     '''
    ...     return a + b
    >>> schema_of(add)["function"]["parameters"]["properties"]
    {'a': {'description': 'the first', 'type': 'integer'}, 'b': {'type': 'integer'}}
    """
    return dict(Tool.of(function).schema)


async def execute(
    call: Mapping[str, Any],
    tools: Mapping[str, Tool],
    timeout_s: float | None = TIMEOUT_S,
    max_result_chars: int = MAX_RESULT_CHARS,
) -> ToolResult:
    """Run one call (OpenAI shape, arguments a mapping) and tell how it went. Raises nothing but cancellation.

    >>> def add(a: float, b: float): return a + b
    >>> call = {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    >>> asyncio.run(execute(call, {"add": Tool.of(add)})).text
    '3.0'
    """
    function = call["function"]
    name = str(function["name"])
    if name not in tools:
        return ToolResult(cut(f"Error: {unknown('tool', name, tools)}", max_result_chars), ran=False, failed=True)
    item = tools[name]
    try:
        arguments = item.arguments.validate_json(json.dumps(function["arguments"]), strict=True)
    except pydantic.ValidationError as error:
        text = f"Error: {_wrong_arguments(item, error)}"
        return ToolResult(cut(text, max_result_chars), ran=False, failed=True)
    try:
        async with asyncio.timeout(timeout_s) as clock:
            text, failed = await _outcome(item.function, arguments)
    except TimeoutError:
        assert clock.expired(), "a tool's own TimeoutError is caught inside"
        said = f"tool {name} timed out after {timeout_s:g} s"
        return ToolResult(f"Error: {said}", failed=True, fatal=said if item.stateful else None)
    return ToolResult(cut(text, max_result_chars), failed=failed)


def import_object(path: str) -> Any:
    """What ``"module:name"`` points to. Raises :class:`ConfigError` that says which half is wrong."""
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{path!r} is not of the form 'module:name'")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{path!r}: cannot import {module_name!r}: {error}") from error
    if name not in vars(module):
        raise ConfigError(f"{path!r}: {unknown(f'name in {module_name}', name, vars(module))}")
    return vars(module)[name]


async def _outcome(function: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[str, bool]:
    """(text, failed). Awaits whatever is awaitable, so that no coroutine object is ever shown as a result."""
    try:
        if inspect.iscoroutinefunction(function):
            value = await function(**arguments)
        else:
            value = await run_on_thread(lambda: function(**arguments))
            if isinstance(value, Awaitable):
                value = await value
        return result_text(value), False
    # SystemExit: a tool that calls sys.exit() ends its call, not the run.
    except (Exception, SystemExit) as error:
        return f"Error: {type(error).__name__}: {message_of(error)}", True


def _arguments(function: Callable[..., Any], name: str, described: Mapping[str, str]) -> Any:
    """A validator of the function's arguments; it gives their schema too."""
    try:
        hints = get_type_hints(inspect.unwrap(getattr(function, "__func__", function)), include_extras=True)
        parameters = inspect.signature(function).parameters
    except (NameError, TypeError, ValueError) as error:
        raise ConfigError(f"tool {name}: its signature cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"tool {name}: parameter {parameter} cannot be given by name; use plain parameters")
        if parameter.name not in hints:
            raise ConfigError(f"tool {name}: parameter {parameter.name!r} has no type hint; add one")
        hint = hints[parameter.name]
        if text := described.get(parameter.name):
            hint = Annotated[hint, pydantic.Field(description=text)]
        fields[parameter.name] = hint if parameter.default is parameter.empty else NotRequired[hint]
    # A TypedDict rather than a model: a parameter may be called ``json``, ``copy`` or ``_x``.
    make: Any = TypedDict
    shape = pydantic.with_config(extra="forbid")(make(name, fields))
    try:
        adapter = pydantic.TypeAdapter(shape)
        adapter.json_schema()
    except (pydantic.errors.PydanticUserError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"tool {name}: a parameter's type hint has no JSON form: {reason}") from error
    return adapter


def _tidy(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Without pydantic's titles and its ``additionalProperties: false``, which only cost tokens."""

    def clean(value: Any, *, names: bool = False) -> Any:
        if isinstance(value, Mapping):
            closed = {"additionalProperties"} if value.get("additionalProperties") is False else set()
            kept = {k: v for k, v in value.items() if names or k not in closed | {"title"}}
            return {k: clean(v, names=k in ("properties", "$defs") and not names) for k, v in kept.items()}
        return [clean(v) for v in value] if isinstance(value, Sequence) and not isinstance(value, str) else value

    tidy: dict[str, Any] = clean(schema)
    return {"type": "object", **tidy}


def _wrong_arguments(item: Tool, error: pydantic.ValidationError) -> str:
    said = {"missing": "missing argument {0!r}", "extra_forbidden": "unknown argument {0!r}"}
    problems = []
    for problem in error.errors(include_url=False):
        where = ".".join(str(p) for p in problem["loc"]) or "arguments"
        other = f"argument {where!r}: {problem['msg'][:1].lower()}{problem['msg'][1:]}, got {problem['input']!r}"
        problems.append(said.get(problem["type"], "").format(where) or other)
    known = ", ".join(item.schema["function"]["parameters"].get("properties", {})) or "no arguments"
    return f"{item.name}: {'; '.join(problems)}. It takes: {known}"
