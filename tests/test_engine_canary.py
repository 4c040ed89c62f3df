# SPDX-License-Identifier: Apache-2.0
"""The canary sings for a right engine and falls silent for a wrong one."""

from __future__ import annotations

from typing import Any

import pytest

from palestra.engine import canary, local
from palestra.engine.local import LocalEngine
from palestra.engine.rows import Rows
from palestra.errors import EngineError
from palestra.model.tiny import calculator_tokenizer, tiny_llama


def test_a_right_engine_agrees_with_a_plain_forward_pass_and_repeats_whatever_the_batch() -> None:
    model = tiny_llama(calculator_tokenizer())
    engine = LocalEngine(model, lambda ids: "")
    heard = canary.sing(engine, model)
    engine.close()
    assert heard.max_difference < 1e-4
    assert heard.batch_invariant
    assert model.config._attn_implementation != "eager", "the model's own attention setting comes back"


def test_keys_written_to_the_wrong_place_are_noticed_before_the_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    class OffByOne(Rows):
        def __init__(self, *of: Any) -> None:
            super().__init__(*of)
            self.places = (self.places - 1).clamp(min=0)

    monkeypatch.setattr(local, "Rows", OffByOne)
    model = tiny_llama(calculator_tokenizer())
    engine = LocalEngine(model, lambda ids: "")
    with pytest.raises(EngineError, match="differ from a plain forward pass"):
        canary.sing(engine, model)
    engine.close()
