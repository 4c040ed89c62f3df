# SPDX-License-Identifier: Apache-2.0
"""The demo's game for a peer: the calculator protocol, and all episodes of a step played in one ``generate``, a turn at
a time. Needs torch and a transformers model, nothing of ours; a test holds its calculator against our environment.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch

ANSWER = re.compile(r"<answer>\\boxed\{(-?\d+)\}</answer>")
CALL = re.compile(r"<call>(\w+)\(([^)]*)\)</call>")
ARGUMENTS = re.compile(r"\s*(-?\d{1,100})\s*,\s*(-?\d{1,100})\s*")
WHOLE = re.compile(r"(<call>[a-z]+\(-?\d+,-?\d+\)</call><obs>[^<]*</obs>)*<answer>\\boxed\{-?\d+\}</answer>(<eos>)?")


@dataclass
class Episode:
    """A prompt and what followed; ``mask`` is 1 where the model wrote."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    turns: int = 0
    over: bool = False


@dataclass(frozen=True)
class Player:
    """Plays episodes of at most ``turns`` turns of ``new`` tokens."""

    model: Any
    tokenizer: Any
    turns: int
    new: int

    def play(self, prompts: list[str], *, greedy: bool) -> list[Episode]:
        """All of them to their end, in step."""
        bos = self.tokenizer.bos_token_id
        episodes = [Episode([bos, *self._encode(text)]) for text in prompts]
        training = self.model.training
        self.model.eval()
        while playing := [e for e in episodes if not e.over]:
            for episode, tokens in zip(playing, self._generate(playing, greedy), strict=True):
                self._act(episode, tokens)
        self.model.train(training)
        return episodes

    def _generate(self, playing: list[Episode], greedy: bool) -> list[list[int]]:
        rows = [e.prompt + e.tokens for e in playing]
        width, pad = max(map(len, rows)), self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(r)) + r for r in rows])
        mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])
        ends = [self.tokenizer.eos_token_id, *self.tokenizer.convert_tokens_to_ids(["</call>", "</answer>"])]
        choice = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        with torch.no_grad():
            out = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=self.new,
                eos_token_id=ends,
                pad_token_id=pad,
                **choice,
            )
        return [self._cut(row, ends) for row in out[:, width:].tolist()]

    @staticmethod
    def _cut(row: list[int], ends: list[int]) -> list[int]:
        """Up to the first token that ends it, that one included."""
        end = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
        return row[: end + 1]

    def _act(self, episode: Episode, tokens: list[int]) -> None:
        """The calculator's answer to one turn; after an answer, or the last turn, the episode is over."""
        episode.tokens += tokens
        episode.mask += [1] * len(tokens)
        episode.turns += 1
        text = self.tokenizer.decode(tokens)
        episode.over = ANSWER.search(text) is not None or episode.turns >= self.turns
        if not episode.over:
            seen = self._encode(f"<obs>{result(text)}</obs>")
            episode.tokens += seen
            episode.mask += [0] * len(seen)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def result(text: str) -> str:
    """What the calculator says to a turn without an answer.

    >>> result("<call>mul(7,5)</call>"), result("hm")
    ('35', 'error: no call or answer')
    """
    call = CALL.search(text)
    if call is None:
        return "error: no call or answer"
    if call[1] not in ("add", "mul"):
        return f"error: unknown op {call[1][:20]}"
    arguments = ARGUMENTS.fullmatch(call[2])
    if arguments is None:
        return f"error: invalid args {call[2][:20]}"
    a, b = int(arguments[1]), int(arguments[2])
    return str(a + b if call[1] == "add" else a * b)


def right(text: str, answer: int) -> bool:
    """Whether the last thing said is the one right answer.

    >>> right(r"<call>add(1,2)</call><obs>3</obs><answer>\\boxed{3}</answer>", 3), right("<obs>3</obs>", 3)
    (True, False)
    """
    found = ANSWER.findall(text)
    return len(found) == 1 and int(found[0]) == answer
