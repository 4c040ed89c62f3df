# SPDX-License-Identifier: Apache-2.0
"""The engine's policy without a model, its sampling at exact edges, and what guesses must not run over."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest
import torch
from fakes import run
from small_models import make_model
from test_engine_local import ask, engine_on, forced, logprobs_of, prompt, tokens_of

from palestra.engine import scheduler as module
from palestra.engine.base import Completion, SamplingParams
from palestra.engine.rows import Rows
from palestra.engine.sampling import sample, uniform
from palestra.engine.scheduler import Request, Schedule, Scheduler
from palestra.engine.stops import StopFinder

# Which rows a pass has -------------------------------------------------------------------------------------


def request(tokens: Any, session: str, max_new_tokens: int = 8) -> Request:
    """One that nobody waits for."""
    nobody = cast(Any, None)
    return Request(np.asarray(tokens, np.int32), SamplingParams(max_new_tokens), session, nobody, nobody, None)


def submit(scheduler: Scheduler, *requests: Request) -> Schedule:
    """The next pass, with the keys that its prefill writes."""
    scheduler.waiting.extend(requests)
    schedule = scheduler.next()
    for slot, _, end in schedule.fills:
        slot.cached = end
    return schedule


def filled(schedule: Schedule) -> list[tuple[int, int, int]]:
    return [(slot.number, start, end) for slot, start, end in schedule.fills]


def twins(schedule: Schedule) -> list[list[str]]:
    """The sessions that each decode row serves."""
    return [[r.session for r in decode.twins] for decode in schedule.decodes]


def made(**options: Any) -> Scheduler:
    return Scheduler(**{"max_rows": 4, "max_slots": 4, "prefill_tokens": 64} | options)


def test_a_pass_fills_no_more_prompt_tokens_than_it_may_whoever_they_are_of() -> None:
    scheduler = made(prefill_tokens=16)
    three = (request(range(10 * i, 10 * i + 11), str(i)) for i in (1, 2, 3))
    assert filled(submit(scheduler, *three)) == [(1, 0, 10), (2, 0, 6)]
    assert filled(submit(scheduler)) == [(2, 6, 10), (3, 0, 10)]


def test_who_joins_with_the_prompt_of_one_that_has_sampled_copies_its_keys_and_has_a_row_of_its_own() -> None:
    scheduler, early, late = made(), request(range(11), "early"), request(range(11), "late")
    submit(scheduler, early)
    assert twins(submit(scheduler)) == [["early"]]
    scheduler.append([(early, [7])])
    schedule = submit(scheduler, late)
    assert [(a.number, b.number, start, end) for a, b, start, end in schedule.copies] == [(1, 2, 0, 10)]
    assert twins(schedule) == [["early"], ["late"]]
    scheduler.append([(early, [7]), (late, [7])])
    assert twins(submit(scheduler)) == [["early"], ["late"]], "the same token, after other tokens"


def test_a_prompt_copies_what_it_has_in_common_with_another_and_not_a_token_more() -> None:
    scheduler, head = made(), range(40)
    submit(scheduler, request([*head, 50, 51, 52], "one"))
    schedule = submit(scheduler, request([*head, 60, 61, 62], "other"))
    assert [(a.number, b.number, start, end) for a, b, start, end in schedule.copies] == [(1, 2, 0, 40)]
    assert filled(schedule) == [(2, 40, 42)]


def test_keys_by_older_weights_are_shared_with_nobody_who_has_the_same_tokens() -> None:
    scheduler, early, late = made(prefill_tokens=8), request(range(11), "early"), request(range(11), "late")
    assert filled(submit(scheduler, early)) == [(1, 0, 8)]
    scheduler.invalidate()
    schedule = submit(scheduler, late)
    assert (schedule.copies, filled(schedule)) == ([], [(1, 8, 10), (2, 0, 6)])
    assert filled(submit(scheduler)) == [(2, 6, 10)]
    assert twins(submit(scheduler)) == [["early"], ["late"]]


def test_a_session_that_is_running_makes_no_room_for_a_new_one() -> None:
    """Two slots: the older session still runs, the younger waits for its next turn."""
    scheduler, runs, waits = made(max_rows=2, max_slots=2), request(range(11), "runs"), request(range(20, 31), "waits")
    submit(scheduler, runs, waits)
    scheduler.finish(waits)
    assert filled(submit(scheduler, request(range(40, 51), "new"))) == [(2, 0, 10)]
    assert (runs.slot.tokens, list(scheduler.sessions)) == (list(range(11)), ["runs", "new"])


@pytest.mark.parametrize(("limits", "guessed"), [((4,), 3), ((4, 6), 5), ((60,), 8)])
def test_no_token_is_guessed_beyond_the_last_that_any_twin_may_sample(limits: tuple[int, ...], guessed: int) -> None:
    """The pass itself gives one token, and each guess that holds one more."""
    scheduler = made(max_draft=8)
    for _ in range(2):
        scheduler.drafts.learn(range(30), 29)
    requests = [request(range(11), str(n), n) for n in limits]
    submit(scheduler, *requests)
    (decode,) = submit(scheduler).decodes
    assert decode.draft == list(range(11, 11 + guessed))


def test_guesses_fill_a_pass_to_its_limit_and_everyones_next_token_comes_before_anyones_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "DRAFT_ROWS", 5)
    scheduler, starts = made(max_draft=8), (0, 100)
    for start in (*starts, *starts):
        scheduler.drafts.learn(range(start, start + 30), 29)
    submit(scheduler, *(request(range(start, start + 11), str(start), 60) for start in starts))
    assert [decode.draft for decode in submit(scheduler).decodes] == [[11, 12], [111]]


def test_no_token_is_guessed_beyond_the_end_of_the_context() -> None:
    # Eleven tokens are known and fourteen have room: one from the pass itself, two guesses.
    scheduler = made(max_draft=8, max_context=14)
    for _ in range(2):
        scheduler.drafts.learn(range(30), 29)
    submit(scheduler, request(range(11), "s", 60))
    (decode,) = submit(scheduler).decodes
    assert decode.draft == [11, 12]


@pytest.mark.parametrize("requests", [3, 7, 8])
def test_a_pass_has_the_least_multiple_of_eight_rows_and_padding_points_behind_them(requests: int) -> None:
    scheduler = made(max_rows=16, max_slots=16)
    submit(scheduler, *(request([30 + i, *range(1 + i)], str(i)) for i in range(requests)))
    rows = Rows(submit(scheduler), torch.device("cpu"))
    assert len(rows.tokens) == 8
    for block in rows.blocks:
        assert block.rows[block.positions < 0].eq(8).all(), "what padding says goes to no row"
        assert block.queries.max() < 8
        assert sorted(block.rows[block.positions >= 0].tolist()) == list(range(requests))


# Sampling --------------------------------------------------------------------------------------------------


def drawn(logits: Any, u: float, **params: Any) -> int:
    rows = torch.as_tensor(logits, dtype=torch.float32)[None]
    return sample(rows, [SamplingParams(1, **params)], np.array([u], np.float32))[0][0]


def test_the_noise_is_splitmix64() -> None:
    """The first outputs for the seed 0, as its reference implementation prints them; the upper 24 bits of each."""
    known = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    got = uniform(np.zeros(3, np.uint64), np.arange(3, dtype=np.uint64))
    assert got.tolist() == [(z >> 40) / 2**24 for z in known]


@pytest.mark.parametrize("vocabulary", [2, 512])
def test_a_share_that_only_equals_the_noise_does_not_exceed_it(vocabulary: int) -> None:
    """All tokens alike and u = ½: the first half has a share of exactly ½. 512 tokens are two blocks of 256."""
    assert drawn(np.zeros(vocabulary), 0.5) == vocabulary // 2


def test_noise_of_0_takes_the_first_token_that_has_any_mass() -> None:
    assert drawn(np.log([1e-30, 0.2, 0.8]), 0.0, top_k=2) == 1
    peaked = np.zeros(512)
    peaked[300] = 1.0
    assert drawn(peaked, 0.0, top_k=1) == 300, "the whole first block was cut off"


def test_members_that_differ_in_their_temperature_alone_are_each_sampled_at_their_own() -> None:
    model, asked = make_model(), prompt(9)
    ways = [SamplingParams(6, temperature=t, seed=3) for t in (1.0, 0.7)]

    async def every() -> list[Completion]:
        calls = (engine.sample(asked, way, session=str(i)) for i, way in enumerate(ways))
        return list(await asyncio.gather(*calls))

    with engine_on(model) as engine:
        said = run(every())
    for way, answer in zip(ways, said, strict=True):
        np.testing.assert_allclose(logprobs_of(answer), forced(model, asked, answer, way.temperature), atol=1e-5)


def test_guesses_may_run_over_the_end_of_what_the_store_holds_so_far() -> None:
    """The store begins with room for 64 tokens; what is known by heart goes on to 90."""
    model, asked = make_model(), prompt(10)
    with engine_on(model, max_draft=0) as engine:
        plain = ask(engine, asked, max_new_tokens=80)
    with engine_on(model, max_draft=8) as engine:
        for _ in range(2):
            engine._scheduler.drafts.learn([*asked.tolist(), *tokens_of(plain)], 80)
        guessed = ask(engine, asked, max_new_tokens=80)
        assert engine.take_stats().passes < 40
    assert tokens_of(guessed) == tokens_of(plain)
    np.testing.assert_allclose(logprobs_of(guessed), logprobs_of(plain), atol=1e-5)


# Stop strings ----------------------------------------------------------------------------------------------


def test_a_token_without_text_is_no_left_neighbour_for_the_next_one() -> None:
    """The decoder drops the first space of all it is given; the second token shows nothing."""
    pieces = [" a", "", " b"]
    finder = StopFinder(lambda ids: "".join(pieces[i] for i in ids).removeprefix(" "), ["a b"])
    assert [finder.push(i) for i in range(3)] == [False, False, True]
    assert finder.text(include_stop=True) == "a b"
