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
from palestra.types import Trajectory

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

    >>> think_answer_format(["<think>a\\nb</think>\\n<answer>9</answer>", "<think>a</think>9"])
    [1.0, 0.0]
    """
    found = [THINK_ANSWER.fullmatch(text) for text in raw_texts(completions, trajectories)]
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
