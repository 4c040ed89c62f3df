# SPDX-License-Identifier: Apache-2.0
"""What a sweep varies, and which values come next: grid, random, or TPE through Optuna."""

from __future__ import annotations

import importlib
import itertools
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import pydantic

from palestra.config import Config
from palestra.errors import ConfigError

Method = Literal["grid", "random", "tpe"]
TRIALS = {"random": 10, "tpe": 20}
"""Trials of a method that has no end of its own."""


class Axis(Config):
    """The values of one key: ``choices``, or numbers from ``low`` to ``high``, log-uniform with ``log``, whole ones
    with ``integer``. A plain list stands for choices.

    >>> Axis.model_validate([8, 16, 32]).ends, str(Axis(low=1e-6, high=1e-4, log=True))
    ((8, 16, 32), '1e-06 … 0.0001, log-uniform')
    """

    choices: tuple[Any, ...] | None = None
    low: float | None = None
    high: float | None = None
    log: bool = False
    integer: bool = False

    @pydantic.model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        return {"choices": value} if isinstance(value, list | tuple) else value

    @pydantic.model_validator(mode="after")
    def _check(self) -> Axis:
        if (self.choices is None) == (self.low is None or self.high is None):
            raise ConfigError("an axis has a list of values, or both low and high")
        if self.choices is not None and (not self.choices or self.log or self.integer or self.low is not None):
            raise ConfigError("an axis with a list of values needs at least one, and no low, high, log or integer")
        if self.low is not None and self.high is not None and not (0 if self.log else -math.inf) < self.low < self.high:
            raise ConfigError(f"an axis from {self.low:g} to {self.high:g}: low is below high, and above 0 with log")
        return self

    @property
    def ends(self) -> tuple[Any, ...]:
        """The values between which every drawn one lies."""
        if self.choices is not None:
            return self.choices
        return tuple(int(v) if self.integer else v for v in (self.low, self.high) if v is not None)

    def draw(self, rng: random.Random) -> Any:
        """A value of a random search."""
        if self.choices is not None:
            return rng.choice(self.choices)
        low, high = float(self.low or 0.0), float(self.high or 0.0)
        if self.integer and not self.log:
            return rng.randint(int(low), int(high))
        value = math.exp(rng.uniform(math.log(low), math.log(high))) if self.log else rng.uniform(low, high)
        return round(value) if self.integer else value

    def __str__(self) -> str:
        if self.choices is not None:
            return ", ".join(map(str, self.choices))
        kind = f"{'log-' if self.log else ''}uniform{' integers' if self.integer else ''}"
        return f"{self.low:g} … {self.high:g}, {kind}"


def _spaces(rate: str, batch: str, kl: str | None) -> dict[Method, dict[str, Axis]]:
    grid = {rate: Axis(choices=(1e-5, 5e-5, 1e-4)), "lora.r": Axis(choices=(8, 16, 32))}
    wide = {rate: Axis(low=1e-6, high=1e-4, log=True), "lora.r": Axis(choices=(4, 8, 16, 32, 64))}
    if kl is not None:
        grid[kl] = Axis(choices=(0.05, 0.1, 0.2))
        wide[kl] = Axis(low=0.01, high=0.5)
    wide[batch] = Axis(choices=(2, 4, 8))
    return {"grid": grid, "random": wide, "tpe": wide}


SPACES: dict[tuple[str, Method], dict[str, Axis]] = {
    (verb, method): space
    for verb, names in {
        "rl": ("train.learning_rate", "train.tasks_per_step", "algorithm.kl_coef"),
        "sft": ("sft.learning_rate", "sft.batch_size", None),
        "prefer": ("prefer.learning_rate", "prefer.batch_size", "prefer.loss.beta"),
        "reward-model": ("reward_model.learning_rate", "reward_model.batch_size", None),
    }.items()
    for method, space in _spaces(*names).items()
}
"""(verb, method) → the usual space: learning rate, rank, KL, batch; 27 points as a grid."""


class Sampler(Protocol):
    """Where a trial's values come from, and what it hears back."""

    def params(self, number: int) -> dict[str, Any]: ...

    def report(self, number: int, step: int, value: float) -> None: ...

    def tell(self, number: int, value: float | None, status: str) -> None: ...


class _Unmoved:
    """A sampler that learns nothing from results."""

    def report(self, number: int, step: int, value: float) -> None:
        pass

    def tell(self, number: int, value: float | None, status: str) -> None:
        pass


class Grid(_Unmoved):
    """Every combination, the last key fastest.

    >>> grid = Grid({"a": Axis(choices=(1, 2)), "b": Axis(choices=("x", "y"))})
    >>> [grid.params(n) for n in (0, 1, 2)]
    [{'a': 1, 'b': 'x'}, {'a': 1, 'b': 'y'}, {'a': 2, 'b': 'x'}]
    """

    def __init__(self, axes: Mapping[str, Axis]) -> None:
        self._points = list(itertools.product(*(axis.choices or () for axis in axes.values())))
        self._names = list(axes)

    def params(self, number: int) -> dict[str, Any]:
        return dict(zip(self._names, self._points[number], strict=True))


class Random(_Unmoved):
    """Independent draws; trial n's depend on (seed, n) alone."""

    def __init__(self, axes: Mapping[str, Axis], seed: int) -> None:
        self._axes, self._seed = axes, seed

    def params(self, number: int) -> dict[str, Any]:
        rng = random.Random(f"sweep/{self._seed}/{number}")
        return {name: axis.draw(rng) for name, axis in self._axes.items()}


class TPE:
    """Tree-structured Parzen estimator (Bergstra et al. 2011), by Optuna, whose SQLite study is the memory."""

    def __init__(self, axes: Mapping[str, Axis], seed: int, out: Path, *, larger: bool) -> None:
        try:
            optuna: Any = importlib.import_module("optuna")
        except ImportError as error:
            raise ConfigError(
                "method tpe needs the package optuna: pip install 'palestra[optuna]', or choose method=random"
            ) from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._axes = optuna, axes
        storage = f"sqlite:///{(out / 'study.db').resolve()}"
        self._study: Any = optuna.create_study(
            study_name="palestra",
            storage=storage,
            load_if_exists=True,
            direction="maximize" if larger else "minimize",
        )
        # Values of trials that still run count as bad, so that parallel workers do not draw the same point. The seed
        # moves on with the study: a sweep that is taken up again must not draw what it has drawn.
        known = len(self._study.trials)
        sampler = optuna.samplers.TPESampler(seed=seed * 1_000_003 + known, constant_liar=True)
        self._study.sampler = sampler

    def params(self, number: int) -> dict[str, Any]:
        trials = self._study.trials
        # Asked for, but not written down before a kill.
        found = trials[number] if number < len(trials) else self._study.ask(self._distributions())
        return {name: found.params[name] for name in self._axes}

    def report(self, number: int, step: int, value: float) -> None:
        self._trial(number).report(value, step)

    def tell(self, number: int, value: float | None, status: str) -> None:
        states = self._optuna.trial.TrialState
        if status == "done":
            self._study.tell(number, value, skip_if_finished=True)
        else:
            state = states.PRUNED if status == "pruned" else states.FAIL
            self._study.tell(number, state=state, skip_if_finished=True)

    def _trial(self, number: int) -> Any:
        frozen = self._study.trials[number]
        return self._optuna.trial.Trial(self._study, frozen._trial_id)

    def _distributions(self) -> dict[str, Any]:
        of = self._optuna.distributions
        found = {}
        for name, axis in self._axes.items():
            if axis.choices is not None:
                found[name] = of.CategoricalDistribution(axis.choices)
            elif axis.integer:
                found[name] = of.IntDistribution(*axis.ends, log=axis.log)
            else:
                found[name] = of.FloatDistribution(*axis.ends, log=axis.log)
        return found


def make_sampler(method: Method, axes: Mapping[str, Axis], seed: int, out: Path, *, larger: bool) -> Sampler:
    """The sampler of a method. larger: whether more of the metric is better."""
    if method == "grid":
        return Grid(axes)
    return Random(axes, seed) if method == "random" else TPE(axes, seed, out, larger=larger)
