# SPDX-License-Identifier: Apache-2.0
"""A local model as judge, without a server: built by hand, so that what it says is known."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from chat_templates import SMOLLM2, make_tokenizer

from palestra.errors import ConfigError, ModelError
from palestra.reward.build import make_rubric
from palestra.reward.judge import judge, judge_pairwise
from palestra.reward.local_chat import LocalChat, TooLongError

TOKENIZER = make_tokenizer(SMOLLM2)


def speaker(folder: Path, reply: str, *, ends: bool = True) -> str:
    """A model whose next token depends on the last one alone: attention and MLP are zero, each token's embedding is a
    direction of its own, and the head sends it to its successor. After the generation prompt it says ``reply``."""
    size = len(TOKENIZER) + len(TOKENIZER) % 2
    config = hf.LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=TOKENIZER.eos_token_id,
    )
    model: Any = hf.LlamaForCausalLM(config)
    opening = TOKENIZER.encode("<|im_start|>assistant\n", add_special_tokens=False)[-1]
    said = TOKENIZER.encode(reply, add_special_tokens=False)
    chain = [opening, *said, TOKENIZER.eos_token_id if ends else opening]
    assert len({*chain}) == len(said) + 1 + ends, "no token twice, or the chain would branch"
    with torch.no_grad():
        for p in model.model.layers.parameters():
            p.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.zero_()
        for token, following in pairwise(chain):
            model.lm_head.weight[following, token] = 1.0
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def test_it_says_what_the_model_says_up_to_its_end_of_turn(tmp_path: Path) -> None:
    chat = LocalChat(path=speaker(tmp_path, "Score: 8"), device="cpu", max_tokens=20).load()
    assert chat([{"role": "user", "content": "How good is 4?"}]) == "Score: 8"


def test_as_a_judge_its_score_is_the_reward(tmp_path: Path) -> None:
    endpoint = {"path": speaker(tmp_path, "Score: 8"), "device": "cpu", "max_tokens": 20}
    reward = judge(endpoint, scale=(0, 10))
    assert reward(prompts=["2+2?", "2+2?"], completions=["4", "5"], answer=["4", "4"]) == [0.8, 0.8]
    rubric = make_rubric({"clear": {"function": "judge", "endpoint": endpoint}}, chat=True)
    assert list(rubric.functions) == ["clear"]


def test_a_local_judge_that_loves_a_position_prefers_nobody(tmp_path: Path) -> None:
    endpoint = {"path": speaker(tmp_path, "Verdict: A"), "device": "cpu", "max_tokens": 20}
    assert judge_pairwise(endpoint)(prompts=["?"] * 2, completions=["4", "5"], answer=["4"] * 2) == [0.5, 0.5]


def test_a_reply_without_end_is_cut_and_a_prompt_without_room_is_a_failure_of_that_one(tmp_path: Path) -> None:
    path = speaker(tmp_path, "Score: 8", ends=False)
    cut = TOKENIZER.decode(TOKENIZER.encode("Score: 8", add_special_tokens=False)[:3])
    assert LocalChat(path=path, device="cpu", max_tokens=3).load()([{"role": "user", "content": "?"}]) == cut.strip()
    chat = LocalChat(path=path, device="cpu", max_tokens=500).load()
    with pytest.raises(TooLongError, match=r"to read and 500 to write do not fit into the 512"):
        chat([{"role": "user", "content": "?"}])
    (failed,) = judge({"path": path, "max_tokens": 500})(prompts=["?"], completions=["4"], answer=["4"])
    assert isinstance(failed, TooLongError)


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file or directory"):
        judge({"path": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match="unknown key 'url'"):
        judge({"path": "models/judge", "url": "http://localhost"})
    with pytest.raises((ConfigError, ModelError), match="chat template"):
        judge({"path": "builtin:calculator", "device": "cpu"})
