# SPDX-License-Identifier: Apache-2.0
"""Keys of a common beginning are read in the slot they were copied from, for as long as that slot still holds them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from small_models import make_model

from palestra.engine.base import SamplingParams
from palestra.engine.local import EngineConfig, LocalEngine
from palestra.engine.rows import Rows
from palestra.engine.scheduler import Schedule


class Watched(LocalEngine):
    """An engine that looks at its store before every pass."""

    def __init__(self, *of: Any, **more: Any) -> None:
        super().__init__(*of, **more)
        self.shared = 0

    def _forward(self, schedule: Schedule) -> torch.Tensor:
        logits = super()._forward(schedule)
        rows = Rows(schedule, torch.device("cpu"))
        for slot, origin, count in zip(
            rows.slot.tolist(), rows.prefix_slot.tolist(), rows.prefix.tolist(), strict=True
        ):
            self.shared += count
            for table in (*self._store.keys.values(), *self._store.values.values()):
                assert torch.equal(table[slot, :, :count], table[origin, :, :count])
        return logits


@pytest.mark.parametrize("on_update", ["finish", "recompute", "keep"])
@pytest.mark.parametrize("sessions", [6, 32])
def test_where_a_prefix_is_read_stands_what_was_copied(on_update: Any, sessions: int) -> None:
    """Groups with a system prompt in common, several turns, sessions that are released, pushed out and begun anew,
    weights that change while some of it goes on."""
    model = make_model("qwen3")
    config = EngineConfig(max_rows=6, max_sessions=sessions, on_update=on_update)
    engine = Watched(model, lambda ids: "", config)
    rng = np.random.default_rng(0)
    system = rng.integers(3, 61, 40).astype(np.int32)

    async def episode(group: int, member: int) -> None:
        prompt = np.concatenate([system, np.full(9, 3 + group, np.int32)])
        for turn in range(3):
            sampling = SamplingParams(4, seed=100 * group + 10 * member + turn)
            said = await engine.sample(prompt, sampling, session=f"{group}/{member}")
            (*_, last) = said.spans
            prompt = np.concatenate([prompt, *(s.tokens for s in said.spans), np.full(5, turn + 7, np.int32)])
            if group == 1 and member == 0 and turn == 1:
                await asyncio.to_thread(engine.load_weights, model, last.version + 1)
        engine.release(f"{group}/{member}")

    async def play() -> None:
        for _ in range(2):
            await asyncio.gather(*(episode(group, member) for group in range(3) for member in range(4)))

    try:
        asyncio.run(play())
    finally:
        engine.close()
    assert engine.shared > 1000
