# SPDX-License-Identifier: Apache-2.0
"""Guessing ahead: fewer forward passes, and not a bit of difference in what is sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from fakes import run

from palestra.engine import drafts as module
from palestra.engine import scheduler
from palestra.engine.base import Completion, SamplingParams
from palestra.engine.drafts import Drafts
from palestra.engine.local import EngineConfig, LocalEngine
from palestra.engine.stats import EngineStats
from palestra.model.tiny import calculator_tokenizer, tiny_llama

WORDS = [f"{i:02d}" for i in range(256)]


def learned(*texts: Sequence[int], prompt: int = 0) -> Drafts:
    drafts = Drafts()
    for text in texts:
        drafts.learn(text, len(text) - prompt)
    return drafts


# What is guessed -------------------------------------------------------------------------------------------


def test_what_followed_twice_in_a_row_is_guessed_and_what_changed_is_not() -> None:
    assert learned([1, 2, 3]).guess([1], 5) == []
    assert learned([1, 2, 3], [1, 2, 3]).guess([1], 5) == [2, 3]
    assert learned([1, 2, 3], [1, 2, 3], [1, 2, 4]).guess([1], 5) == [2]
    assert learned([1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2, 4]).guess([1], 5) == [2, 4]


def test_a_longer_context_decides_over_a_shorter_one() -> None:
    after_one = [[9, 9, 9, 1, 2]] * 2
    other = [[8, 8, 8, 1, 3]] * 2
    drafts = learned(*after_one, *other)
    assert drafts.guess([9, 9, 9, 1], 1) == [2]
    assert drafts.guess([8, 8, 8, 1], 1) == [3]
    assert drafts.guess([7, 7, 7, 1], 1) == [3], "only the last token was met before"


def test_the_prompt_is_context_and_not_what_was_written() -> None:
    drafts = learned([5, 6, 7, 1, 2], [5, 6, 7, 1, 2], prompt=4)
    assert drafts.guess([5], 3) == []
    assert drafts.guess([5, 6, 7, 1], 3) == [2]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONTEXTS", 50)
    drafts = Drafts()
    for i in range(1000):
        drafts.learn([i, i + 1, i + 2], 3)
        assert len(drafts._following) <= 60


# What the engine makes of it -------------------------------------------------------------------------------


def play(max_draft: int, rounds: Sequence[Sequence[SamplingParams]]) -> tuple[list[Completion], EngineStats]:
    """Each round's requests at once, all on one prompt, by a model that is the same each time."""
    tokenizer = calculator_tokenizer()
    options = EngineConfig(max_draft=max_draft, max_context=64)
    engine = LocalEngine(tiny_llama(tokenizer), lambda ids: "".join(WORDS[i] for i in ids), options)
    prompt = np.arange(5, 15, dtype=np.int32)

    async def one(name: str, params: SamplingParams) -> Completion:
        said = await engine.sample(prompt, params, session=name)
        engine.release(name)
        return said

    async def every() -> list[Completion]:
        said: list[Completion] = []
        for number, requests in enumerate(rounds):
            said += await asyncio.gather(*(one(f"{number}/{i}", p) for i, p in enumerate(requests)))
        return said

    try:
        return run(every()), engine.take_stats()
    finally:
        engine.close()


def facts(said: Completion) -> tuple[object, ...]:
    spans = said.spans
    return said.finish_reason, said.text, *((s.tokens.tobytes(), np.asarray(s.logprobs).tobytes()) for s in spans)


ALIKE = [SamplingParams(20, seed=i) for i in range(5)]
OTHERS = [SamplingParams(20, seed=100 + i) for i in range(5)]
REPEATED = [ALIKE, ALIKE, OTHERS, ALIKE]


@pytest.fixture(scope="module")
def plain() -> tuple[list[Completion], EngineStats]:
    return play(0, REPEATED)


def test_right_and_wrong_guesses_leave_every_bit_as_it_was(plain: tuple[list[Completion], EngineStats]) -> None:
    said, stats = play(8, REPEATED)
    assert [facts(s) for s in said] == [facts(s) for s in plain[0]]
    assert stats.decode_tokens == plain[1].decode_tokens == 4 * 5 * 20
    assert stats.passes < plain[1].passes - 10, "the last round is known by heart"
    useless = stats.decode_rows - stats.decode_tokens
    assert 0 < useless < stats.draft_rows, "some guesses were wrong, some right"
    assert 0 < stats.guessed_tokens < stats.decode_tokens


def test_without_guesses_no_row_is_for_one(plain: tuple[list[Completion], EngineStats]) -> None:
    assert plain[1].draft_rows == 0


@pytest.mark.parametrize("end", ["length", "eos", "stop", "context"])
def test_a_completion_ends_inside_what_was_guessed_where_it_would_have_ended(end: str) -> None:
    (whole,), _ = play(0, [[SamplingParams(20, seed=3)]])
    tokens = [int(t) for s in whole.spans for t in s.tokens]
    at = next(i for i in range(6, 20) if tokens[i] not in tokens[:i])
    how = {
        "length": SamplingParams(at + 1, seed=3),
        "eos": SamplingParams(20, seed=3, stop_token_ids=(tokens[at],)),
        "stop": SamplingParams(20, seed=3, stop=(WORDS[tokens[at]],)),
        "context": SamplingParams(1000, seed=3),
    }[end]
    rounds = [[SamplingParams(20, seed=3)], [SamplingParams(20, seed=3)], [how], [how], [how]]
    guessed, stats = play(8, rounds)
    assert [facts(s) for s in guessed] == [facts(s) for s in play(0, rounds)[0]]
    assert stats.draft_rows > 0
    assert guessed[-1].finish_reason == {"context": "length"}.get(end, end)


def test_truncation_and_temperature_are_those_of_the_request() -> None:
    ways = [SamplingParams(16, temperature=0.0), SamplingParams(16, temperature=0.7, seed=1, top_k=5, top_p=0.9)]
    rounds = [ways] * 3
    guessed, stats = play(8, rounds)
    assert [facts(s) for s in guessed] == [facts(s) for s in play(0, rounds)[0]]
    assert [np.asarray(s.kept_logmass).tobytes() for s in guessed[5].spans] == [
        np.asarray(s.kept_logmass).tobytes() for s in guessed[1].spans
    ]
    assert stats.passes < 3 * 16


def test_a_full_pass_has_no_room_for_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    one = [SamplingParams(20, seed=0)]
    for room, guessed in ((1, 0), (3, 2)):
        monkeypatch.setattr(scheduler, "DRAFT_ROWS", room)
        _, stats = play(8, [one] * 5)
        # Two rounds to learn in; then every pass but the first knows as many tokens as it has room for.
        assert stats.decode_rows <= stats.passes * room
        assert (stats.draft_rows > 0) == (guessed > 0)


def test_an_engine_that_was_told_so_stops_guessing() -> None:
    engine = LocalEngine(tiny_llama(calculator_tokenizer()), lambda ids: "")
    engine.stop_guessing()
    for _ in range(4):
        run(engine.sample(np.arange(5, 9, dtype=np.int32), SamplingParams(8), session="s"))
    assert engine.take_stats().draft_rows == 0
    engine.close()
