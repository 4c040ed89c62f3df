# SPDX-License-Identifier: Apache-2.0
"""A public test double: a tokenizer that needs no files and can say anything."""

from __future__ import annotations

from collections.abc import Sequence

_SPECIALS = ("<pad>", "<bos>", "<eos>")


class ByteTokenizer:
    """One token per UTF-8 byte (ids 0–255), then pad, bos and eos.

    It stands where a Hugging Face tokenizer is used for encoding and decoding. Text never encodes to a special
    token. Bytes that are no UTF-8 decode to U+FFFD, so decode → encode is not the identity on sampled ids.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("é!"), len(tokenizer)
    ([195, 169, 33], 259)
    >>> tokenizer.decode([33, 258]), tokenizer.decode([33, 258], skip_special_tokens=True)
    ('!<eos>', '!')
    """

    pad_token_id = 256
    bos_token_id = 257
    eos_token_id = 258
    pad_token, bos_token, eos_token = _SPECIALS
    all_special_ids = (256, 257, 258)

    def __len__(self) -> int:
        return 256 + len(_SPECIALS)

    @property
    def vocab_size(self) -> int:
        return len(self)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Text → ids; with ``add_special_tokens`` bos comes first."""
        ids = list(text.encode())
        return [self.bos_token_id, *ids] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Ids → text. Raises ValueError for an id outside the vocabulary."""
        pieces: list[str] = []
        waiting = bytearray()
        for token in map(int, ids):
            if not 0 <= token < len(self):
                raise ValueError(f"token id {token} is outside the vocabulary of {len(self)}")
            if token < 256:
                waiting.append(token)
                continue
            pieces.append(waiting.decode(errors="replace"))
            waiting.clear()
            pieces.append("" if skip_special_tokens else _SPECIALS[token - 256])
        return "".join([*pieces, waiting.decode(errors="replace")])
