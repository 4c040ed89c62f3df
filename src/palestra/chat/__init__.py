# SPDX-License-Identifier: Apache-2.0
"""Messages ⇄ tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from palestra.chat.base import Parsed, Rendered, Renderer, spans_of
from palestra.chat.plain import PlainRenderer, PromptWarning
from palestra.chat.template import ChatTemplateRenderer
from palestra.registry import Registry, check_options

RENDERERS: Registry[Callable[..., Renderer]] = Registry("renderer")
"""Renderers by name; each takes a tokenizer and its options as keywords."""
RENDERERS.register("plain")(PlainRenderer)
RENDERERS.register("chat")(ChatTemplateRenderer)


def make_renderer(name: str, tokenizer: Any, **options: Any) -> Renderer:
    """The renderer of that name. Unknown names and options raise :class:`ConfigError` with the nearest right one.

    >>> make_renderer("plian", None)
    Traceback (most recent call last):
    palestra.errors.ConfigError: unknown renderer 'plian': did you mean 'plain'? Known: chat, plain
    """
    make = RENDERERS[name]
    check_options(f"renderer {name!r}", make, options, ("tokenizer",))
    return make(tokenizer, **options)


__all__ = [
    "RENDERERS",
    "ChatTemplateRenderer",
    "Parsed",
    "PlainRenderer",
    "PromptWarning",
    "Rendered",
    "Renderer",
    "make_renderer",
    "spans_of",
]
