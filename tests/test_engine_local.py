# SPDX-License-Identifier: Apache-2.0
"""The in-process engine: what it samples, what it computes only once, and how it behaves when things go wrong."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from fakes import run
from small_models import VOCABULARY, make_model, plain_logprobs

from palestra.engine.base import Completion, SamplingParams
from palestra.engine.local import EngineConfig, LocalEngine
from palestra.engine.sampling import sample as draw
from palestra.engine.sampling import uniform
from palestra.errors import ConfigError, EngineError, ModelError
from palestra.model.lora import LoraConfig, add_lora
from palestra.model.tiny import calculator_tokenizer, tiny_llama

WORDS = [f"{i:02d}" for i in range(VOCABULARY)]


def decode(ids: Sequence[int]) -> str:
    """Two characters a token, so that a stop string may begin and end inside tokens."""
    return "".join(WORDS[i] for i in ids)


@contextmanager
def engine_on(model: Any, **options: Any) -> Iterator[LocalEngine]:
    engine = LocalEngine(model, decode, EngineConfig(**options))
    yield engine
    engine.close()


def prompt(n: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, n).astype(np.int32)


def tokens_of(said: Completion) -> list[int]:
    return [int(t) for s in said.spans for t in s.tokens]


def logprobs_of(said: Completion) -> np.ndarray[Any, Any]:
    return np.concatenate([s.logprobs for s in said.spans if s.logprobs is not None])


def forced(model: Any, asked: Any, said: Completion, temperature: float = 1.0) -> np.ndarray[Any, Any]:
    """A plain forward pass's log-probs of what was said."""
    ids = [*map(int, asked), *tokens_of(said)]
    with torch.no_grad():
        scores: np.ndarray[Any, Any] = plain_logprobs(model, ids, temperature)[len(asked) :].numpy()
    return scores


def ask(engine: LocalEngine, asked: Any, session: str = "s", **params: Any) -> Completion:
    return run(
        engine.sample(np.asarray(asked, np.int32), SamplingParams(**{"max_new_tokens": 8} | params), session=session)
    )


def ask_all(engine: LocalEngine, prompts: Sequence[Any], **params: Any) -> list[Completion]:
    async def every() -> list[Completion]:
        wanted = SamplingParams(**{"max_new_tokens": 8} | params)
        return list(
            await asyncio.gather(
                *(engine.sample(p, SamplingParams(wanted.max_new_tokens, wanted.temperature, seed=i), session=str(i))
                  for i, p in enumerate(prompts))
            )
        )  # fmt: skip

    return run(every())


async def until(engine: LocalEngine, decoded: int) -> None:
    """Wait until the engine has sampled so many tokens."""
    seen = 0
    while seen < decoded:
        seen += engine.take_stats().decode_tokens
        await asyncio.sleep(0.001)


def test_a_row_has_the_same_bits_beside_one_that_is_truncated() -> None:
    logits, noise = torch.randn(8, 500, generator=torch.Generator().manual_seed(0)), np.linspace(0, 0.99, 8)
    plain, cut = SamplingParams(4), SamplingParams(4, top_k=3)
    alone = draw(logits, [plain] * 8, noise.astype(np.float32))
    beside = draw(logits, [cut, *[plain] * 7], noise.astype(np.float32))
    assert alone[0][1:] == beside[0][1:] and alone[1][1:] == beside[1][1:]
    assert alone[2] is None and beside[2] is not None and beside[2][0] < 0


# What is sampled -------------------------------------------------------------------------------------------


def test_tokens_and_log_probs_are_the_same_bits_whatever_else_is_in_the_batch() -> None:
    tokenizer = calculator_tokenizer()
    engine = LocalEngine(tiny_llama(tokenizer), tokenizer.decode)
    rng = np.random.default_rng(0)
    shared = rng.integers(4, 70, 21).astype(np.int32)
    prompts = [shared, shared, *(rng.integers(4, 70, n).astype(np.int32) for n in (1, 7, 30, 64))]
    pause: dict[int, float] = {}

    async def one(i: int) -> Completion:
        await asyncio.sleep(pause.get(i, 0))
        said = await engine.sample(prompts[i], SamplingParams(10 + i, seed=50 + i), session=str(i))
        engine.release(str(i))
        return said

    async def together(order: Sequence[int]) -> dict[int, Completion]:
        return dict(zip(order, await asyncio.gather(*map(one, order)), strict=True))

    alone = {i: run(one(i)) for i in range(6)}
    ways = [run(together(range(6))), run(together(range(5, -1, -1)))]
    pause = {i: 0.003 * (i % 3) for i in range(6)}
    ways.append(run(together([3, 1, 5, 0, 2, 4])))
    engine.close()
    for way in ways:
        for i, said in way.items():
            assert tokens_of(said) == tokens_of(alone[i])
            assert logprobs_of(said).tobytes() == logprobs_of(alone[i]).tobytes(), "bit by bit"


@pytest.mark.parametrize("heads", [(3, 3), (4, 1), (6, 2)], ids="{0[0]} heads on {0[1]}".format)
def test_keys_are_the_same_bits_whether_decoded_or_filled_in_pieces_and_beside_whom(heads: tuple[int, int]) -> None:
    """Long enough that torch would cut a sum over all keys, at a place that depends on the longest neighbour."""
    sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 128, "head_dim": 32, "vocab_size": VOCABULARY}
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        num_hidden_layers=3,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        max_position_embeddings=512,
        **sizes,
    )
    model = hf.LlamaForCausalLM(config).eval()
    asked, others = prompt(210), [prompt(n, seed=n) for n in (30, 300, 410)]

    def keys(turns: Sequence[int], *, pieces: int = 4096, neighbours: Sequence[Any] = ()) -> bytes:
        """Of the last turn's session, after prompts of these lengths that each got a token."""

        async def play(engine: LocalEngine) -> None:
            beside = [
                asyncio.create_task(engine.sample(p, SamplingParams(40), session=f"beside {i}"))
                for i, p in enumerate(neighbours)
            ]
            for n in turns:
                await engine.sample(asked[:n], SamplingParams(1), session="s")
            await asyncio.gather(*beside)

        with engine_on(model, prefill_tokens=pieces) as engine:
            run(play(engine))
            at, store = engine._scheduler.sessions["s"].number, engine._store
            held = [t[layer][at, :, : len(asked)] for t in (store.keys, store.values) for layer in sorted(t)]
        return torch.stack(held).numpy().tobytes()

    filled = keys([210])
    assert keys([210], pieces=16) == filled
    assert keys([210], neighbours=others) == filled
    assert keys([40, 41, 120, 210]) == filled, "a turn's last token is decoded"
    assert keys(range(150, 211), neighbours=others) == filled


@pytest.mark.parametrize(
    "options", [{"max_rows": 0}, {"max_sessions": -1}, {"prefill_tokens": 0}, {"max_context": 1}], ids=str
)
def test_an_engine_that_could_never_run_a_row_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        EngineConfig(**options)


def test_the_seed_decides_what_is_said() -> None:
    with engine_on(make_model()) as engine:
        first, again, other = (ask(engine, prompt(5), seed=s, max_new_tokens=20) for s in (1, 1, 2))
    assert tokens_of(first) == tokens_of(again) != tokens_of(other)


def test_greedy_takes_the_likeliest_token_and_reports_it_at_temperature_one() -> None:
    model, asked = make_model(), prompt(6)
    with engine_on(model) as engine:
        said = ask(engine, asked, temperature=0.0, seed=9)
    ids = [*asked.tolist(), *tokens_of(said)]
    with torch.no_grad():
        likeliest = model(input_ids=torch.tensor([ids])).logits[0, 5:-1].argmax(-1).tolist()
    assert tokens_of(said) == likeliest
    np.testing.assert_allclose(logprobs_of(said), forced(model, asked, said), atol=1e-5)


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}], ids=["top-k", "top-p", "min-p"])
def test_ls_013_only_kept_tokens_are_said_and_log_probs_are_of_the_full_vocabulary(cut: dict[str, Any]) -> None:
    model, asked = make_model(), prompt(6)
    with engine_on(model) as engine:
        said = ask(engine, asked, max_new_tokens=30, temperature=1.5, **cut)
    ids = [*asked.tolist(), *tokens_of(said)]
    with torch.no_grad():
        probs = (model(input_ids=torch.tensor([ids])).logits[0, 5:-1] / 1.5).softmax(-1).numpy()
    kept_logmass = said.spans[0].kept_logmass
    assert kept_logmass is not None and kept_logmass.min() < -0.05
    for p, token, mass in zip(probs, tokens_of(said), kept_logmass, strict=True):
        order = np.argsort(-p)
        if "top_k" in cut:
            kept = order[:3]
        elif "top_p" in cut:
            kept = order[: 1 + int(np.searchsorted(np.cumsum(p[order]), 0.6))]
        else:
            kept = order[p[order] >= 0.3 * p.max()]
        assert token in kept
        assert mass == pytest.approx(math.log(p[kept].sum()), abs=1e-4)
    np.testing.assert_allclose(logprobs_of(said), forced(model, asked, said, 1.5), atol=1e-5)


@pytest.mark.parametrize("vocabulary", [5, 512])
def test_tokens_come_up_as_often_as_the_softmax_says(vocabulary: int) -> None:
    n = 20_000
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1))
    noise = uniform(np.arange(n, dtype=np.uint64), np.full(n, 3, np.uint64))
    tokens, logprobs, kept = draw(logits.expand(n, -1), [SamplingParams(1, temperature=0.8)] * n, noise)
    probs = (logits / 0.8).softmax(-1).double().numpy()
    counts = np.bincount(tokens, minlength=vocabulary)
    chi_square = float(((counts - n * probs) ** 2 / (n * probs)).sum())
    assert abs(chi_square - (vocabulary - 1)) < 5 * math.sqrt(2 * (vocabulary - 1))
    np.testing.assert_allclose(logprobs, np.log(probs[tokens]), atol=1e-5)
    assert kept is None


def test_a_row_without_truncation_loses_nothing_to_a_neighbour_with_it() -> None:
    peaked = torch.tensor([[20.0] + [0.0] * 63])
    rows, u = peaked.expand(2, -1), np.array([0.5, 0.5], np.float32)
    _, _, kept = draw(rows, [SamplingParams(1), SamplingParams(1, top_k=1)], u)
    assert kept == [0.0, pytest.approx(math.log(peaked.double().softmax(-1)[0, 0]), abs=1e-6)]


# Where it ends ---------------------------------------------------------------------------------------------


def test_a_stop_string_is_found_across_tokens_and_the_straddling_token_stays() -> None:
    with engine_on(make_model()) as engine:
        free = ask(engine, prompt(5), max_new_tokens=20, temperature=1.5)
        text = decode(tokens_of(free))
        stop = text[7:10]  # the second half of token 3, token 4
        end = text.find(stop) + 3
        said = ask(engine, prompt(5), max_new_tokens=20, temperature=1.5, stop=(stop, "never"))
        shown = ask(
            engine, prompt(5), max_new_tokens=20, temperature=1.5, stop=(stop,), include_stop_str_in_output=True
        )
    assert (said.finish_reason, said.text) == ("stop", text[: end - 3])
    assert shown.text == text[:end]
    assert tokens_of(said) == tokens_of(free)[: math.ceil(end / 2)]
    assert said.spans[0].text == decode(tokens_of(said))


def test_a_stop_id_ends_the_turn_and_belongs_to_it() -> None:
    with engine_on(make_model()) as engine:
        free = tokens_of(ask(engine, prompt(5), max_new_tokens=12, temperature=1.5))
        said = ask(engine, prompt(5), max_new_tokens=12, temperature=1.5, stop_token_ids=(free[5],))
    n = free.index(free[5]) + 1
    assert (said.finish_reason, tokens_of(said), said.text) == ("eos", free[:n], decode(free[: n - 1]))


def test_the_token_limit_and_the_end_of_the_context_end_with_length() -> None:
    with engine_on(make_model(), max_context=16) as engine:
        short, full = ask(engine, prompt(10), max_new_tokens=3), ask(engine, prompt(10), max_new_tokens=50)
    assert (short.finish_reason, len(tokens_of(short))) == ("length", 3)
    assert (full.finish_reason, len(tokens_of(full))) == ("length", 6)


@pytest.mark.parametrize("n", [0, 16, 40])
def test_a_prompt_that_does_not_fit_is_refused(n: int) -> None:
    with engine_on(make_model(), max_context=16) as engine, pytest.raises(ConfigError, match=f"prompt of {n} tokens"):
        ask(engine, prompt(n))


# What is computed only once --------------------------------------------------------------------------------


def test_a_group_fills_its_prompt_once_and_a_next_turn_only_what_is_new() -> None:
    model, shared = make_model(), prompt(20)
    with engine_on(model) as engine:
        said = ask_all(engine, [shared] * 4, max_new_tokens=6)
        stats = engine.take_stats()
        # The prompt's last token goes through each member's own first decode row.
        assert (stats.prefill_tokens, stats.decode_tokens) == (19, 4 * 6)
        more = [np.concatenate([shared, tokens_of(s), prompt(5, i)]).astype(np.int32) for i, s in enumerate(said)]
        again = ask_all(engine, more, max_new_tokens=6)
        assert engine.take_stats().prefill_tokens == 4 * 5, "the last token of turn one and four of five new ones"
    for asked, answer in zip(more, again, strict=True):
        np.testing.assert_allclose(logprobs_of(answer), forced(model, asked, answer), atol=1e-5)


def test_twins_share_a_decode_row_until_their_noise_parts_them_and_are_the_same_bits_as_alone() -> None:
    """Eight members, peaked logits: they part one by one, turn two begins where twins ended alike."""
    tokenizer = calculator_tokenizer()
    model = tiny_llama(tokenizer)
    with torch.no_grad():
        model.lm_head.weight.mul_(3.0)
    shared = np.random.default_rng(0).integers(4, 70, 21).astype(np.int32)

    async def member(engine: LocalEngine, i: int) -> list[Completion]:
        turns, known = [], shared
        for turn in range(2):
            params = SamplingParams(12, temperature=0.5, seed=10 * i + turn)
            turns.append(await engine.sample(known, params, session=str(i)))
            known = np.concatenate([known, tokens_of(turns[-1]), [5, 6, 7]]).astype(np.int32)
        return turns

    async def together(engine: LocalEngine) -> list[list[Completion]]:
        return list(await asyncio.gather(*(member(engine, i) for i in range(8))))

    with engine_on(model) as engine:
        group = run(together(engine))
        stats = engine.take_stats()
    assert stats.decode_tokens == 8 * 2 * 12
    contexts = set()
    for turns in group:
        known = tuple(shared.tolist())
        for said in turns:
            contexts |= {known + tuple(tokens_of(said)[:n]) for n in range(12)}
            known = (*known, *tokens_of(said), 5, 6, 7)
    assert len(contexts) <= stats.decode_rows < 0.8 * stats.decode_tokens
    for i, turns in enumerate(group):
        with engine_on(model) as engine:
            alone = run(member(engine, i))
        for a, b in zip(turns, alone, strict=True):
            assert tokens_of(a) == tokens_of(b)
            assert logprobs_of(a).tobytes() == logprobs_of(b).tobytes(), "bit by bit"


def test_greedy_members_are_computed_once() -> None:
    with engine_on(make_model()) as engine:
        said = ask_all(engine, [prompt(20)] * 8, max_new_tokens=6, temperature=0.0)
        stats = engine.take_stats()
    assert (stats.decode_tokens, stats.decode_rows) == (8 * 6, 6)
    assert len({tuple(tokens_of(s)) for s in said}) == 1


def test_many_prompts_with_a_common_beginning_and_little_room_a_pass_all_get_an_answer() -> None:
    """A session may copy the common beginning long before its own tokens are filled."""
    model, head = make_model(), prompt(40)
    asked = [np.concatenate([head, prompt(12, seed=100 + i)]).astype(np.int32) for i in range(40)]
    with engine_on(model, prefill_tokens=16) as engine:
        said = ask_all(engine, asked, max_new_tokens=3)
    for question, answer in zip(asked, said, strict=True):
        np.testing.assert_allclose(logprobs_of(answer), forced(model, question, answer), atol=1e-5)


def test_a_long_prompt_is_filled_in_portions() -> None:
    model, asked = make_model(), prompt(50)
    with engine_on(model, prefill_tokens=16) as engine:
        said = ask(engine, asked, max_new_tokens=4)
        stats = engine.take_stats()
    assert (stats.prefill_tokens, stats.passes) == (49, 4 + 4)
    np.testing.assert_allclose(logprobs_of(said), forced(model, asked, said), atol=1e-5)


def test_the_least_recently_used_session_is_forgotten_and_filled_again_when_it_returns() -> None:
    model = make_model()
    with engine_on(model, max_rows=1, max_sessions=2) as engine:
        history = {name: np.concatenate([p, tokens_of(ask(engine, p, name)), prompt(3)]).astype(np.int32)
                   for name, p in (("a", prompt(10, 1)), ("b", prompt(11, 2)), ("c", prompt(12, 3)))}  # fmt: skip
        engine.take_stats()
        filled = {}
        for name in ("b", "a", "b"):  # a was the oldest when c came; when a returns, c is
            said = ask(engine, history[name], name)
            np.testing.assert_allclose(logprobs_of(said), forced(model, history[name], said), atol=1e-5)
            filled[name] = engine.take_stats().prefill_tokens
            history[name] = np.concatenate([history[name], tokens_of(said), prompt(2)]).astype(np.int32)
    assert filled == {"a": 10 + 8 + 3 - 1, "b": 2}


def test_a_released_session_makes_room_and_no_other_is_forgotten() -> None:
    with engine_on(make_model(), max_rows=1, max_sessions=2) as engine:
        said = {name: ask(engine, prompt(10, i), name) for i, name in enumerate("ab")}
        engine.release("a")
        engine.release("never seen")
        ask(engine, prompt(12, 7), "c")
        engine.take_stats()
        ask(engine, np.concatenate([prompt(10, 1), tokens_of(said["b"]), prompt(4)]), "b")
        assert engine.take_stats().prefill_tokens == 4


def test_more_episodes_than_sessions_and_rows_still_score_right() -> None:
    model = make_model()
    prompts = [prompt(3 + 5 * (i % 4), i // 2) for i in range(10)]
    with engine_on(model, max_rows=3, max_sessions=4) as engine:
        for _ in range(2):
            for asked, said in zip(prompts, ask_all(engine, prompts), strict=True):
                np.testing.assert_allclose(logprobs_of(said), forced(model, asked, said), atol=1e-5)
            prompts = [np.concatenate([p, prompt(2)]) for p in prompts]


# When things go wrong --------------------------------------------------------------------------------------


def test_a_cancelled_generation_frees_its_row_and_the_others_go_on() -> None:
    model = make_model()
    with engine_on(model, max_rows=2) as engine:
        alone = tokens_of(ask(engine, prompt(9), "alone", max_new_tokens=40, seed=4))

        async def story() -> tuple[Completion, Completion]:
            doomed = asyncio.create_task(engine.sample(prompt(8), SamplingParams(110), session="doomed"))
            stays = asyncio.create_task(engine.sample(prompt(9), SamplingParams(40, seed=4), session="stays"))
            waits = asyncio.create_task(engine.sample(prompt(7), SamplingParams(5), session="waits"))
            await until(engine, 10)
            assert not waits.done(), "both rows are taken"
            doomed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doomed
            return await stays, await waits

        stays, waits = run(story())
    assert tokens_of(stays) == alone
    assert len(tokens_of(waits)) == 5


@pytest.mark.parametrize("session", ["doomed", "another"])
def test_nobody_waits_for_a_prompt_whose_request_was_cancelled_half_filled(session: str) -> None:
    """The next request with that prompt fills what is missing itself."""
    model, asked = make_model(), prompt(60)
    with engine_on(model, prefill_tokens=8) as engine:

        async def story() -> Completion:
            doomed = asyncio.create_task(engine.sample(asked, SamplingParams(4), session="doomed"))
            while not engine._stats.passes:
                await asyncio.sleep(0)
            doomed.cancel()
            await asyncio.gather(doomed, return_exceptions=True)
            return await engine.sample(asked, SamplingParams(4), session=session)

        said = run(story())
    np.testing.assert_allclose(logprobs_of(said), forced(model, asked, said), atol=1e-5)


def test_a_session_released_while_it_generates_gets_its_completion_and_its_slot_is_free_afterwards() -> None:
    with engine_on(make_model(), max_rows=1, max_sessions=1) as engine:
        alone = tokens_of(ask(engine, prompt(9), "alone", max_new_tokens=60))
        engine.release("alone")

        async def story() -> Completion:
            going = asyncio.create_task(engine.sample(prompt(9), SamplingParams(60), session="a"))
            await until(engine, 5)
            engine.release("a")
            return await going

        assert tokens_of(run(story())) == alone
        assert len(tokens_of(ask(engine, prompt(4), "b"))) == 8


def test_a_failing_forward_pass_fails_every_request_and_the_engine_works_again() -> None:
    model, broken = make_model(), [False]

    def hook(*_: Any) -> None:
        if broken[0]:
            raise RuntimeError("out of memory")

    model.register_forward_pre_hook(hook)
    with engine_on(model, max_rows=2) as engine:
        before = ask(engine, prompt(9))
        broken[0] = True

        async def every() -> list[Any]:
            calls = (engine.sample(prompt(5 + i), SamplingParams(5), session=str(i)) for i in range(4))
            return list(await asyncio.gather(*calls, return_exceptions=True))

        for error in run(every()):
            assert isinstance(error, EngineError) and "RuntimeError: out of memory" in str(error)
        broken[0] = False
        after = ask(engine, prompt(9))
    assert logprobs_of(after).tobytes() == logprobs_of(before).tobytes()


def test_closing_ends_what_is_under_way_and_refuses_what_comes_later() -> None:
    with engine_on(make_model()) as engine:

        async def story() -> None:
            going = asyncio.create_task(engine.sample(prompt(5), SamplingParams(120), session="a"))
            await until(engine, 3)
            engine.close()
            with pytest.raises(EngineError, match="closed"):
                await going
            with pytest.raises(EngineError, match="closed"):
                await engine.sample(prompt(5), SamplingParams(3), session="b")

        run(story())


def test_a_family_without_the_attention_interface_is_refused_in_one_line() -> None:
    config = hf.MambaConfig(vocab_size=61, hidden_size=16, state_size=4, num_hidden_layers=1)
    with pytest.raises(ModelError, match="MambaForCausalLM") as caught:
        LocalEngine(hf.MambaForCausalLM(config), decode)
    assert "\n" not in str(caught.value)


# New weights -----------------------------------------------------------------------------------------------


def shift(model: Any, seed: int = 0) -> None:
    """What an optimiser does: change the parameters in place."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn(p.shape, generator=noise).to(p.dtype))


def test_cp_006_after_an_update_the_engine_samples_with_the_trainers_weights() -> None:
    model = make_model()
    with engine_on(model) as engine:
        old = ask(engine, prompt(9))
        shift(model)
        engine.load_weights(model, 1)
        new = ask(engine, prompt(9))
        assert engine.version == 1
    assert [s.version for s in (*old.spans, *new.spans)] == [0, 1]
    np.testing.assert_allclose(logprobs_of(new), forced(model, prompt(9), new), atol=1e-5)
    assert np.abs(logprobs_of(old) - forced(model, prompt(9), old)).max() > 0.01


def test_cp_006_a_bfloat16_engine_keeps_a_copy_and_load_weights_refreshes_it() -> None:
    model = make_model()
    with engine_on(model, dtype="bfloat16") as engine:
        first = ask(engine, prompt(9))
        shift(model)
        stale = ask(engine, prompt(9), "other")
        engine.load_weights(model, 1)
        fresh = ask(engine, prompt(9), "third")
    assert logprobs_of(stale).tobytes() == logprobs_of(first).tobytes(), "a copy does not move by itself"
    off = np.abs(logprobs_of(fresh) - forced(model, prompt(9), fresh)).mean()
    assert 1e-6 < off < 0.1, "the trainer's weights, rounded"
    assert np.abs(logprobs_of(stale) - forced(model, prompt(9), stale)).mean() > 3 * off
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_weights_of_another_model_are_refused_rather_than_half_loaded() -> None:
    model = make_model()
    with engine_on(model) as engine, pytest.raises(EngineError, match="no parameter"):
        engine.load_weights(make_model("gpt2"), 1)


@pytest.mark.parametrize("on_update", ["finish", "recompute", "keep"])
def test_an_update_while_generating(on_update: str) -> None:
    model, asked = make_model(), prompt(9)
    other = make_model(seed=1)
    with engine_on(model, on_update=on_update, dtype="float32") as engine:

        async def story() -> tuple[Completion, Completion]:
            going = asyncio.create_task(engine.sample(asked, SamplingParams(100), session="a"))
            await until(engine, 5)
            await asyncio.get_running_loop().run_in_executor(None, engine.load_weights, other, 1)
            said = await going
            more = np.concatenate([asked, tokens_of(said), prompt(3)]).astype(np.int32)
            return said, await engine.sample(more, SamplingParams(5), session="a")

        said, after = run(story())
    old, new = forced(model, asked, said), forced(other, asked, said)
    if on_update == "finish":
        assert [s.version for s in said.spans] == [0]
        np.testing.assert_allclose(logprobs_of(said), old, atol=1e-5)
    else:
        assert [s.version for s in said.spans] == [0, 1]
        n = len(said.spans[0])
        assert 5 <= n < 100
        np.testing.assert_allclose(logprobs_of(said)[:n], old[:n], atol=1e-5)
        close = np.allclose(logprobs_of(said)[n:], new[n:], atol=1e-5)
        assert close == (on_update == "recompute"), "kept keys are those of the old weights"
    more = [*asked.tolist(), *tokens_of(said), *prompt(3).tolist()]
    np.testing.assert_allclose(logprobs_of(after), forced(other, more, after), atol=1e-5)


def test_an_adapter_is_on_and_stays_on_whatever_the_trainer_does_with_its_own_model() -> None:
    model: Any = add_lora(make_model("gpt2"), LoraConfig(r=2))
    with engine_on(model) as engine:
        bare = ask(engine, prompt(9))
        shift(model)  # the adapter only: nothing else requires gradients
        engine.load_weights(model, 1)
        adapted = ask(engine, prompt(9))
        np.testing.assert_allclose(logprobs_of(adapted), forced(model, prompt(9), adapted), atol=1e-5)
        with model.disable_adapter():
            inside = ask(engine, prompt(9), "inside")
        model.train()  # GPT-2 has dropout
        training = ask(engine, prompt(9), "training")
    assert np.abs(logprobs_of(bare) - forced(model.eval(), prompt(9), bare)).max() > 0.01
    assert logprobs_of(inside).tobytes() == logprobs_of(training).tobytes() == logprobs_of(adapted).tobytes()


def test_making_an_engine_changes_nothing_about_the_trainers_model() -> None:
    model = make_model().train()
    with engine_on(model):
        assert model.training and model.config._attn_implementation == "eager"
