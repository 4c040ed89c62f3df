# SPDX-License-Identifier: Apache-2.0
"""Names → things. One small class, so that every room registers and looks up in the same words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from palestra.errors import ConfigError, unknown

T = TypeVar("T")


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
