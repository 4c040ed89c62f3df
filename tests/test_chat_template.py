# SPDX-License-Identifier: Apache-2.0
"""The chat-template renderer: the same tokens in training data as in rollouts, whatever the template does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chat_templates import BARE, FORGETFUL, INST, NEXT_ROLE, QWEN, SMOLLM2, TRIMMING, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AddedToken

from palestra.chat import ChatTemplateRenderer, PromptWarning, Rendered, make_renderer, spans_of
from palestra.errors import ConfigError, DataError, ModelError
from palestra.types import Author

ADD: dict[str, Any] = {
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
}
CALL: dict[str, Any] = {"id": "abc000000", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ASK: list[Any] = [{"role": "user", "content": "3+4?"}]
CALLED: list[Any] = [*ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
RESULT: list[Any] = [{"role": "tool", "content": "7", "tool_call_id": "abc000000", "name": "add"}]


def smol(**options: Any) -> ChatTemplateRenderer:
    return ChatTemplateRenderer(make_tokenizer(SMOLLM2, bos="<|im_start|>"), **options)


def qwen(template: str = QWEN, **options: Any) -> ChatTemplateRenderer:
    return ChatTemplateRenderer(make_tokenizer(template), **options)


def sampled_text(renderer: ChatTemplateRenderer, rendered: Rendered) -> str:
    pairs = zip(rendered.token_ids, rendered.sampled_mask, strict=True)
    return renderer.decode([t for t, sampled in pairs if sampled])


def body_text(renderer: ChatTemplateRenderer, rendered: Rendered, index: int) -> str:
    pairs = zip(rendered.token_ids, rendered.message_indices, strict=True)
    return renderer.decode([t for t, owner in pairs if owner == index])


def reply(renderer: ChatTemplateRenderer, text: str) -> list[int]:
    """What a model samples: the text, then the first stop id."""
    return [*renderer._tokenizer.encode(text, add_special_tokens=False), renderer.get_stop_token_ids()[0]]


# ── prompts ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_prompt_is_what_the_template_writes() -> None:
    renderer = smol()
    tokenizer = renderer._tokenizer
    expected = tokenizer.apply_chat_template(ASK, add_generation_prompt=True, return_dict=False)
    rendered = renderer.render(ASK, add_generation_prompt=True)
    assert rendered.token_ids == list(expected)
    assert body_text(renderer, rendered, 0) == "3+4?"
    assert not any(rendered.sampled_mask)


def test_a_body_that_occurs_in_the_scaffolding_is_still_found() -> None:
    renderer = smol()
    rendered = renderer.render([{"role": "system", "content": "user"}, {"role": "user", "content": "system\n"}])
    assert body_text(renderer, rendered, 0) == "user"
    assert body_text(renderer, rendered, 1) == "system\n"


def test_a_body_that_the_template_trims_is_found_in_its_trimmed_form() -> None:
    renderer = ChatTemplateRenderer(make_tokenizer(TRIMMING))
    rendered = renderer.render([{"role": "user", "content": "  hi \n"}, {"role": "user", "content": "x"}])
    assert [body_text(renderer, rendered, i) for i in (0, 1)] == ["hi", "x"]


def test_the_start_token_is_written_once() -> None:  # tk-003
    renderer = ChatTemplateRenderer(make_tokenizer(INST, bos="<s>", eos="</s>"))
    ids = renderer.render([{"role": "user", "content": "hi"}]).token_ids
    assert ids[0] == 0
    assert ids.count(0) == 1
    assert renderer.decode(ids) == "<s>[INST] hi [/INST]"


def test_spans_say_who_wrote_what() -> None:
    renderer = smol()
    spans = spans_of(renderer.render(ASK, add_generation_prompt=True), ASK, renderer.decode)
    assert [(s.author, s.role) for s in spans] == [
        (Author.TEMPLATE, "user"),
        (Author.ENV, "user"),
        (Author.TEMPLATE, "assistant"),
    ]
    assert spans[-1].text == "<|im_end|>\n<|im_start|>assistant\n"


# ── bridges ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_newline_after_the_end_of_turn_is_in_the_bridge_and_not_trained() -> None:  # tk-015
    renderer = smol(tools="system")
    bridge = renderer.bridge_to_next_turn([9], reply(renderer, "x"), RESULT)
    assert bridge is not None
    assert renderer.decode(bridge.token_ids[:1]) == "\n"
    assert bridge.message_indices[0] == -1
    assert not any(bridge.sampled_mask)
    assert renderer.decode(bridge.token_ids) == "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"


def test_a_reply_without_its_end_gets_one_as_scaffolding() -> None:
    renderer = smol()
    news: list[Any] = [{"role": "user", "content": "go on"}]
    ended = renderer.bridge_to_next_turn([9], reply(renderer, "x"), news)
    stopped = renderer.bridge_to_next_turn([9], reply(renderer, "x")[:-1], news)
    assert ended is not None
    assert stopped is not None
    assert stopped.token_ids == [renderer.get_stop_token_ids()[0], *ended.token_ids]
    assert stopped.message_indices == [-1, *ended.message_indices]


def test_an_end_token_that_swallows_white_space_swallows_the_bridges_too() -> None:
    """Phi-3's ``<|end|>`` does: its newline never reaches the model, in a prompt or between turns."""
    tokenizer = make_tokenizer(SMOLLM2)
    tokenizer.add_special_tokens({"eos_token": AddedToken("<|im_end|>", special=True, rstrip=True)})
    renderer = ChatTemplateRenderer(tokenizer)
    prompt = renderer.render(ASK, add_generation_prompt=True).token_ids
    bridge = renderer.bridge_to_next_turn(prompt, reply(renderer, "7"), ASK)
    assert bridge is not None
    sequence = [*prompt, *reply(renderer, "7"), *bridge.token_ids]
    dialogue = [*ASK, {"role": "assistant", "content": "7"}, *ASK]
    assert sequence == list(tokenizer.apply_chat_template(dialogue, add_generation_prompt=True, return_dict=False))
    assert renderer.decode(bridge.token_ids[:1]) == "<|im_start|>"


def test_any_end_id_of_the_model_closes_the_turn() -> None:  # tk-012
    renderer = ChatTemplateRenderer(make_tokenizer(SMOLLM2), extra_stop_token_ids=(1, 2))
    assert renderer.get_stop_token_ids() == [4, 1, 2]
    bridge = renderer.bridge_to_next_turn([9], [15, 1], ASK)
    assert bridge is not None
    assert renderer.decode(bridge.token_ids).startswith("\n<|im_start|>user")
    assert renderer.parse_response([*renderer._tokenizer.encode("ok"), 2]).content == "ok"


def test_an_end_that_opens_the_next_turn_is_not_written_twice() -> None:
    tokenizer = make_tokenizer(NEXT_ROLE)
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    renderer = ChatTemplateRenderer(tokenizer, extra_stop_token_ids=(user,))
    bridge = renderer.bridge_to_next_turn([9], [15, user], ASK)
    assert bridge is not None
    assert renderer.decode(bridge.token_ids) == "\n3+4?<|assistant|>\n"


def test_a_template_that_drops_reasoning_before_user_turns_only_is_extended_over_tool_results() -> None:  # ct-002
    renderer = qwen(tools="template")
    assert renderer.bridge_to_next_turn([9], reply(renderer, "x"), RESULT, tools=[ADD]) is not None


def test_a_template_that_rewrites_history_over_tool_results_is_not_extended() -> None:
    renderer = qwen(FORGETFUL, tools="template")
    assert renderer.bridge_to_next_turn([9], reply(renderer, "x"), RESULT, tools=[ADD]) is None
    fresh = renderer.render([*CALLED, *RESULT], tools=[ADD], add_generation_prompt=True)
    assert renderer.decode(fresh.token_ids).endswith("7\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_results_of_one_turn_are_merged_as_the_template_merges_them() -> None:
    renderer = qwen(tools="template")
    two: list[Any] = [*RESULT, {"role": "tool", "content": "8", "tool_call_id": "x", "name": "add"}]
    bridge = renderer.bridge_to_next_turn([9], reply(renderer, "x"), two, tools=[ADD])
    assert bridge is not None
    assert renderer.decode(bridge.token_ids) == (
        "\n<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n8\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert [body_text(renderer, bridge, i) for i in (0, 1)] == ["7", "8"]


# ── training data ───────────────────────────────────────────────────────────────────────────────────────────────


def test_replies_and_their_end_are_trained_and_nothing_else() -> None:
    renderer = smol(tools="system")
    rendered = renderer.render([*CALLED, *RESULT, {"role": "assistant", "content": "Seven."}], tools=[ADD])
    assert sampled_text(renderer, rendered) == (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>Seven.<|im_end|>'
    )


def test_what_the_template_writes_around_a_reply_is_sampled_with_it() -> None:
    renderer = ChatTemplateRenderer(make_tokenizer(INST, bos="<s>", eos="</s>"))
    rendered = renderer.render([*ASK, {"role": "assistant", "content": "7"}, *ASK])
    assert renderer.decode(rendered.token_ids) == "<s>[INST] 3+4? [/INST] 7 </s><s>[INST] 3+4? [/INST]"
    assert sampled_text(renderer, rendered) == " 7 </s>"
    assert renderer.parse_response(renderer._tokenizer.encode(" 7")).content == "7"


def test_an_empty_reasoning_block_of_the_template_is_not_trained() -> None:  # mk-003
    renderer = qwen(template_options={"enable_thinking": False})
    dialogue: list[Any] = [*ASK, {"role": "assistant", "content": "Seven."}, {"role": "user", "content": "ok"}]
    rendered = renderer.render(dialogue)
    own = np.flatnonzero(rendered.sampled_mask)
    assert renderer.decode(rendered.token_ids[: own[0]]).endswith("assistant\n<think>\n\n</think>\n\n")
    assert sampled_text(renderer, rendered) == "Seven.<|im_end|>"
    assert renderer.decode(rendered.token_ids[own[-1] + 1 :]) == "\n<|im_start|>user\nok<|im_end|>\n"


def test_a_template_without_assistant_markers_has_a_mask_all_the_same() -> None:  # mk-012
    renderer = ChatTemplateRenderer(make_tokenizer(BARE, eos="</s>"))
    rendered = renderer.render([*ASK, {"role": "assistant", "content": "7"}])
    assert renderer.decode(rendered.token_ids) == "USER:3+4?\nASSISTANT:7</s>"
    assert sampled_text(renderer, rendered) == "7</s>"


def test_a_pad_token_inside_the_response_marker_costs_no_rows() -> None:  # mk-016
    tokenizer = make_tokenizer(BARE, eos="</s>")
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(tokenizer.encode("ASSISTANT:")[-1])
    renderer = ChatTemplateRenderer(tokenizer)
    rows: list[Any] = [[*ASK, {"role": "assistant", "content": text}] for text in ("7", "seven", "no idea")]
    assert tokenizer.pad_token_id in renderer.render(rows[0]).token_ids
    assert [sampled_text(renderer, renderer.render(row)) for row in rows] == ["7</s>", "seven</s>", "no idea</s>"]


def test_padding_of_a_reply_is_kept_although_the_template_trims() -> None:  # ct-009
    renderer = ChatTemplateRenderer(make_tokenizer(TRIMMING))
    padded = "  padded reply \n"
    assert sampled_text(renderer, renderer.render([*ASK, {"role": "assistant", "content": padded}])) == (
        padded + "<|im_end|>"
    )
    assert renderer.parse_response(reply(renderer, padded)).content == padded


def test_calls_stay_in_the_message_after_they_have_run() -> None:  # ct-007
    renderer = qwen(tools="template")
    sampled = reply(renderer, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    message: Any = renderer.parse_response(sampled).message()
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    rendered = renderer.render([*ASK, message], tools=[ADD])
    assert [t for t, own in zip(rendered.token_ids, rendered.sampled_mask, strict=True) if own] == sampled


@pytest.mark.parametrize("make", [lambda: smol(tools="system"), lambda: qwen(tools="template")])
def test_arguments_as_text_and_as_mapping_render_the_same(make: Any) -> None:  # ct-008
    renderer = make()
    texts = []
    for arguments in ('{"a": 1}', {"a": 1}):
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
        message: Any = {"role": "assistant", "content": "", "tool_calls": [call]}
        texts.append(renderer.render([*ASK, message], tools=[ADD]).token_ids)
    assert texts[0] == texts[1]


# ── reasoning ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_prompt_that_opens_reasoning_is_continued_not_reopened() -> None:  # ct-003
    renderer = qwen(template_options={"open_think": True})
    sampled = reply(renderer, "3+4 makes 7.\n</think>\n\nSeven.")
    prompt = renderer.render(ASK, add_generation_prompt=True).token_ids
    text = renderer.decode([*prompt, *sampled])
    assert (text.count("<think>"), text.count("</think>")) == (1, 1)
    message: Any = renderer.parse_response(sampled).message()
    assert (message["reasoning_content"], message["content"]) == ("3+4 makes 7.", "Seven.")
    assert renderer.render([*ASK, message]).token_ids == [*prompt, *sampled]


def test_no_empty_block_stands_in_front_of_a_real_one() -> None:  # ct-004
    renderer = qwen()
    prompt = renderer.render(ASK, add_generation_prompt=True).token_ids
    sampled = reply(renderer, "<think>\nOkay\n</think>\nYes")
    rendered = renderer.render([*ASK, {"role": "assistant", "content": "<think>\nOkay\n</think>\nYes"}])
    assert rendered.token_ids == [*prompt, *sampled]
    text = renderer.decode(rendered.token_ids)
    assert text.count("<think>") == 1
    assert "<think>\n\n</think>" not in text


# ── tools ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tools_are_refused_unless_someone_said_how_they_reach_the_model() -> None:
    with pytest.raises(ConfigError, match=r"tools \(add\).*tools: template.*tools: system"):
        smol().render(ASK, tools=[ADD])


def test_a_template_that_ignores_tools_is_told_apart() -> None:
    with pytest.raises(ConfigError, match=r"no place for tools.*tools: system"):
        smol(tools="template").render(ASK, tools=[ADD])


def test_a_template_with_another_notation_of_calls_is_told_apart() -> None:
    other = QWEN.replace("<tool_call>\\n", "[CALL]").replace("\\n</tool_call>", "[/CALL]")
    with pytest.raises(ConfigError, match="notation"):
        qwen(other, tools="template").render(ASK, tools=[ADD])


def test_schemas_are_merged_into_the_system_message_that_is_there() -> None:
    renderer = smol(tools="system")
    dialogue: list[Any] = [{"role": "system", "content": "Be brief."}, *ASK]
    rendered = renderer.render(dialogue, tools=[ADD])
    text = renderer.decode(rendered.token_ids)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert text.count("<|im_start|>system") == 1
    assert '{"name": "add", "description": "Add.", "parameters"' in text
    assert body_text(renderer, rendered, 0) == "Be brief."


def test_schemas_from_a_columnar_table_reach_the_template_without_nulls() -> None:  # ct-005
    leaky = {"name": "a", "parameters": {"properties": {"x": {"type": "string"}, "y": None}}}
    for renderer in (smol(tools="system"), qwen(tools="template")):
        text = renderer.decode(renderer.render(ASK, tools=[leaky]).token_ids)
        assert '"properties": {"x": {"type": "string"}}' in text
        assert "null" not in text


def test_results_become_user_messages_where_the_template_refuses_role_tool() -> None:
    with pytest.warns(PromptWarning, match="tool_response"):
        renderer = ChatTemplateRenderer(make_tokenizer(TRIMMING), tools="system")
    bridge = renderer.bridge_to_next_turn([9], reply(renderer, "x"), [*RESULT, *RESULT])
    assert bridge is not None
    assert renderer.decode(bridge.token_ids) == (
        "\n<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert [body_text(renderer, bridge, i) for i in (0, 1)] == ["7", "7"]


# ── mistakes ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tokenizer_without_template_says_what_to_do() -> None:
    with pytest.raises(ModelError, match="no chat template; use renderer 'plain'"):
        make_renderer("chat", make_tokenizer(None))


def test_a_template_without_end_and_a_tokenizer_without_eos_are_refused() -> None:
    with pytest.raises(ModelError, match="no end-of-turn token"):
        ChatTemplateRenderer(make_tokenizer(BARE, eos=None))


# The end of a turn as ordinary text, with an end token behind it: as spelt out as [INST], and yet one can stop there.
TEXT_THEN_EOS = (
    "{% for m in messages %}{{ '<<' + m['role'] + '>>' + m['content'] + '<<end>>' }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


# The last turn ends by another token than the ones before it (as gpt-oss's), and earlier ones by none at all.
LAST_ENDS_APART = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ':' + m['content'] }}"
    "{{ ('<|im_end|>' if loop.last and m['role'] == 'assistant' else EARLIER) }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


@pytest.mark.parametrize("earlier", ["'<|im_start|>'", "''"])
def test_a_last_turn_that_ends_by_a_token_of_its_own_is_no_mistake(earlier: str) -> None:
    tokenizer = make_tokenizer(LAST_ENDS_APART.replace("EARLIER", earlier), bos="<s>", eos="<|im_end|>")
    renderer = ChatTemplateRenderer(tokenizer)
    assert renderer.decode(renderer.get_stop_token_ids()) == "<|im_end|>"


@pytest.mark.parametrize("whitespace", [False, True])
def test_an_end_of_turn_that_is_spelt_out_as_text_is_refused(whitespace: bool) -> None:
    tokenizer = make_tokenizer(SMOLLM2.replace("im_end", "turn_end"), eos="</s>")
    if whitespace:  # as some vocabularies have it; a reply must not end at each of its lines
        tokenizer.add_tokens([AddedToken("\n", normalized=False)])
    with pytest.raises(ModelError, match=r"ends a reply with '<\|turn_end\|>'.*text of \d+ tokens.*renderer 'plain'"):
        make_renderer("chat", tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn_end|>"]})
    renderer = make_renderer("chat", tokenizer)
    assert renderer.decode(renderer.get_stop_token_ids()) == "<|turn_end|></s>"


def test_turns_that_begin_with_ordinary_text_are_no_mistake_where_a_token_ends_them() -> None:
    openings_as_text = SMOLLM2.replace("im_start", "turn_start")
    for template, eos in ((openings_as_text, "<|im_end|>"), (INST, "</s>"), (TEXT_THEN_EOS, "</s>")):
        renderer = ChatTemplateRenderer(make_tokenizer(template, bos="<s>", eos=eos))
        assert renderer.decode(renderer.get_stop_token_ids()) == eos
        assert renderer.decode(renderer.render([*ASK, {"role": "assistant", "content": "7"}]).token_ids).endswith(eos)


@pytest.mark.parametrize(
    ("shown", "role"),
    [
        ("''", "user"),
        ("(message['content'] if message['role'] == 'assistant' else '')", "user"),
        ("(message['content'] if message['role'] == 'user' else '')", "assistant"),
        ("(message['content'] if loop.index0 < 2 else '')", "user"),
        ("(message['content'] | map(attribute='text') | join)", "user"),  # for content in parts
    ],
)
def test_a_template_that_leaves_out_what_is_said_is_refused(shown: str, role: str) -> None:
    with pytest.raises(ModelError, match=rf"leaves out what the {role} says.*renderer 'plain'"):
        make_renderer("chat", make_tokenizer(SMOLLM2.replace("message['content']", shown)))


def test_a_template_that_ignores_the_messages_is_refused() -> None:
    constant = "{{ bos_token }}Hello!{% if add_generation_prompt %}{{ ' Bot:' }}{% endif %}"
    with pytest.raises(ModelError, match=r"leaves out what the user says: with the message 'palestra7ask'.*<s>Hello!"):
        make_renderer("chat", make_tokenizer(constant, bos="<s>"))


def test_unknown_modes_and_unread_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'system'"):
        smol(tools="sytem")
    with pytest.raises(ConfigError, match=r"enable_thinkin.*changes nothing"):
        qwen(template_options={"enable_thinkin": False})


def test_a_dialogue_that_the_template_refuses_is_a_readable_error() -> None:
    renderer = ChatTemplateRenderer(make_tokenizer(INST, bos="<s>", eos="</s>"))
    with pytest.raises(ModelError, match="roles system, user: only user and assistant"):
        renderer.render([{"role": "system", "content": "x"}, *ASK])
    with pytest.raises(DataError, match="empty dialogue"):
        renderer.render([])


def test_a_training_row_whose_reply_the_template_rewrites_is_refused_rather_than_unmasked() -> None:  # mk-012
    renderer = qwen(FORGETFUL, tools="template")
    thought: Any = {**CALLED[1], "reasoning_content": "hm"}
    with pytest.raises(ModelError, match="rewrites the replies"):
        renderer.render([*ASK, thought, *RESULT, {"role": "assistant", "content": "7"}], tools=[ADD])


# ── the property ────────────────────────────────────────────────────────────────────────────────────────────────

RENDERERS = {
    "smollm2": smol(tools="system"),
    "qwen": qwen(tools="template"),
    "qwen, reasoning off": qwen(tools="template", template_options={"enable_thinking": False}),
    "qwen, reasoning opened": qwen(tools="template", template_options={"open_think": True}),
    "llama 2": ChatTemplateRenderer(make_tokenizer(INST, bos="<s>", eos="</s>")),
    "no end of turn": ChatTemplateRenderer(make_tokenizer(BARE, eos="</s>")),
    "trimming": ChatTemplateRenderer(make_tokenizer(TRIMMING)),
}
_TEXT = st.text(st.sampled_from("a7 \n<>|é日{}:"), max_size=12)
_TURN = st.fixed_dictionaries({"reply": _TEXT, "think": st.none() | _TEXT, "calls": st.integers(0, 2), "news": _TEXT})


def _reply_message(turn: dict[str, Any], tools: bool) -> Any:
    message: dict[str, Any] = {"role": "assistant", "content": turn["reply"]}
    if turn["think"] is not None:
        message["reasoning_content"] = turn["think"]
    if tools and turn["calls"]:
        message["tool_calls"] = [{**CALL, "id": f"abc00000{i}"} for i in range(turn["calls"])]
    return message


@pytest.mark.parametrize("name", RENDERERS)
@settings(max_examples=40, deadline=None)
@given(question=_TEXT, turns=st.lists(_TURN, min_size=1, max_size=3))
def test_training_rows_are_token_for_token_what_a_rollout_leaves(
    name: str, question: str, turns: list[dict[str, Any]]
) -> None:
    """Prompt + (completion + bridge)* == render of the dialogue, and the mask is exactly the completions."""
    renderer = RENDERERS[name]
    with_tools = renderer._tools_mode != "error"
    tools = [ADD] if with_tools else None
    dialogue: list[Any] = [{"role": "user", "content": question}]
    ids = renderer.render(dialogue, tools=tools, add_generation_prompt=True).token_ids
    mask = [False] * len(ids)
    for number, turn in enumerate(turns):
        message = _reply_message(turn, with_tools)
        close = renderer._template.close.removesuffix(renderer._template.marker)
        sampled = reply(renderer, renderer._reply_text(message, tools) + close)
        dialogue.append(message)
        ids, mask = [*ids, *sampled], [*mask, *[True] * len(sampled)]
        if number + 1 < len(turns):
            calls = message.get("tool_calls", [])
            news: list[Any] = [{"role": "tool", "content": turn["news"], "tool_call_id": c["id"]} for c in calls]
            news = news or [{"role": "user", "content": turn["news"]}]
            bridge = renderer.bridge_to_next_turn(ids, sampled, news, tools=tools)
            assert bridge is not None
            dialogue += news
            ids, mask = [*ids, *bridge.token_ids], [*mask, *bridge.sampled_mask]
    rendered = renderer.render(dialogue, tools=tools)
    assert rendered.token_ids == ids
    assert rendered.sampled_mask == mask
