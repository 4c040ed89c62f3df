# SPDX-License-Identifier: Apache-2.0
"""From the ``rewards:`` of a config to a :class:`~palestra.reward.rubric.Rubric`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from palestra.errors import ConfigError, UserError, unknown
from palestra.registry import check_options
from palestra.reward.base import FACTORIES, PENALTIES, REWARDS, RewardFunction
from palestra.reward.gates import Gate
from palestra.reward.rubric import Rubric
from palestra.reward.worker import TIMEOUT_S

if TYPE_CHECKING:
    from palestra.model.loading import LoadedModel

Entry = float | Mapping[str, Any]


def make_rubric(
    rewards: Mapping[str, Entry] | None,
    *,
    chat: bool,
    functions: Mapping[str, RewardFunction] | None = None,
    on_error: str = "exclude",
    policy: LoadedModel | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Rubric:
    """The rubric that a config describes.

    rewards: name → weight, or name → ``{weight, function, gate, **options}``. A name is one of ``functions``, a
    registered reward, or ``module:function``; ``function`` gives it when the part has a name of its own, and
    options go to the registered factory. ``gate`` names the part that must have passed (reached 1.0, or
    ``{part, at_least}``) for this one to count. ``env`` (and ``env/part``) weigh what the environment itself
    pays. None: only what the environment pays. policy: the model in training, for rewards that measure with it.
    timeout_s: of one call of a function.

    >>> short = {"function": "length_penalty", "weight": 0.1, "target": 50}
    >>> rubric = make_rubric({"accuracy": 1.0, "short": short}, chat=True)
    >>> [(name, weight) for name, (_, weight) in rubric.functions.items()]
    [('accuracy', 1.0), ('short', 0.1)]
    """
    chosen: dict[str, tuple[RewardFunction, float]] = {}
    env_weights: dict[str, float] = {}
    gates: dict[str, Gate] = {}
    for name, entry in (rewards or {}).items():
        options = dict(entry) if isinstance(entry, Mapping) else {"weight": entry}
        weight = _weight(name, options.pop("weight", 1.0))
        part = name.removeprefix("env/")
        if (gate := options.pop("gate", None)) is not None:
            gates[part] = _gate(name, gate)
        if name == "env" or name.startswith("env/"):
            if options:
                raise ConfigError(
                    f"rewards.{name}: what the environment pays has a weight and no option {min(map(str, options))!r}"
                )
            env_weights[part] = weight
            continue
        reference = str(options.pop("function", name))
        if reference in PENALTIES and weight > 0:
            raise ConfigError(f"rewards.{name}: {reference!r} says how bad a reply is: give it a negative weight")
        chosen[name] = (_function(name, reference, options, functions or {}, policy), weight)
    return Rubric(chosen, chat=chat, on_error=on_error, env_weights=env_weights, gates=gates, timeout_s=timeout_s)


def weighted(
    functions: Sequence[RewardFunction], weights: Sequence[float] | None = None
) -> dict[str, tuple[RewardFunction, float]]:
    """TRL's two lists, ``reward_funcs`` and ``reward_weights``, as the mapping that a rubric takes.

    >>> def a(completions): ...
    >>> def b(completions): ...
    >>> list(weighted([a, b], [1.0]))
    Traceback (most recent call last):
    palestra.errors.ConfigError: 1 reward weights for 2 reward functions: give one weight for each
    """
    given = [1.0] * len(functions) if weights is None else list(weights)
    if len(given) != len(functions):
        raise ConfigError(
            f"{len(given)} reward weights for {len(functions)} reward functions: give one weight for each"
        )
    named: dict[str, tuple[RewardFunction, float]] = {}
    for function, weight in zip(functions, given, strict=True):
        name = str(getattr(function, "__name__", type(function).__name__))
        if name in named:
            raise ConfigError(f"two reward functions are named {name!r}: give them names of their own, as a mapping")
        named[name] = (function, _weight(name, weight))
    return named


def _weight(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise ConfigError(f"rewards.{name}: give one finite number, got {value!r}")
    return float(value)


def _gate(name: str, value: object) -> Gate:
    given = {"part": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping) or not isinstance(given.get("part"), str) or {*given} - {"part", "at_least"}:
        raise ConfigError(f"rewards.{name}.gate: name a part, or write {{part: NAME, at_least: 0.5}}; got {value!r}")
    at_least = _weight(f"{name}.gate.at_least", given.get("at_least", 1.0))
    return Gate(str(given["part"]).removeprefix("env/"), at_least)


def _function(
    name: str,
    reference: str,
    options: Mapping[str, Any],
    given: Mapping[str, RewardFunction],
    policy: LoadedModel | None,
) -> RewardFunction:
    if options:
        return _made(name, reference, options, policy)
    if reference in given:
        return given[reference]
    if reference in REWARDS:
        return REWARDS[reference]
    if reference in FACTORIES:
        return _made(name, reference, options, policy)
    if ":" in reference:
        return imported(name, reference)
    known = {*REWARDS, *FACTORIES, *given, "env"}
    raise ConfigError(f"{unknown('reward', reference, known)}; or write it as module:function")


def _made(name: str, reference: str, options: Mapping[str, Any], policy: LoadedModel | None) -> RewardFunction:
    if reference not in FACTORIES:
        raise ConfigError(f"rewards.{name}: {reference!r} takes no option {min(map(str, options))!r}")
    factory = FACTORIES[reference]
    shown = {"policy": policy} if "policy" in inspect.signature(factory).parameters else {}
    check_options(f"rewards.{name}: {reference!r}", factory, options, ("policy",))
    return factory(**options, **shown)


def imported(name: str, reference: str) -> Callable[..., Any]:
    """The function that ``module:function`` names; ``name`` is the part of the config that names it.

    >>> imported("judge", "math:sqrt")(9)
    3.0
    """
    module, _, attribute = reference.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except UserError:
        raise
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"rewards.{name}: cannot load {reference!r}: {error}") from error
    if not callable(found):
        raise ConfigError(f"rewards.{name}: {reference!r} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]
