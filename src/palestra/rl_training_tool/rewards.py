# SPDX-License-Identifier: Apache-2.0
"""From ``reward_type`` and ``reward_config`` to the ``rewards:`` of a config, and users' own functions by name."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from palestra.errors import ConfigError, unknown
from palestra.reward.base import FACTORIES, REWARDS, RewardFunction
from palestra.reward.functions import Completion, final_texts, replies
from palestra.types import Trajectory

Parts = dict[str, Any]
TYPES = ("accuracy", "length_penalty", "step", "combined", "format")
OPTIONS = {
    "length_penalty": {"target_length": "target", "max_length": "target", "penalty_weight": "alpha"},
    "step": {"step_bonus": "beta"},
    "combined": {"target_length": "target", "max_length": "target", "penalty_weight": "alpha", "step_bonus": "beta"},
}
"""Type → other names of options → ours."""
TEMPLATE = {"accuracy_weight": 1.0, "length_weight": 0.5, "step_weight": 0.3, "target": 200, "beta": 0.1}
"""``combined`` where nothing more is said."""
_INCREMENTS = {"accuracy": "accuracy_weight", "length_penalty": "length_weight", "step": "step_weight"}
_MARKED = re.compile(r"####|final answer\s*:|\\boxed\s*\{|the answer is|答案", re.IGNORECASE)

_functions: dict[str, Callable[..., Any]] = {}
_serial = itertools.count()


@REWARDS.register("marked_answer")
def marked_answer(
    completions: Sequence[Completion], trajectories: Sequence[Trajectory] | None = None, **_: Any
) -> list[float | None]:
    """1.0 when the reply says which number is its answer: ``#### 72``, ``Final Answer: 72``, a box, "the answer is".

    >>> marked_answer(["Step 1: 48+24\\nFinal Answer: 72", "it may be 72"])
    [1.0, 0.0]
    """
    return [float(_MARKED.search(text) is not None) for text in final_texts(completions, trajectories)]


def keep(function: Callable[..., Any]) -> str:
    """File a user's function under a key that a config can name."""
    if not callable(function):
        raise ConfigError(f"a reward is a function of completions, not a {type(function).__name__}")
    key = f"{getattr(function, '__name__', 'reward')}-{next(_serial)}"
    _functions[key] = function
    return key


@FACTORIES.register("user_function")
def user_function(key: str) -> RewardFunction:
    """A function that was handed over as an object: called as ``f(completions, **columns)`` with texts."""
    if key not in _functions:
        raise ConfigError(f"reward {key!r} was a function in the process that trained; hand it over again")
    function = _functions[key]
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters}

    def reward(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> Any:
        given = {"prompts": [_text(p) for p in prompts], "completions": [replies(c) for c in completions], **columns}
        return function(**{k: v for k, v in given.items() if takes_all or k in names})

    return reward


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "")


def reward_parts(kind: str, given: Mapping[str, Any] | None, own: Mapping[str, str]) -> Parts:
    """The parts of a rubric. own: users' functions, name → key. ``accuracy`` and ``format`` (a marked answer)
    are always there, at least to be watched (weight 0).

    >>> reward_parts("step", {"step_bonus": 0.2}, {})["step"]
    {'weight': 1.0, 'beta': 0.2}
    >>> reward_parts("accuracy", {}, {})
    {'accuracy': {'weight': 1.0}, 'format': {'function': 'marked_answer', 'weight': 0.0}}
    """
    options = dict(given or {})
    components = options.pop("components", None)
    if components is not None:
        if kind != "combined" or options:
            stray = f"option {min(options)!r}" if options else f"reward_type {kind!r}"
            raise ConfigError(f"reward_config: components make up a combined reward; {stray} does not go with them")
        parts = _combined(components, own)
    else:
        weight = options.pop("weight", 1.0)
        usual = TEMPLATE if kind == "combined" else {}
        parts = {kind: usual | _part(kind, options, own, weight)}
    watched = {"accuracy": {"weight": 0.0}} if "accuracy" not in parts else {}
    form = {"format": {"function": "marked_answer", "weight": 0.0}} if "format" not in parts else {}
    return parts | watched | form


def _part(kind: str, options: Mapping[str, Any], own: Mapping[str, str], weight: Any) -> dict[str, Any]:
    if kind in own:
        if options:
            raise ConfigError(f"reward {kind!r} is a function of yours and takes no option {min(options)!r}")
        return {"function": "user_function", "key": own[kind], "weight": weight}
    if kind not in FACTORIES and kind not in REWARDS:
        raise ConfigError(unknown("reward_type", kind, {*TYPES, *own, *REWARDS, *FACTORIES} - {"user_function"}))
    if kind == "format":
        if options:
            raise ConfigError(f"reward format takes no option {min(options)!r}")
        return {"function": "marked_answer", "weight": weight}
    ours = OPTIONS.get(kind, {})
    named: dict[str, str] = {}
    for name in options:
        if (same := named.setdefault(ours.get(name, name), name)) != name:
            raise ConfigError(f"reward_config: {same} and {name} are one option of {kind}; give one of them")
    return {"weight": weight, **{ours.get(name, name): value for name, value in options.items()}}


def _combined(components: Any, own: Mapping[str, str]) -> Parts:
    """Components as parts: the three increments are one reward, since length and steps count only on right answers."""
    if not isinstance(components, list | tuple) or not all(isinstance(c, Mapping) and "type" in c for c in components):
        raise ConfigError("reward_config.components: give a list of {type, weight, …}")
    joined: dict[str, Any] = dict.fromkeys(_INCREMENTS.values(), 0.0)
    parts: Parts = {}
    seen: list[str] = []
    for component in components:
        options = dict(component)
        kind, weight = str(options.pop("type")), options.pop("weight", 1.0)
        if kind in seen:
            raise ConfigError(f"reward_config.components has {kind!r} twice; give one weight")
        seen.append(kind)
        if kind in _INCREMENTS and kind not in own:
            joined[_INCREMENTS[kind]] = weight
            joined |= {k: v for k, v in _part(kind, options, {}, 0).items() if k != "weight"}
        else:
            parts[kind] = _part(kind, options, own, weight)
    together = {"combined": {"weight": 1.0, **joined}} if {*seen} & {*_INCREMENTS} else {}
    return together | parts
