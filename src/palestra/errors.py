# SPDX-License-Identifier: Apache-2.0
"""Errors a user meets, as a tree.

    PalestraError
    ├── UserError          a mistake in what was asked: one line, exit code 2
    │   ├── ConfigError    a config file or override
    │   ├── DataError      a data file or row
    │   └── ModelError     a model or tokenizer that cannot be used
    ├── RewardError        a reward function broke its contract
    ├── EngineError        the engine cannot go on
    └── RunError           a run directory that cannot be used

Events inside an episode (a tool that raises, a malformed call) are not errors: they are observations.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PalestraError(Exception):
    """Base of everything this library raises on purpose."""


class UserError(PalestraError, ValueError):
    """What was asked cannot be done: the message says what, where, and what to do instead."""


class ConfigError(UserError):
    """A configuration that cannot be used."""


class DataError(UserError):
    """A data set or row that cannot be used; the message names file and line."""


class ModelError(UserError):
    """A model or tokenizer that cannot be used."""


class RunError(UserError):
    """A run directory that cannot be used."""


class RewardError(UserError):
    """A reward function returned something other than one finite number or None per completion."""


class EngineError(PalestraError):
    """The engine cannot go on."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """One line for a name that is not registered, with the nearest known one.

    >>> unknown("env", "serach", ["math", "search"])
    "unknown env 'serach': did you mean 'search'? Known: math, search"
    """
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)  # a config may give a number
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {kind} {name!r}: {hint}Known: {', '.join(known) or 'none'}"
