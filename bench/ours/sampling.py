# SPDX-License-Identifier: Apache-2.0
"""The engine alone: tokens in, tokens out, as many rows at once as are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.peers.serve import Reply, peak_gib, reset_peak, timed
from palestra.engine.base import SamplingParams
from palestra.engine.local import EngineConfig, LocalEngine
from palestra.model.loading import load_model


@dataclass(frozen=True, slots=True)
class _Plan:
    """prompts: token ids. samples: of each. lengths: new tokens of each row and turn. added: what an environment adds
    between two turns. turns: how many."""

    prompts: Sequence[Sequence[int]]
    samples: int
    lengths: Sequence[int]
    turns: int = 1
    added: Sequence[int] = ()


def sampling(model: str, dtype: str) -> Callable[[dict[str, Any]], Reply]:
    """Sample a plan from a cold engine: nothing that an earlier request left in its store is used."""
    loaded = load_model(model, dtype=dtype, device="cpu")
    tokenizer: Any = loaded.tokenizer
    engine = LocalEngine(loaded.model, tokenizer.decode, EngineConfig())

    def measure(request: dict[str, Any]) -> Reply:
        plan = _Plan(**request)
        engine.load_weights(loaded.model, engine.version + 1)
        engine.take_stats()
        reset_peak()
        seconds, tokens = timed(lambda: asyncio.run(_play(engine, plan)))
        return {"seconds": seconds, "tokens": tokens, "peak_gib": peak_gib()}

    return measure


async def _play(engine: LocalEngine, plan: _Plan) -> int:
    """All rows at once; the number of tokens sampled."""
    rows = [prompt for prompt in plan.prompts for _ in range(plan.samples)]
    jobs = [_row(engine, plan, row, prompt) for row, prompt in enumerate(rows)]
    return sum(await asyncio.gather(*jobs))


async def _row(engine: LocalEngine, plan: _Plan, row: int, prompt: Sequence[int]) -> int:
    """One sequence, turn after turn; nothing ends a turn before its length."""
    tokens, session, length = list(prompt), f"row {row}", plan.lengths[row % len(plan.lengths)]
    for turn in range(plan.turns):
        params = SamplingParams(max_new_tokens=length, seed=row * plan.turns + turn)
        completion = await engine.sample(np.asarray(tokens, np.int32), params, session=session)
        tokens += [int(t) for span in completion.spans for t in span.tokens]
        if turn + 1 < plan.turns:
            tokens += plan.added
    engine.release(session)
    return length * plan.turns
