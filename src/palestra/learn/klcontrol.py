# SPDX-License-Identifier: Apache-2.0
"""A KL coefficient that follows the KL it causes."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import pydantic
from pydantic import Field

from palestra.config import Config


class KLControlConfig(Config):
    """How the KL coefficient follows the measured KL per token.

    kind: ``steps`` multiplies the coefficient by a factor above a band around the target and divides it below;
    ``proportional`` changes it with the relative error (Ziegler et al., arXiv:1909.08593, section 2.2). target: KL per
    token, in nats. factor: of one of the ``steps``. band: within target / band to target · band, ``steps`` change
    nothing. gain: of ``proportional``, times the relative error, which counts up to a fifth. lowest, highest: what
    the coefficient stays between; a KL of 0, as before the first update, would drive it to 0 for good.
    """

    shorthand: ClassVar[str | None] = "kind"
    kind: Literal["steps", "proportional"] = "steps"
    target: float = Field(default=0.1, gt=0)
    factor: float = Field(default=1.5, gt=1)
    band: float = Field(default=1.5, ge=1)
    gain: float = Field(default=0.1, gt=0, lt=5)
    lowest: float = Field(default=1e-4, gt=0)
    highest: float = Field(default=1.0, gt=0)

    @pydantic.model_validator(mode="after")
    def _check(self) -> KLControlConfig:
        if self.lowest > self.highest:
            raise ValueError(f"kl_control.lowest is {self.lowest:g}, above kl_control.highest, {self.highest:g}")
        return self


MAX_ERROR = 0.2
"""Relative errors beyond this count as this: one wild step must not change the coefficient many times over."""


class KLController:
    """The coefficient of a run. ``coef`` is what the next step uses.

    >>> control = KLController(KLControlConfig(), 0.2)
    >>> control.update(0.16), control.update(0.12), control.update(0.01)
    (0.3..., 0.3..., 0.2...)
    """

    def __init__(self, config: KLControlConfig, coef: float) -> None:
        self.config = config
        self.coef = self._within(coef)

    def update(self, kl: float | None) -> float:
        """Take in a step's mean KL per token; returns the coefficient of the next. A step that measured none (None or
        not finite) changes nothing."""
        if kl is not None and math.isfinite(kl):
            self.coef = self._within(self.coef * self._change(kl))
        return self.coef

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint needs."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = float(state["coef"])

    def _change(self, kl: float) -> float:
        config = self.config
        if config.kind == "proportional":
            error = (kl - config.target) / config.target
            return 1 + config.gain * max(-MAX_ERROR, min(MAX_ERROR, error))
        if kl > config.target * config.band:
            return config.factor
        return 1 / config.factor if kl < config.target / config.band else 1.0

    def _within(self, coef: float) -> float:
        return min(self.config.highest, max(self.config.lowest, coef))
