# SPDX-License-Identifier: Apache-2.0
"""One algorithm on the demo's problems, from the warm start that all of them begin with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from bench.ours.loop import trainer_of
from bench.peers.serve import Reply, timed
from palestra.train.config import RLConfig
from palestra.train.demo import demo_config
from palestra.train.rl import RLTrainer


def algorithm(
    model: str, seed: int, steps: int, algorithm: Mapping[str, Any], train: Mapping[str, Any]
) -> Callable[[dict[str, Any]], Reply]:
    """Whole steps until ``episodes`` were played since the start, those that were drawn and discarded among them; then,
    outside the clock, the greedy accuracy on ``held_out`` problems. steps: where the schedule ends. algorithm, train:
    those keys of the config, the latter over the demo's."""
    trainer = trainer_of(config_of(model, seed, steps, algorithm, train))
    played = 0

    def measure(request: dict[str, Any]) -> Reply:
        nonlocal played
        seconds, more = timed(lambda: asyncio.run(_play(trainer, request["episodes"] - played)))
        played += more
        result = asyncio.run(trainer.evaluate(request["held_out"], "held out"))
        assert result is not None
        found = {"accuracy": result["accuracy"], "episodes": played, "steps": trainer.steps_done}
        return {"seconds": seconds, **found}

    return measure


async def _play(trainer: RLTrainer, episodes: int) -> int:
    """At least so many episodes, in whole steps; how many it were."""
    played = 0
    while played < episodes:
        played += int((await trainer.step())["rollout/episodes"])
    return played


def config_of(model: str, seed: int, steps: int, algorithm: Mapping[str, Any], train: Mapping[str, Any]) -> RLConfig:
    """The demo's config, from the warm start instead of a warm-up of its own."""
    values = demo_config("unused", seed=seed, steps=steps).model_dump(mode="json", exclude_unset=True)
    values |= {"model": model, "warmup": None, "algorithm": dict(algorithm)}
    values["train"] = values["train"] | {"guard": "off", "dump_every": 0, "save_every": 0} | dict(train)
    return RLConfig.model_validate(values)
