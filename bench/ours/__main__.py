# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.ours``: what the configuration's ``work`` names, as a measuring process."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from bench.peers.serve import Channel, Reply, serve
from palestra.errors import ConfigError, unknown

WORKS = {
    "ceilings": "bench.ours.ceilings",
    "sampling": "bench.ours.sampling",
    "episodes": "bench.ours.loop",
    "step": "bench.ours.loop",
    "update": "bench.ours.update",
    "growth": "bench.ours.update",
    "sft": "bench.ours.supervised",
    "dpo": "bench.ours.supervised",
    "warm_start": "bench.ours.learning",
    "learning": "bench.ours.learning",
    "algorithm": "bench.ours.algorithms",
}
"""What can be asked for, and the module whose function of that name prepares it."""


def prepare(channel: Channel) -> Callable[[dict[str, Any]], Reply]:
    """Set the threads, then load what the configuration asks for."""
    import torch

    work = channel.config.pop("work")
    if work not in WORKS:
        raise ConfigError(unknown("work", work, WORKS))
    torch.set_num_threads(channel.config.pop("threads"))
    made: Callable[[dict[str, Any]], Reply] = getattr(import_module(WORKS[work]), work)(**channel.config)
    return made


if __name__ == "__main__":
    serve(prepare, ["palestra", "torch", "transformers", "numpy"])
