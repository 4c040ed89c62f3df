# SPDX-License-Identifier: Apache-2.0
"""The built-in model: a word-and-character tokenizer for the calculator and a small Llama, both made in code."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Any, cast

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
WORDS = ("<call>", "</call>", "<answer>", "</answer>", "<obs>", "</obs>", "\\boxed{", "add", "mul")
"""What the calculator's protocol says in one breath: one token each."""
CHARACTERS = string.digits + string.ascii_lowercase + "+-*/(),= \n:.;?!_'\"<>{}\\"
"""Everything else is written letter by letter; what is missing here becomes ``<unk>``."""


def calculator_tokenizer() -> PreTrainedTokenizerFast:
    r"""A tokenizer of 72 entries in which the calculator's tags are single tokens and digits stand alone.

    On its alphabet decoding undoes encoding. The reverse does not hold, as with any real tokenizer: a model may
    write ``a``, ``d``, ``d`` where the encoder would have written ``add``.

    >>> tokenizer = calculator_tokenizer()
    >>> ids = tokenizer.encode("<call>add(3,14)</call>", add_special_tokens=False)
    >>> tokenizer.convert_ids_to_tokens(ids)
    ['<call>', 'add', '(', '3', ',', '1', '4', ')', '</call>']
    >>> tokenizer.decode(ids)
    '<call>add(3,14)</call>'
    """
    vocabulary = {token: i for i, token in enumerate((PAD, BOS, EOS, UNK, *WORDS, *CHARACTERS))}
    core = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    words = "|".join(w.replace("\\", "\\\\").replace("{", "\\{") for w in WORDS)
    core.pre_tokenizer = Split(Regex(rf"{words}|[\s\S]"), behavior="isolated")
    core.decoder = Fuse()
    wrap: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = wrap(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )
    return tokenizer


def tiny_llama(
    tokenizer: PreTrainedTokenizerBase,
    *,
    hidden: int = 96,
    layers: int = 3,
    heads: int = 3,
    intermediate: int = 256,
    max_context: int = 256,
    seed: int = 0,
) -> LlamaForCausalLM:
    """A Llama of about 0.34 M parameters with random weights and tied embeddings; the global RNG is left alone.

    >>> tokenizer = calculator_tokenizer()
    >>> model = tiny_llama(tokenizer)
    >>> sum(p.numel() for p in model.parameters())
    339360
    >>> model.lm_head.weight is model.model.embed_tokens.weight
    True
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_context,
        tie_word_embeddings=True,
        initializer_range=hidden**-0.5,  # 0.02, made for wide models, costs this narrow one half of its warm-up
        pad_token_id=cast(int, tokenizer.pad_token_id),
        bos_token_id=cast(int, tokenizer.bos_token_id),
        eos_token_id=cast(int, tokenizer.eos_token_id),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return cast(LlamaForCausalLM, cast(nn.Module, LlamaForCausalLM(config)).eval())


__all__ = ["calculator_tokenizer", "tiny_llama"]
