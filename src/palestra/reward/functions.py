# SPDX-License-Identifier: Apache-2.0
"""The built-in reward functions: accuracy, length, steps, partial credit and their combination.

Length and steps count only when the answer is right, and never push a right answer below a wrong one (0.0).
Values are not forced into 0–1: a weight and the group's mean take care of the scale.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from palestra.errors import ConfigError
from palestra.reward.answers import extract_answer, is_correct, to_number
from palestra.reward.base import FACTORIES, REWARDS, RewardFunction
from palestra.types import Message, Trajectory

Completion = str | Sequence[Message]
Rows = Sequence[Any]

STEP = re.compile(r"[\s*#>]*(?:step\s+\d+\W{0,3}[:.)]|\d+[.)]\s|第\s*\d+\s*步|步骤\s*\d+)", re.IGNORECASE)
CALCULATION = re.compile(r"<<[^<>=]+=[^<>]*>>")


def last_message(completion: Completion) -> str:
    """The text in which an answer is looked for: a string as it is, of messages the last assistant one.

    >>> last_message([{"role": "assistant", "content": "5"}, {"role": "tool", "content": "7"}])
    '5'
    """
    if isinstance(completion, str):
        return completion
    said = [m for m in completion if m.get("role") == "assistant"]
    return said[-1].get("content") or "" if said else ""


def written(completion: Completion) -> str:
    """All that the model wrote in the completion, its reasoning too where a message holds that apart.

    >>> written([{"role": "assistant", "reasoning_content": "3+4 makes 7", "content": "7"}])
    '3+4 makes 7\\n7'
    """
    if isinstance(completion, str):
        return completion
    said = [m for m in completion if m.get("role") == "assistant"]
    return "\n".join(
        text for m in said for text in (m.get("reasoning_content"), m.get("content") or "") if text is not None
    )


def replies(completion: Completion) -> str:
    """What a reader is shown of the completion: without the reasoning that a message holds apart."""
    if isinstance(completion, str):
        return completion
    return "\n".join(m.get("content") or "" for m in completion if m.get("role") == "assistant")


def final_texts(completions: Sequence[Completion], trajectories: Sequence[Trajectory] | None) -> list[str]:
    """The last message of each completion; from the last turn where trajectories are known, so that an answer
    written in an earlier turn of a text environment does not count."""
    if trajectories is None:
        return [last_message(c) for c in completions]
    return [(t.turns[-1].action.get("content") or "") if t.turns else "" for t in trajectories]


@REWARDS.register("accuracy")
def accuracy(
    completions: Sequence[Completion],
    answer: Rows,
    mode: Sequence[str] | None = None,
    trajectories: Sequence[Trajectory] | None = None,
    **_: Any,
) -> list[float | None]:
    """1.0 when the last assistant message gives the right answer, 0.0 when not, None where there is no gold.

    ``mode`` is a column of the data: numeric (the default), boxed or math.

    >>> accuracy(["The answer is 72.", "#### 71"], answer=["72", 72])
    [1.0, 0.0]
    """
    return verdicts(completions, answer, mode, trajectories)


def verdicts(
    completions: Sequence[Completion],
    answer: Rows,
    mode: Sequence[str] | None = None,
    trajectories: Sequence[Trajectory] | None = None,
) -> list[float | None]:
    """What :func:`accuracy` returns."""
    modes = mode or ["numeric"] * len(completions)
    texts = final_texts(completions, trajectories)
    return [
        None if gold is None else float(is_correct(text, str(gold), how))
        for text, gold, how in zip(texts, answer, modes, strict=True)
    ]


def count_steps(text: str) -> int:
    """Written steps: "Step n:" markers, numbered lines, or ``<<…=…>>`` calculations; newlines are no steps.

    A marked line with a calculation in it is one step, a line with two calculations is two.

    >>> count_steps("Step 1: halve it\\nStep 2: <<48/2=24>>24\\n\\n\\nso <<24+48=72>>72")
    3
    """
    return sum(max(STEP.match(line) is not None, len(CALCULATION.findall(line))) for line in text.splitlines())


def model_tokens(trajectory: Trajectory) -> int:
    """Length for penalties: the tokens the model wrote, not the tool output between them."""
    return trajectory.sampled_tokens


def _lengths(unit: str, completions: Sequence[Completion], trajectories: Sequence[Trajectory] | None) -> list[int]:
    if unit == "characters":
        return [len(written(c)) for c in completions]
    if trajectories is None:
        raise ConfigError("a length in tokens needs trajectories; choose unit: characters for plain completions")
    return [model_tokens(t) for t in trajectories]


Increment = Callable[[Sequence[Completion], Sequence[Trajectory] | None], list[float]]


def _over(target: int, alpha: float, unit: str) -> Increment:
    if unit not in ("characters", "tokens"):
        raise ConfigError(f"length_penalty: unit is {unit!r}; choose 'characters' or 'tokens'")

    def increments(completions: Sequence[Completion], trajectories: Sequence[Trajectory] | None) -> list[float]:
        return [-alpha * max(0, n - target) for n in _lengths(unit, completions, trajectories)]

    return increments


def _steps(beta: float, max_steps: int) -> Increment:
    def increments(completions: Sequence[Completion], trajectories: Sequence[Trajectory] | None) -> list[float]:
        return [beta * min(max_steps, count_steps(written(c))) for c in completions]

    return increments


def _with_accuracy(parts: Sequence[tuple[float, Increment]], weight: float = 1.0) -> RewardFunction:
    def reward(
        completions: Sequence[Completion],
        answer: Rows,
        mode: Sequence[str] | None = None,
        trajectories: Sequence[Trajectory] | None = None,
        **_: Any,
    ) -> list[float | None]:
        right = verdicts(completions, answer, mode, trajectories)
        columns = [[w * v for v in part(completions, trajectories)] for w, part in parts]
        added = [sum(row) for row in zip(*columns, strict=True)]
        return [max(0.0, weight + more) if ok else ok for ok, more in zip(right, added, strict=True)]

    return reward


@FACTORIES.register("length_penalty")
def length_penalty(target: int = 200, alpha: float = 0.001, unit: str = "characters") -> RewardFunction:
    """Accuracy − α · max(0, length − target) when right, else 0; length in characters or in sampled tokens.

    >>> length_penalty(target=200)(completions=["#### 7" + " " * 494], answer=["7"])
    [0.7]
    """
    return _with_accuracy([(1.0, _over(target, alpha, unit))])


@FACTORIES.register("step")
def step(beta: float = 0.1, max_steps: int = 10) -> RewardFunction:
    """Accuracy + β · steps when right, else 0; at most ``max_steps`` are counted, so that steps cannot be farmed.

    >>> step()(completions=["1. a\\n2. b\\n3. c\\n#### 7"], answer=["7"])
    [1.3]
    """
    return _with_accuracy([(1.0, _steps(beta, max_steps))])


@FACTORIES.register("combined")
def combined(
    accuracy_weight: float = 1.0,
    length_weight: float = 1.0,
    step_weight: float = 1.0,
    target: int = 200,
    alpha: float = 0.001,
    unit: str = "characters",
    beta: float = 0.1,
    max_steps: int = 10,
) -> RewardFunction:
    """The three increments, weighted: right, minus the length over target, plus steps; 0 when wrong.

    >>> text = "1. a\\n2. b\\n3. c\\n#### 7"
    >>> [round(v, 9) for v in combined()(completions=[text.ljust(300)], answer=["7"])]
    [1.2]
    """
    return _with_accuracy(
        [(length_weight, _over(target, alpha, unit)), (step_weight, _steps(beta, max_steps))], accuracy_weight
    )


BANDS = ((0.01, 1.0), (1.0, 0.8), (5.0, 0.5))


@FACTORIES.register("partial_credit")
def partial_credit(bonus: float = 0.1) -> RewardFunction:
    """By absolute error: below 0.01 → 1.0, below 1 → 0.8, below 5 → 0.5, else 0; at most 1.0 with the ``bonus``.

    What accuracy calls right earns 1.0, in every ``mode``. ``bonus`` is added where steps are shown and the answer is
    within a band: an equals sign next to a wrong answer earns nothing.

    >>> partial_credit()(completions=["#### 72", "#### 71.5", "1. x\\n#### 69", "1. x = 5"], answer=["72"] * 4)
    [1.0, 0.8, 0.6, 0.0]
    """

    def reward(
        completions: Sequence[Completion],
        answer: Rows,
        mode: Sequence[str] | None = None,
        trajectories: Sequence[Trajectory] | None = None,
        **_: Any,
    ) -> list[float | None]:
        texts = final_texts(completions, trajectories)
        modes = mode or ["numeric"] * len(completions)
        return [
            None if gold is None else _band(text, written(whole), str(gold), how, bonus)
            for text, whole, gold, how in zip(texts, completions, answer, modes, strict=True)
        ]

    return reward


def _band(text: str, whole: str, gold: str, mode: str, bonus: float) -> float:
    if is_correct(text, gold, mode):
        return 1.0  # 25% for 0.25, and what is no number at all
    value, target = to_number(extract_answer(text, mode) or ""), to_number(gold)
    if value is None or target is None:
        return 0.0
    error = abs(value - target)
    credit = next((c for limit, c in BANDS if error < limit), 0.0)
    return min(1.0, credit + bonus) if credit and count_steps(whole) else credit


@FACTORIES.register("soft_overlong")
def soft_overlong(max_len: int, cache: int) -> RewardFunction:
    """DAPO's length ramp (arXiv:2503.14476, eq. 13): 0 up to max_len − cache sampled tokens, −1 from max_len on.

    The config of a run may leave both out: ``max_len`` is then what an episode may sample, ``cache`` a fifth of it.

    >>> soft_overlong(20, 4)(completion_ids=[[0] * n for n in (16, 17, 20)])
    [0.0, -0.25, -1.0]
    """
    overlong_penalty(0, max_len, cache)  # limits that do not fit are refused before anything is sampled

    def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
        return [overlong_penalty(len(ids), max_len, cache) for ids in completion_ids]

    return reward


def overlong_penalty(length: int, max_len: int, cache: int) -> float:
    """The ramp of :func:`soft_overlong` at one length. Raises ConfigError unless 0 < cache <= max_len.

    >>> [overlong_penalty(n, 20, 4) for n in (10, 16, 17, 18, 20, 21)]
    [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    """
    if not (isinstance(max_len, int) and isinstance(cache, int) and 0 < cache <= max_len):
        raise ConfigError(f"soft_overlong: cache must be in 1..max_len, got cache {cache!r} and max_len {max_len!r}")
    return min(0.0, max(-1.0, (max_len - cache - length) / cache))


for _name in ("length_penalty", "step", "combined", "partial_credit"):
    REWARDS.register(_name)(FACTORIES[_name]())
