# SPDX-License-Identifier: Apache-2.0
"""Names → things. One small class, so that every room registers and looks up in the same words."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, get_type_hints

import pydantic

from palestra.errors import ConfigError, unknown

T = TypeVar("T")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Registry(Generic[T]):
    """A table of named things that refuses unknown names with the nearest right one.

    >>> ops: Registry[object] = Registry("op")
    >>> @ops.register("add")
    ... def add(a, b): return a + b
    >>> ops["add"] is add
    True
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files the thing under ``name``; a second, different thing of that name is refused."""

        def add(item: T) -> T:
            held = self._items.get(name)
            if held is not None and getattr(held, "__qualname__", held) != getattr(item, "__qualname__", item):
                raise ConfigError(f"{self.kind} {name!r} is already registered; choose another name")
            self._items[name] = item
            return item

        return add

    def __getitem__(self, name: str) -> T:
        if name not in self._items:
            raise ConfigError(unknown(self.kind, name, self._items))
        return self._items[name]

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._items))


def check_options(
    owner: str, factory: Callable[..., Any], options: Mapping[str, Any], given: Sequence[str] = ()
) -> None:
    """Refuse an option of a config that the factory does not take (with the nearest right one), that is missing, or
    whose value is not of the type that the factory's annotation names.

    Checked by JSON's rules without conversions: a list fits a tuple, a whole number a float, a text no number. Left
    alone is what has no annotation that can be read, and what is no plain data, such as a function given in code.
    given: parameters of the factory that are not the config's.

    >>> def scaled(factor: float = 1.0): ...
    >>> check_options("env 'scaled'", scaled, {"factor": "two"})
    Traceback (most recent call last):
    palestra.errors.ConfigError: env 'scaled': option factor = 'two': should be a valid number
    """
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some built-in types
        raise ConfigError(f"{owner}: its parameters cannot be read; give a plain function or class") from None
    known = [name for name, p in parameters.items() if p.kind not in _VARIADIC and name not in given]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if not takes_any and (strange := next((option for option in options if option not in known), None)) is not None:
        raise ConfigError(f"{owner}: {unknown('option', strange, known)}")
    for name, parameter in parameters.items():
        needed = parameter.default is parameter.empty and parameter.kind not in _VARIADIC
        if needed and name not in (*options, *given):
            raise ConfigError(f"{owner} needs the option {name!r}")
    try:
        hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    except (NameError, TypeError, AttributeError):  # names that only a type checker imports
        return
    for option, value in options.items():
        try:
            adapter = pydantic.TypeAdapter(hints[option], config={"arbitrary_types_allowed": True})
            adapter.validate_json(json.dumps(value), strict=True)
        except pydantic.ValidationError as error:
            reasons = dict.fromkeys(e["msg"].replace("Input should", "should") for e in error.errors())
            shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
            raise ConfigError(f"{owner}: option {option} = {shown}: {' or '.join(reasons)}") from None
        except (KeyError, TypeError, ValueError, pydantic.errors.PydanticUserError):
            continue
