# SPDX-License-Identifier: Apache-2.0
"""Rewards for the form of a reply alone.

Give them a small weight (0.05 to 0.1), or form is learned for its own sake.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from palestra.reward.answers import boxed_contents
from palestra.reward.base import REWARDS
from palestra.reward.functions import Completion, last_message
from palestra.types import Message, Trajectory

INSIDE = r"(?:(?!</?(?:think|answer)>).)*"  # text without any of the four tags, so no block can hold a second one
THINK_ANSWER = re.compile(rf"\s*<think>{INSIDE}</think>\s*<answer>(?P<answer>{INSIDE})</answer>\s*", re.DOTALL)
END_TOKEN = re.compile(r"(?:<\|[^<>|]{1,40}\|>|</s>|<eos>|<end_of_turn>)\Z")
LONGEST = 44  # characters of an end token


def raw_texts(completions: Sequence[Completion], trajectories: Sequence[Trajectory] | None) -> list[str]:
    """The last turn as it was sampled, tags included, without end-of-turn tokens."""
    if trajectories is None:
        texts = [last_message(c) for c in completions]
    else:
        texts = [t.turns[-1].text if t.turns else "" for t in trajectories]
    return [without_end_tokens(text) for text in texts]


def _reasoning(completions: Sequence[Completion], trajectories: Sequence[Trajectory] | None) -> list[str]:
    """The reasoning of the last message, where a server or a template took it out of the text."""
    if trajectories is not None:
        last = [t.turns[-1].action if t.turns else None for t in trajectories]
    else:
        last = [
            next((m for m in reversed(c) if m.get("role") == "assistant"), None) for c in map(_messages, completions)
        ]
    return [(message or {}).get("reasoning_content") or "" for message in last]


def _messages(completion: Completion) -> Sequence[Message]:
    return () if isinstance(completion, str) else completion


def without_end_tokens(text: str) -> str:
    """The text up to the end-of-turn tokens that it ends with, however many.

    >>> without_end_tokens("done <|im_end|> </s>\\n"), without_end_tokens("done ")
    ('done', 'done ')
    """
    bare = text.rstrip()
    while found := END_TOKEN.search(bare, max(0, len(bare) - LONGEST)):
        text = bare = bare[: found.start()].rstrip()
    return text


@REWARDS.register("format")
def think_answer_format(
    completions: Sequence[Completion], trajectories: Sequence[Trajectory] | None = None, **_: Any
) -> list[float | None]:
    """1.0 when the reply is one ``<think>…</think>`` and then one ``<answer>…</answer>`` that is not blank.

    Reasoning that a message holds apart (``reasoning_content``) is put back between its tags.

    >>> think_answer_format(["<think>a\\nb</think>\\n<answer>9</answer>", "<think>a</think>9"])
    [1.0, 0.0]
    """
    raw, apart = raw_texts(completions, trajectories), _reasoning(completions, trajectories)
    whole = [f"<think>{r}</think>{t}" if r and "</think>" not in t else t for t, r in zip(raw, apart, strict=True)]
    found = [THINK_ANSWER.fullmatch(text) for text in whole]
    return [float(m is not None and bool(m["answer"].strip())) for m in found]


@REWARDS.register("boxed_format")
def boxed_format(
    completions: Sequence[Completion], trajectories: Sequence[Trajectory] | None = None, **_: Any
) -> list[float | None]:
    r"""1.0 when the last message holds exactly one complete ``\boxed{}`` that is not blank.

    >>> boxed_format(["so \\boxed{5}", "\\boxed{4} or \\boxed{5}", "\\boxed{5"])
    [1.0, 0.0, 0.0]
    """
    return [float(_one_box(text)) for text in raw_texts(completions, trajectories)]


def _one_box(text: str) -> bool:
    boxes = boxed_contents(text)
    return text.count("\\boxed") == 1 and len(boxes) == 1 and bool(boxes[0].strip())
