# SPDX-License-Identifier: Apache-2.0
"""Preference data: which rows are read, what is refused, and that both replies stand behind the same prompt tokens."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import FORGETFUL, INST, QWEN, SMOLLM2, make_tokenizer
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from palestra.chat import ChatTemplateRenderer, PlainRenderer, Rendered, Renderer
from palestra.data.preferences import (
    Comparison,
    Encoded,
    Labelled,
    arithmetic_pairs,
    encode,
    fit,
    make_preferences,
    row_to_preference,
    unpaired,
)
from palestra.errors import ConfigError, DataError
from palestra.model.tiny import calculator_tokenizer

PLAIN = PlainRenderer(calculator_tokenizer())


def text(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def pair(prompt: str, chosen: str, rejected: str) -> Any:
    return row_to_preference({"prompt": prompt, "chosen": chosen, "rejected": rejected}, "row")


# Rows ------------------------------------------------------------------------------------------------------


def test_texts_become_one_message_each() -> None:
    one = pair("2+2?", "4", "5")
    assert (one.prompt, one.chosen, one.rejected) == (
        (text("user", "2+2?"),),
        (text("assistant", "4"),),
        (text("assistant", "5"),),
    )


def test_whole_dialogues_are_parted_where_their_answers_differ() -> None:
    """UltraFeedback's shape: the prompt as a text of its own, and again inside both dialogues."""
    ask, first, again = text("user", "2+2?"), text("assistant", "Hm."), text("user", "Well?")
    row = {
        "prompt": "2+2?",
        "chosen": [ask, first, again, text("assistant", "4")],
        "rejected": [ask, first, again, text("assistant", "5"), text("user", "?"), text("assistant", "6")],
    }
    one = row_to_preference(row, "row")
    assert isinstance(one, Comparison)
    assert one.prompt == (ask, first, again) and one.chosen == (text("assistant", "4"),)
    assert [m["content"] for m in one.rejected] == ["5", "?", "6"]
    without = row_to_preference({k: row[k] for k in ("chosen", "rejected")}, "row")
    assert without == Comparison(one.prompt, one.chosen, one.rejected, (), "row")


def test_a_labelled_row_and_a_pair_taken_apart() -> None:
    one = row_to_preference({"prompt": "2+2?", "completion": "5", "label": False}, "row")
    assert isinstance(one, Labelled) and one.label is False
    sides = unpaired([pair("2+2?", "4", "5"), one])
    assert [(s.completion[0]["content"], s.label) for s in sides] == [("4", True), ("5", False), ("5", False)]


def test_nulls_that_columnar_files_fill_in_are_no_keys() -> None:
    row = {"prompt": "a", "chosen": [{**text("assistant", "b"), "tool_calls": None}], "rejected": "c", "label": None}
    one = row_to_preference(row, "row")
    assert isinstance(one, Comparison) and one.chosen == (text("assistant", "b"),)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "chosen": "b"}, "f:3: needs `prompt`, `chosen` and `rejected`, or `prompt`, `completion`"),
        ({"chosen": "b", "rejected": "c"}, "f:3: no `prompt`, and `chosen` and `rejected` are replies"),
        ({"prompt": "a", "chosen": 4, "rejected": "c"}, "f:3: `chosen` is a int; give a text or a list of messages"),
        ({"prompt": "a", "chosen": [{"content": "b"}], "rejected": "c"}, "f:3: `chosen`, message 0: needs a role"),
        ({"prompt": "a", "completion": "b", "label": "yes"}, "f:3: `label` is 'yes'; write true"),
        (
            {
                "chosen": [text("user", "a"), text("assistant", "b")],
                "rejected": [text("user", "x"), text("assistant", "c")],
            },
            "f:3: `chosen` and `rejected` do not answer one prompt",
        ),
        (
            {
                "prompt": "z",
                "chosen": [text("user", "a"), text("assistant", "b")],
                "rejected": [text("user", "a"), text("assistant", "c")],
            },
            "f:3: `prompt` is not what the dialogues in `chosen` and `rejected` begin with",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_told_with_its_place(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as error:
        row_to_preference(row, "f:3")
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


# Sources ---------------------------------------------------------------------------------------------------

ROWS = [
    {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
    {"prompt": [text("user", "3+3?")], "chosen": [text("assistant", "6")], "rejected": [text("assistant", "7")]},
]


def test_jsonl_as_a_file_and_by_split(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "train.jsonl").write_text(json.dumps(ROWS[0]))
    assert len(make_preferences("table", seed=0, path=str(tmp_path))) == 1
    found = make_preferences("table", seed=0, path=str(tmp_path), split="test")
    assert [p.prompt[0]["content"] for p in found] == ["2+2?", "3+3?"]
    assert found == make_preferences("table", seed=0, path=str(tmp_path / "test.jsonl"))
    assert found[:1] == make_preferences("table", seed=0, path=str(tmp_path / "test.jsonl"), count=1)


def test_parquet_gives_what_jsonl_gives(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    whole = [row_to_preference(r, "") for r in ROWS]
    columns = [{"prompt": list(p.prompt), "chosen": list(p.replies[0]), "rejected": list(p.replies[1])} for p in whole]
    parquet.write_table(pyarrow.Table.from_pylist(columns), tmp_path / "a.parquet")
    found = make_preferences("table", seed=0, path=str(tmp_path / "a.parquet"))
    assert [(p.prompt, p.replies) for p in found] == [(p.prompt, p.replies) for p in whole]


def test_the_hub_is_asked_for_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    hub = types.ModuleType("datasets")
    hub.load_dataset = lambda *args, **kwargs: asked.append((args, kwargs)) or ROWS  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert len(make_preferences("table", seed=0, hub="org/set", split="test", count=2)) == 2
    assert asked == [(("org/set", None), {"split": "test"})]


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("tabel", {}, "unknown preference source 'tabel': did you mean 'table'"),
        ("arithmetic", {"cuont": 3}, "preference source 'arithmetic': unknown option 'cuont': did you mean 'count'"),
        ("arithmetic", {"mistake": "typo"}, "unknown mistake 'typo'"),
        ("table", {}, "give either data.path or data.hub"),
    ],
)
def test_a_source_that_cannot_be_used_is_refused(name: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_preferences(name, seed=0, **given)


def test_an_empty_file_is_refused_and_a_bad_row_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(DataError, match="preference source 'table' is empty"):
        make_preferences("table", seed=0, path=str(tmp_path / "a.jsonl"))
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(ROWS[0])}\n\n{json.dumps({'prompt': 'a'})}\n")
    with pytest.raises(DataError, match=r"a\.jsonl:3: needs `prompt`, `chosen` and `rejected`"):
        make_preferences("table", seed=0, path=str(tmp_path / "a.jsonl"))


# Generated pairs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mistake", ["wrong_last", "wrong_first", "stop_early", "operand"])
def test_of_generated_pairs_the_chosen_answer_is_right_and_the_rejected_wrong(mistake: str) -> None:
    for one in arithmetic_pairs(seed=1, count=40, mistake=mistake, max_operand=5):
        right = eval(one.prompt[0]["content"])  # the expression, by Python itself
        answers = [int(r[-1]["content"].split("{")[1].split("}")[0]) for r in one.replies]
        assert answers[0] == right != answers[1]


def test_in_generated_pairs_the_wrong_last_operation_is_the_only_choice_that_differs() -> None:
    for one in arithmetic_pairs(seed=0, count=20):
        assert one.chosen[:2] == one.rejected[:2], "the first call and its result"
        calls = [r[2]["content"].replace("add", "op").replace("mul", "op") for r in one.replies]
        assert calls[0] == calls[1] and one.chosen[2] != one.rejected[2]


def test_held_out_pairs_share_no_problem_with_those_of_training() -> None:
    prompts = [
        {p.prompt[0]["content"] for p in arithmetic_pairs(seed=0, count=400, split=s, max_operand=9)}
        for s in ("train", "test")
    ]
    assert prompts[0] and prompts[1] and not prompts[0] & prompts[1]


# Tokens ----------------------------------------------------------------------------------------------------


def merging() -> PlainRenderer:
    """x, y, z, and merges of x with what follows."""
    vocabulary = {"<unk>": 0, "x": 1, "y": 2, "z": 3, "xy": 4, "xz": 5}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[("x", "y"), ("x", "z")], unk_token="<unk>"))
    return PlainRenderer(PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>"))


def test_tk_006_prompt_and_replies_do_not_merge_at_their_boundary() -> None:
    ((one,), _) = encode([pair("x", "y", "z")], merging(), max_length=8)
    assert one.prompt.tolist() == [1] and [r.tolist() for r in one.replies] == [[2], [3]]


def test_tk_007_each_side_is_cut_by_its_own_budget() -> None:
    one = Encoded(
        np.arange(6, dtype=np.int32),
        (np.arange(5, dtype=np.int32), np.arange(2, dtype=np.int32)),
        (np.ones(5, bool), np.ones(2, bool)),
    )
    cut = fit(one, 8, "cut")
    assert cut is not None
    assert (len(cut.prompt), [len(r) for r in cut.replies]) == (6, [2, 2])
    assert fit(one, 6, "cut") is None, "nothing would be left of the replies"
    assert fit(one, 10, "drop") is None and fit(one, 11, "drop") is one


def test_a_reply_whose_trained_tokens_would_all_be_cut_away_is_not_kept() -> None:
    one = Encoded(
        np.arange(2, dtype=np.int32), (np.arange(4, dtype=np.int32),), (np.array([False, False, True, True]),)
    )
    assert fit(one, 4, "cut") is None
    kept = fit(one, 5, "cut")
    assert kept is not None and kept.trained[0].tolist() == [False, False, True]


def test_what_is_left_out_is_counted_by_reason() -> None:
    rows = [pair("1+1\n", "2", "3"), pair("1+1\n", "2", "2"), pair("1+1\n", "", "3"), pair("1+1\n", "2" * 20, "3")]
    kept, counts = encode(rows, PLAIN, max_length=10)
    assert (len(kept), counts.too_long, counts.equal, counts.empty, counts.dropped) == (1, 1, 1, 1, 3)
    kept, counts = encode(rows[3:], PLAIN, max_length=10, too_long="cut")
    assert [len(r) for r in kept[0].replies] == [5, 1] and counts.dropped == 0


def test_replies_that_are_equal_only_once_cut_are_left_out_too() -> None:
    with pytest.raises(DataError, match=r"none of the 1 preferences .* 1 with equal replies"):
        encode([pair("1+1\n", "222223", "222224")], PLAIN, max_length=8, too_long="cut")


def test_mk_011_when_nothing_is_left_it_is_an_error_and_no_run_on_nothing() -> None:
    with pytest.raises(DataError, match=r"none of the 2 preferences can be learned from: 2 too long for max_length=4"):
        encode([pair("1+1\n", "2", "3")] * 2, PLAIN, max_length=4)


@pytest.mark.parametrize("template", [SMOLLM2, QWEN, INST], ids=["smollm2", "qwen", "inst"])
def test_with_a_chat_template_prompt_plus_reply_is_the_dialogue_and_only_replies_count(template: str) -> None:
    tokenizer = make_tokenizer(template, **({"bos": "<s>", "eos": "</s>"} if template is INST else {}))
    chat: Renderer = ChatTemplateRenderer(tokenizer)
    ask = (text("user", "3+4?"), text("assistant", "7"), text("user", "5+5?"))
    one = Comparison(
        ask, (text("assistant", "10"),), (text("assistant", "eleven"), text("user", "no"), text("assistant", "10"))
    )  # type: ignore[arg-type]
    ((found,), _) = encode([one], chat, max_length=500)
    for reply, trained, messages in zip(found.replies, found.trained, one.replies, strict=True):
        whole = chat.render((*ask, *messages))
        assert [*found.prompt, *reply] == whole.token_ids
        assert trained.tolist() == whole.sampled_mask[len(found.prompt) :]
    assert "7" in chat.decode(found.prompt), "an earlier turn belongs to the prompt and is not learned"
    learned = chat.decode(found.replies[1][found.trained[1]])
    assert "eleven" in learned and "10" in learned and "no" not in learned
    assert found.replies[0][-1] == chat.get_stop_token_ids()[0] and found.trained[0][-1]


def test_a_dialogue_that_the_template_refuses_is_told_with_its_row() -> None:
    chat = ChatTemplateRenderer(make_tokenizer(FORGETFUL), tools="template")
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}]
    thinks: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls}
    prompt: Any = (text("user", "hi"), thinks, {"role": "tool", "content": "1", "tool_call_id": "a"})
    tools = ({"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}},)
    one = Comparison(prompt, (text("assistant", "x"),), (text("assistant", "y"),), tools, "a.jsonl:4")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"a\.jsonl:4: the chat template rewrites the replies"):
        encode([one], chat, max_length=500)


def test_a_prompt_that_is_written_in_another_way_when_a_reply_follows_is_refused() -> None:
    class Announces:
        """Says beforehand how many messages there are."""

        def render(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False) -> Rendered:
            return Rendered([len(messages), 9], [0, 0], [False, True])

    with pytest.raises(DataError, match="row: the chat template writes this prompt in another way"):
        encode([pair("a", "b", "c")], Announces(), max_length=9)
