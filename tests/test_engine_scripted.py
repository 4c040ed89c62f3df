# SPDX-License-Identifier: Apache-2.0
"""The scripted engine cuts a script as a model would be cut; stop strings are found wherever tokens split them."""

from __future__ import annotations

import time

import numpy as np
import pytest
from fakes import END, WORDS, WordTokenizer, run
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.engine.base import SamplingParams
from palestra.engine.scripted import ScriptedEngine
from palestra.engine.stops import StopFinder
from palestra.errors import ConfigError, EngineError
from palestra.model.testing import ByteTokenizer

PROMPT = np.array([65, 66], np.int32)


def sample(script, tokenizer=None, *, prompt=PROMPT, session="s", engine=None, **params):
    engine = engine or ScriptedEngine(script, tokenizer or ByteTokenizer())
    return run(engine.sample(prompt, SamplingParams(**{"max_new_tokens": 100, **params}), session=session))


def feed(pieces, stops):
    finder = StopFinder(lambda ids: "".join(pieces[i] for i in ids), stops)
    at = next((i for i in range(len(pieces)) if finder.push(i)), None)
    return at, finder


def test_mk_015_the_token_that_straddles_a_stop_string_is_stored_whole_and_cut_from_the_text():
    class Letters(WordTokenizer):
        def decode(self, ids, *, skip_special_tokens=False):
            return "".join(("a", "b", "...", "c")[i] for i in ids)

    got = sample([[0, 1, 2, 3]], Letters(), stop=("..",))
    assert got.spans[0].tokens.tolist() == [0, 1, 2]
    assert (got.text, got.finish_reason) == ("ab", "stop")
    kept = sample([[0, 1, 2, 3]], Letters(), stop=("..",), include_stop_str_in_output=True)
    assert kept.text == "ab.."


def test_mk_007_nothing_after_the_first_end_token_belongs_to_the_completion():
    got = sample([[4, 2, 9, 9]], stop_token_ids=(2,))
    assert got.spans[0].tokens.tolist() == [4, 2]
    assert got.finish_reason == "eos"


def test_mk_009_what_is_stored_is_what_was_sampled_even_when_the_text_encodes_shorter():
    words = WordTokenizer()
    he, llo = WORDS.index("he"), WORDS.index("llo")
    got = sample([[he, llo]], words, max_new_tokens=2)
    assert words.encode(got.text) == [WORDS.index("hello")]
    assert got.spans[0].tokens.tolist() == [he, llo]
    assert len(got.spans[0].logprobs) == 2


def test_the_stop_that_ends_first_wins_and_of_two_that_end_together_the_longer():
    assert feed(["xab", "c"], ["abc", "b"])[1].text() == "xa"
    assert feed(["x</", "a></", "a>"], ["a>", "</a>"])[1].text() == "x"


def test_a_stop_string_split_over_many_tokens_is_found_at_its_last_token():
    at, finder = feed(["1+1", "<", "/", "call", ">", "!"], ["</call>"])
    assert (at, finder.text(), finder.text(include_stop=True)) == (4, "1+1", "1+1</call>")


def test_without_a_stop_string_the_text_is_everything():
    at, finder = feed(["ab", "", "c"], ["zz"])
    assert (at, finder.found, finder.text()) == (None, None, "abc")


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ConfigError, match="stop string is empty"):
        StopFinder(lambda ids: "", [""])


@pytest.mark.parametrize("stop", ["好", "é)", "🙂"])
def test_a_stop_string_of_several_bytes_is_found_when_its_last_byte_comes(stop):
    said = f"ñ{stop}再见".encode()
    got = sample([list(said)], stop=(stop,))
    assert got.text == "ñ"
    assert bytes(got.spans[0].tokens.tolist()).decode() == f"ñ{stop}"


def test_a_decoder_that_drops_the_first_space_is_read_with_its_left_neighbour():
    pieces = [" a", " b", "c"]
    finder = StopFinder(lambda ids: "".join(pieces[i] for i in ids).removeprefix(" "), ["a b"])
    assert [finder.push(i) for i in range(2)] == [False, True]


def test_a_decoder_that_gives_up_a_whole_run_of_bytes_still_shows_each_character_in_its_turn():
    def decode(ids):  # as byte-fallback decoders do: one replacement per byte unless the run is all valid
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(ids)

    data = "好的再见".encode()
    finder = StopFinder(decode, ["再"])
    assert [i for i, b in enumerate(data[:9]) if finder.push(b)] == [8]
    assert finder.text() == "好的"


def test_an_unfinished_character_never_counts_as_text_for_a_stop():
    halves = "é".encode()
    at, _ = feed_bytes([*b"a", halves[0], halves[1]], ["\ufffd"])
    assert at is None


def feed_bytes(data, stops):
    finder = StopFinder(ByteTokenizer().decode, stops)
    at = next((i for i, b in enumerate(data) if finder.push(b)), None)
    return at, finder


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([*"aé好🙂".encode(), 0xFF, *b"ab"]), max_size=40),
    st.lists(st.text("abé好🙂", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_bytes_of_any_kind_stop_where_a_search_of_the_whole_text_would(data, stops):
    at, finder = feed_bytes(data, stops)
    decode = ByteTokenizer().decode
    first = next((i for i in range(len(data)) if any(s in decode(data[: i + 1]) for s in stops)), None)
    assert at == first
    if at is None:
        assert finder.text() == decode(data)
        return
    whole = decode(data[: at + 1])
    _, start = min((whole.find(s) + len(s), whole.find(s)) for s in stops if s in whole)
    assert finder.text() == whole[:start]


@pytest.mark.parametrize("data", [b"plain text, ", b"\xff", "好".encode()[:1]])
def test_the_work_per_token_does_not_grow_with_the_text(data):
    widest = 0

    def decode(ids):
        nonlocal widest
        widest = max(widest, len(ids))
        return ByteTokenizer().decode(ids)

    finder = StopFinder(decode, ["</call>"])
    for i in range(5000):
        assert not finder.push(data[i % len(data)])
    assert widest <= 12


def test_max_new_tokens_cuts_with_length():
    got = sample(["hello"], max_new_tokens=3)
    assert (got.text, got.finish_reason, len(got.spans[0])) == ("hel", "length", 3)


def test_the_context_cuts_with_length_and_a_full_one_is_refused():
    engine = ScriptedEngine(["hello", "hello"], ByteTokenizer(), max_context=4)
    got = sample(None, engine=engine)
    assert (got.text, got.finish_reason) == ("he", "length")
    with pytest.raises(EngineError, match="leaves no room in a context of 4"):
        sample(None, engine=engine, prompt=np.arange(4))


def test_a_text_is_a_whole_reply_and_ends_with_the_first_stop_id():
    got = sample(["hi"], stop_token_ids=(258, 0))
    assert got.spans[0].tokens.tolist() == [104, 105, 258]
    assert (got.text, got.finish_reason, got.spans[0].text) == ("hi", "eos", "hi<eos>")


def test_every_session_hears_the_script_from_its_start():
    engine = ScriptedEngine(["one", "two"], ByteTokenizer())
    heard = [sample(None, engine=engine, session=s).text for s in ("a", "b", "a", "b")]
    assert heard == ["one", "one", "two", "two"]
    with pytest.raises(EngineError, match=r"2 lines; session 'a' asked for one more"):
        sample(None, engine=engine, session="a")


def test_a_callable_sees_the_request_and_may_name_logprobs():
    def script(prompt, params, session):
        assert (prompt.tolist(), params.temperature, session) == ([65, 66], 0.5, "s")
        return [7, 8, 9], [-0.5, -0.25, -1.0]

    got = sample(script, temperature=0.5, max_new_tokens=2)
    assert got.spans[0].logprobs.tolist() == [-0.5, -0.25]


def test_made_up_logprobs_repeat_and_never_exceed_zero():
    one, two = sample(["hello"]).spans[0].logprobs, sample(["hello"]).spans[0].logprobs
    assert one.tolist() == two.tolist()
    assert len(set(one.tolist())) == 5 and max(one) < 0


def test_load_weights_changes_the_version_that_tokens_carry():
    engine = ScriptedEngine(["a", "b"], ByteTokenizer(), version=3)
    assert sample(None, engine=engine).spans[0].version == 3
    engine.load_weights(None, 4)
    assert sample(None, engine=engine).spans[0].version == engine.version == 4


def test_requests_and_released_sessions_are_kept_for_comparison():
    engine = ScriptedEngine(["a"], ByteTokenizer())
    sample(None, engine=engine, stop_token_ids=(258,))
    engine.release("s")
    assert engine.requests[0].sequence == [65, 66, 97, 258]
    assert engine.released == ["s"]
    assert sample(None, engine=engine).text == "a", "a released session starts anew"


def test_a_delay_is_waited_for():
    begin = time.perf_counter()
    sample(None, engine=ScriptedEngine(["a"], ByteTokenizer(), delay_s=0.05))
    assert time.perf_counter() - begin >= 0.05


def test_truncated_sampling_reports_a_kept_mass_and_full_sampling_none():
    assert sample(["ab"]).spans[0].kept_logmass is None
    assert len(sample(["ab"], top_p=0.9).spans[0].kept_logmass) == 2


def test_the_word_tokenizer_of_these_tests_does_not_round_trip():
    words = WordTokenizer()
    ids = [WORDS.index("he"), WORDS.index("llo"), END]
    assert words.encode(words.decode(ids)) != ids
