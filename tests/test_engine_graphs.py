# SPDX-License-Identifier: Apache-2.0
"""Recorded decode passes. There is no GPU here, so what replays is the recorded work itself, on the tensors that a
graph would read: everything but CUDA's own part."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
import torch
from test_engine_families import TEMPERATURES, episodes, make, teacher_forced
from torch import Tensor

from palestra.engine import graphs
from palestra.engine.base import SamplingParams
from palestra.engine.local import EngineConfig, LocalEngine
from palestra.model import kernels


class Rerun:
    """Records a pass as itself, and counts."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, work: Callable[[], Tensor]) -> graphs.Replay:
        self.recorded += 1

        def replay() -> Tensor:
            self.replayed += 1
            return work()

        return replay


@pytest.fixture
def engine_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.nn.Module, graphs.Recorder], LocalEngine]:
    """An engine that runs as on a GPU: no kernels of ours, no guesses, recorded passes."""

    def made(model: torch.nn.Module, record: graphs.Recorder) -> LocalEngine:
        monkeypatch.setattr(kernels, "takes", lambda *tensors: False)
        monkeypatch.setattr(graphs, "recorder", lambda device: record)
        return LocalEngine(model, lambda ids: "", EngineConfig(pack_weights=False, max_draft=0))

    return made


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mistral", "qwen3_moe"])
def test_recorded_passes_score_as_a_plain_forward_pass_before_and_after_an_update(
    family: str, engine_on: Callable[..., LocalEngine]
) -> None:
    model, record = make(family), Rerun()
    engine = engine_on(model, record)
    for version in range(2):
        for (tokens, spans), temperature in zip(asyncio.run(episodes(engine)), TEMPERATURES, strict=True):
            want = teacher_forced(model, tokens, temperature)
            for at, span in spans:
                bound = 1e-4 * max(1.0, 1.0 / temperature)
                np.testing.assert_allclose(span.logprobs, want[at : at + len(span)], rtol=0, atol=bound)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.05)
        engine.load_weights(model, version + 1)
    engine.close()
    assert record.recorded <= 4 and record.replayed > 5 * record.recorded, "few shapes serve many passes"


def sample(engine: LocalEngine, length: int, new: int) -> list[int]:
    prompt = np.arange(length, dtype=np.int32) % 97
    said = asyncio.run(engine.sample(prompt, SamplingParams(new, seed=length), session=f"{length}"))
    return [int(token) for span in said.spans for token in span.tokens]


def test_a_store_that_grew_is_recorded_anew(engine_on: Callable[..., LocalEngine]) -> None:
    """Its keys lie elsewhere by then: the old recording would read memory that nobody writes any more."""
    model, record = make("llama"), Rerun()
    engine, plain = engine_on(model, record), LocalEngine(model, lambda ids: "", EngineConfig(pack_weights=False))
    plain._graphs = None
    assert [sample(engine, n, 20) for n in (8, 80, 150)] == [sample(plain, n, 20) for n in (8, 80, 150)]
    assert record.recorded > 1


def test_a_model_that_no_graph_takes_is_told_once_and_goes_on(engine_on: Callable[..., LocalEngine]) -> None:
    def refuse(work: Callable[[], Tensor]) -> graphs.Replay:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")

    engine, plain = engine_on(make("llama"), refuse), engine_on(make("llama"), Rerun())
    with pytest.warns(UserWarning, match="no graph takes them: CUDA error: operation not permitted") as told:
        first, second = sample(engine, 8, 5), sample(engine, 9, 5)
    assert [first, second] == [sample(plain, 8, 5), sample(plain, 9, 5)] and len(told) == 1


def test_only_a_gpu_records() -> None:
    assert graphs.recorder(torch.device("cpu")) is None and graphs.recorder(torch.device("cuda")) is not None
