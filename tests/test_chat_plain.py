# SPDX-License-Identifier: Apache-2.0
"""The plain-tag renderer: contents, concatenated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chat_templates import SMOLLM2, make_tokenizer

from palestra.chat import PlainRenderer, PromptWarning, make_renderer
from palestra.chat.base import fast_tokenizer, text_decoder, text_encoder
from palestra.errors import ConfigError
from palestra.model.tiny import calculator_tokenizer

DIALOGUE: list[Any] = [
    {"role": "user", "content": "(3+4)*5\n"},
    {"role": "assistant", "content": "<call>add(3,4)</call>"},
    {"role": "tool", "content": "<obs>7</obs>"},
]


def test_the_text_is_the_contents_and_nothing_else() -> None:
    tokenizer = make_tokenizer(None)
    rendered = PlainRenderer(tokenizer).render(DIALOGUE, add_generation_prompt=True)
    assert tokenizer.decode(rendered.token_ids) == "(3+4)*5\n<call>add(3,4)</call><obs>7</obs>"
    own = [t for t, sampled in zip(rendered.token_ids, rendered.sampled_mask, strict=True) if sampled]
    assert tokenizer.decode(own) == "<call>add(3,4)</call>"
    assert sorted(set(rendered.message_indices)) == [0, 1, 2]


def test_the_bridge_is_the_rest_of_the_rendering() -> None:
    plain = PlainRenderer(make_tokenizer(None, bos="<s>"))
    whole, before = plain.render(DIALOGUE), plain.render(DIALOGUE[:2])
    bridge = plain.bridge_to_next_turn(before.token_ids, [], DIALOGUE[2:])
    assert before.token_ids + bridge.token_ids == whole.token_ids
    assert set(bridge.message_indices) == {0}
    assert not any(bridge.sampled_mask)


def test_a_raw_prompt_gets_the_start_token_once() -> None:  # tk-005
    ids = PlainRenderer(make_tokenizer(None, bos="<s>")).render([{"role": "user", "content": "2+2="}]).token_ids
    assert ids[0] == 0
    assert ids.count(0) == 1


def test_a_start_token_that_is_already_written_is_not_written_again() -> None:  # tk-003
    ids = PlainRenderer(make_tokenizer(None, bos="<s>")).render([{"role": "user", "content": "<s>hi"}]).token_ids
    assert ids[0] == 0
    assert ids.count(0) == 1


def test_without_a_start_token_there_is_none_in_the_ids() -> None:  # tk-004
    plain = PlainRenderer(make_tokenizer(None, bos=None, eos=None))
    ids = plain.render([{"role": "user", "content": "hi"}]).token_ids
    assert all(isinstance(i, int) for i in ids)
    assert 0 not in ids
    assert plain.get_stop_token_ids() == []


def test_every_end_id_of_the_model_ends_a_turn() -> None:  # tk-012
    tokenizer = make_tokenizer(None, eos="</s>")
    plain = PlainRenderer(tokenizer, extra_stop_token_ids=(4, 1))
    assert plain.get_stop_token_ids() == [1, 4]
    assert plain.parse_response([*tokenizer.encode("ok"), 4]).content == "ok"


def test_text_is_not_searched_for_tool_calls() -> None:
    tokenizer = make_tokenizer(None)
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parsed = PlainRenderer(tokenizer).parse_response(tokenizer.encode(text))
    assert parsed.message() == {"role": "assistant", "content": text}


def test_a_chat_tuned_model_with_raw_text_is_warned_about() -> None:  # ct-010
    with pytest.warns(PromptWarning, match="chat template"):
        PlainRenderer(make_tokenizer(SMOLLM2))


def test_tools_are_refused() -> None:
    with pytest.raises(ConfigError, match="choose renderer 'chat'"):
        PlainRenderer(make_tokenizer(None)).render(DIALOGUE, tools=[{"name": "add"}])


def test_a_mistyped_option_names_the_right_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'extra_stop_token_ids'"):
        make_renderer("plain", make_tokenizer(None), extra_stop_tokens=(1,))


@pytest.mark.parametrize("short", [True, False])
def test_text_and_ids_are_those_of_the_tokenizer_by_the_short_way_and_by_the_long(short: bool) -> None:
    tokenizer = calculator_tokenizer()
    tokenizer.clean_up_tokenization_spaces = not short  # then transformers does more than the fast tokenizer
    assert (fast_tokenizer(tokenizer) is not None) == short
    text = "<call>add(1,2)</call>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert text_encoder(tokenizer)(text) == ids
    ids.append(tokenizer.eos_token_id)
    assert text_decoder(tokenizer)(np.array(ids, np.int32)) == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_tokenizer_that_cuts_its_texts_is_not_taken_by_the_short_way() -> None:
    tokenizer = calculator_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    assert fast_tokenizer(tokenizer) is None
    assert len(text_encoder(tokenizer)("123456789")) == 9, "transformers lifts the limit when none is asked for"
