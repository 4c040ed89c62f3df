# SPDX-License-Identifier: Apache-2.0
"""How episodes sample so that a run repeats: as they come where a row's bits are its own, elsewhere in rounds."""

from __future__ import annotations

from palestra.engine.base import Engine
from palestra.engine.local import LocalEngine
from palestra.engine.rounds import Rounds
from palestra.errors import ConfigError
from palestra.train.config import RLConfig

UNREPEATABLE = (
    "decoding depends on the batch here: this run will not repeat bit for bit; train.deterministic=true samples on a "
    "fixed schedule, which is slower"
)


def sampler(config: RLConfig, engine: Engine, *, batch_invariant: bool) -> tuple[Engine, str | None]:
    """The engine that episodes sample from, and what is to be said about it. Raises ConfigError where a fixed schedule
    is wanted and the episodes do not all run at once: when the next one begins would be up to the clock."""
    if batch_invariant:
        return engine, None
    if not config.train.deterministic:
        return engine, UNREPEATABLE
    step = config.train.tasks_per_step * config.algorithm.group_size
    together = max(step, config.eval.size, config.eval.curve_size if config.eval.every else 0)
    if config.train.concurrency < together:
        raise ConfigError(
            f"train.deterministic=true needs the {together} episodes of a step or an evaluation at once, and "
            f"train.concurrency is {config.train.concurrency}; set train.concurrency={together}"
        )
    if isinstance(engine, LocalEngine):
        engine.stop_guessing()
    return Rounds(engine), "decoding depends on the batch here: sampling goes in rounds, so that the run repeats"


__all__ = ["UNREPEATABLE", "sampler"]
