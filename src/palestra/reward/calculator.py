# SPDX-License-Identifier: Apache-2.0
r"""Rewards of the calculator environment: is the answer right, is the form kept.

Both look only at what the model itself wrote, never at observations, where a right number may stand by accident.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from palestra.reward.answers import to_number
from palestra.reward.base import REWARDS
from palestra.types import Trajectory

# What the environment reads too. A hundred digits are more than any task has, and less than Python's limit for
# converting text to integers.
INTEGER = r"-?[0-9]{1,100}"
ANSWER = re.compile(rf"<answer>\\boxed\{{({INTEGER})\}}</answer>")
CALL = re.compile(rf"<call>\w+\(\s*{INTEGER}\s*,\s*{INTEGER}\s*\)</call>")


@REWARDS.register("calculator_accuracy")
def calculator_accuracy(trajectories: Sequence[Trajectory], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1.0 when the last turn gives exactly one answer and it is the right number, else 0.0."""
    return [float(_equal(given_answer(t), gold)) for t, gold in zip(trajectories, answer, strict=True)]


@REWARDS.register("calculator_format")
def calculator_format(trajectories: Sequence[Trajectory], **_: Any) -> list[float | None]:
    """1.0 when the episode ends with exactly one well-formed answer and every call before it is well formed."""
    return [float(_kept_form(t)) for t in trajectories]


def _equal(given: int | None, gold: Any) -> bool:
    right = gold if isinstance(gold, int | float) else to_number(str(gold))
    if right is None:
        raise ValueError(f"the answer {gold!r} is no number")
    return given == right


def given_answer(trajectory: Trajectory) -> int | None:
    """The number in the last turn's ``<answer>``; None when there is none or more than one."""
    text = trajectory.turns[-1].text if trajectory.turns else ""
    found = ANSWER.findall(text)
    return int(found[0]) if len(found) == 1 and text.count("<answer>") == 1 else None


def _kept_form(trajectory: Trajectory) -> bool:
    if given_answer(trajectory) is None:
        return False
    *before, last = (t.text for t in trajectory.turns)
    ends = re.search(r"</answer>\s*(<[^<>]*>\s*)?$", last) is not None  # an end-of-turn token may follow
    once = all(t.count("<call>") == 1 == len(CALL.findall(t)) and "<answer>" not in t for t in before)
    return ends and once and "<call>" not in last
