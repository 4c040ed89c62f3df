# SPDX-License-Identifier: Apache-2.0
"""The built-in tokenizer and model."""

from __future__ import annotations

import random

import torch

from palestra.model.tiny import CHARACTERS, WORDS, calculator_tokenizer, tiny_llama


def test_decoding_undoes_encoding_on_the_whole_alphabet() -> None:
    tokenizer = calculator_tokenizer()
    draw = random.Random(0)
    alphabet = [*WORDS, *CHARACTERS]
    for _ in range(500):
        text = "".join(draw.choices(alphabet, k=draw.randint(0, 40)))
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_spaces_before_punctuation_and_at_the_ends_survive() -> None:
    tokenizer = calculator_tokenizer()
    text = "  error : unknown op x .\n do n't , \n"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_tags_are_one_token_and_digits_stand_alone() -> None:
    tokenizer = calculator_tokenizer()
    ids = tokenizer.encode("<call>mul(12,-3)</call><answer>\\boxed{-36}</answer>", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == [
        *("<call>", "mul", "(", "1", "2", ",", "-", "3", ")", "</call>"),
        *("<answer>", "\\boxed{", "-", "3", "6", "}", "</answer>"),
    ]


def test_encoding_does_not_undo_decoding_so_ids_must_be_kept() -> None:
    tokenizer = calculator_tokenizer()
    spelled = tokenizer.convert_tokens_to_ids(["a", "d", "d"])
    assert tokenizer.decode(spelled) == "add"
    assert tokenizer.encode("add", add_special_tokens=False) != spelled


def test_a_letter_outside_the_alphabet_is_unknown_and_never_none() -> None:
    tokenizer = calculator_tokenizer()
    assert tokenizer.encode("é", add_special_tokens=False) == [tokenizer.unk_token_id]
    assert None not in tokenizer.encode("plain é text")


def test_vocabulary_is_small_and_has_no_duplicates() -> None:
    tokenizer = calculator_tokenizer()
    assert len(tokenizer) == len(set(tokenizer.get_vocab().values())) == 72
    assert [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id] == [0, 1, 2]


def test_the_same_seed_gives_the_same_model_and_leaves_the_global_generator_alone() -> None:
    tokenizer = calculator_tokenizer()
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    one, two, other = (tiny_llama(tokenizer, seed=s) for s in (3, 3, 4))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_sizes_are_what_was_asked_for() -> None:
    tokenizer = calculator_tokenizer()
    model = tiny_llama(tokenizer, hidden=32, layers=2, heads=4, intermediate=48, max_context=64)
    # embedding 72·32, per layer 4·32² + 3·32·48 + 2·32, final norm 32; the head is the embedding
    assert sum(p.numel() for p in model.parameters()) == 72 * 32 + 2 * (4 * 32**2 + 3 * 32 * 48 + 2 * 32) + 32
    assert model.config.max_position_embeddings == 64
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, 72)
