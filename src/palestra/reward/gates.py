# SPDX-License-Identifier: Apache-2.0
"""Gates: a part of the reward counts only where another part passed.

The usual gate is accuracy: brevity or politeness of a wrong answer earns nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from palestra.errors import ConfigError, unknown
from palestra.types import RewardTerm


@dataclasses.dataclass(frozen=True, slots=True)
class Gate:
    """Open where the part ``part`` has a value of ``at_least`` or more, and counts itself."""

    part: str
    at_least: float = 1.0


def gated(terms: Mapping[str, RewardTerm], gates: Mapping[str, Gate]) -> dict[str, RewardTerm]:
    """The terms, those behind a closed gate with weight 0: what a part said stays visible, and counts nothing.

    A gate whose part has no value (None) is closed.

    >>> terms = {"accuracy": RewardTerm(0.0), "brief": RewardTerm(0.7, 0.5)}
    >>> gated(terms, {"brief": Gate("accuracy")})["brief"]
    RewardTerm(value=0.7, weight=0.0)
    """

    def counts(name: str) -> bool:
        gate = gates.get(name)
        if gate is None:
            return True
        term = terms.get(gate.part)
        return term is not None and term.value is not None and term.value >= gate.at_least and counts(gate.part)

    return {name: term if counts(name) else dataclasses.replace(term, weight=0.0) for name, term in terms.items()}


def check_gates(gates: Mapping[str, Gate], parts: Mapping[str, object], paid: Mapping[str, object]) -> None:
    """Refuses a gate on an unknown part, and gates that wait for one another.

    parts: the reward functions. paid: the parts that the environment pays and the config names.

    >>> check_gates({"brief": Gate("acuracy")}, {"accuracy": 1, "brief": 1}, {})
    Traceback (most recent call last):
    palestra.errors.ConfigError: rewards.brief.gate: unknown part 'acuracy': did you mean 'accuracy'? Known: ...
    """
    known = {*parts, *paid}
    for name, gate in gates.items():
        if gate.part not in known:
            raise ConfigError(
                f"rewards.{name}.gate: {unknown('part', gate.part, known)}. A part that the environment pays is "
                "known when it has an entry of its own, for example env: 1.0"
            )
        chain = [name]
        while (at := gates.get(chain[-1])) is not None:
            if at.part in chain:
                raise ConfigError(f"rewards.{name}.gate: a circle of gates, {' → '.join([*chain, at.part])}")
            chain.append(at.part)
