# SPDX-License-Identifier: Apache-2.0
"""One line of numbers and one verdict for each episode of an evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

from palestra.eval.equations import Operation, equations, operations_of
from palestra.eval.evaluate import value_of
from palestra.eval.mistakes import Reply, classify, difficulty, question_of
from palestra.reward.answers import extract_answer, to_number
from palestra.reward.functions import count_steps
from palestra.types import Episode, Group, StopReason, Task, Trajectory

RIGHT = 1.0
"""The value of the metric from which an episode counts as right."""
_NAMES = {"add": "+", "plus": "+", "sub": "-", "minus": "-", "mul": "*", "times": "*", "div": "/"}


@dataclass(frozen=True, slots=True)
class Example:
    """One episode, counted.

    value: of the metric; None = not scored. right: value >= 1. prediction: the answer that was read; gold: the task's.
    kind, rule: of a wrong one's mistake. difficulty: the task's steps. tokens, characters: written by the model. steps:
    written ones, equations or tool calls, whichever are more. tool_failures: calls that failed, were refused or could
    not be read. seconds: wall-clock. error: why the episode failed, then everything else is empty. rewards: by part.
    """

    task: str
    member: int
    question: str
    gold: str | None
    value: float | None = None
    right: bool | None = None
    prediction: str | None = None
    kind: str | None = None
    rule: str | None = None
    difficulty: int | None = None
    tokens: int = 0
    characters: int = 0
    steps: int = 0
    turns: int = 0
    tool_calls: int = 0
    tool_failures: int = 0
    seconds: float = 0.0
    stop: str = ""
    error: str | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    text: str = ""

    def to_json(self) -> str:
        """One line of ``examples.jsonl``."""
        return json.dumps(asdict(self), ensure_ascii=False)


def examples_of(groups: Sequence[Group], metric: str) -> list[Example]:
    """An example for each episode, in the order of the groups."""
    return [example_of(group.task, episode, metric) for group in groups for episode in group.episodes]


def example_of(task: Task, episode: Episode, metric: str) -> Example:
    """What one scored episode amounts to. Of several trajectories the last holds the end."""
    gold = None if task.answer is None else str(task.answer)
    question = " ".join(question_of(task).split())
    if episode.error is not None or not episode.trajectories:
        error = episode.error or "no turn was played"
        return Example(task.id, episode.member, question, gold, error=error, difficulty=difficulty(task))
    last = episode.trajectories[-1]
    text, value = written(last), value_of(episode, metric)
    right = None if value is None else value >= RIGHT
    answer = prediction(task, last)
    mistake = None
    if right is False:
        mistake = classify(task, Reply(text, answer, _without_answer(last), tuple(_tool_operations(last))))
    calls = sum(t.tool_calls for t in episode.trajectories)
    names = dict.fromkeys(name for t in episode.trajectories for name in t.rewards)
    return Example(
        task=task.id,
        member=episode.member,
        question=question,
        gold=gold,
        value=value,
        right=right,
        prediction=answer,
        kind=mistake.kind if mistake else None,
        rule=mistake.rule if mistake else None,
        difficulty=difficulty(task),
        tokens=sum(t.sampled_tokens for t in episode.trajectories),
        characters=sum(len(turn.text) for t in episode.trajectories for turn in t.turns),
        steps=max(count_steps(text), len(equations(text)), calls),
        turns=sum(len(t.turns) for t in episode.trajectories),
        tool_calls=calls,
        tool_failures=_tool_failures(episode),
        seconds=float(episode.timings.get("total_s", 0.0)),
        stop=episode.stop.value,
        rewards={name: v for name in names if (v := value_of(episode, name)) is not None},
        text=text,
    )


def written(trajectory: Trajectory) -> str:
    """All that the model wrote, reasoning included, one line break between turns."""
    said = [m for t in trajectory.turns for m in (t.action.get("reasoning_content"), t.action.get("content")) if m]
    return "\n".join(said)


def prediction(task: Task, trajectory: Trajectory) -> str | None:
    """The answer that the last turn gives, as the rewards read it; None where the episode ended without one."""
    if _without_answer(trajectory) is not None:
        return None
    mode = str(task.meta.get("mode") or ("math" if "\\" in str(task.answer) else "numeric"))
    return extract_answer(str(trajectory.turns[-1].action.get("content") or ""), mode)


def error_of(example: Example) -> tuple[float, float] | None:
    """(|prediction - gold|, the same as a share of |gold|); None unless both are numbers. Any error on a gold of 0 is
    infinite as a share.

    >>> error_of(Example("t", 0, "", "72", prediction="72.5")), error_of(Example("t", 0, "", "72"))
    ((0.5, 0.006944444444444444), None)
    """
    gold = None if example.gold is None else to_number(example.gold)
    said = None if example.prediction is None else to_number(example.prediction)
    if gold is None or said is None:
        return None
    off = 0.0 if example.right else abs(said - gold)  # 25 is right for 0.25 where it said 25%
    return off, off / abs(gold) if gold else (0.0 if off == 0 else float("inf"))


def _without_answer(trajectory: Trajectory) -> str | None:
    """How the episode ended, where that was not with an answer."""
    if not trajectory.turns:
        return "no turn was played"
    last = trajectory.turns[-1]
    if trajectory.stop is StopReason.ENV_TERMINATED:
        return None
    if last.finish_reason == "length":
        return "the reply was cut off by the length limit"
    return f"the episode ended by {trajectory.stop.value.replace('_', ' ')}"


def _tool_failures(episode: Episode) -> int:
    """Failed and unreadable calls as the environment counts them, refused ones, and one that ended the episode."""
    failed = sum(int(turn.info.get("tool_errors", 0)) for t in episode.trajectories for turn in t.turns)
    fatal = int(episode.stop is StopReason.TOOL_FAILURE)
    return max(failed, int(episode.info.get("tool_calls_refused", 0))) + fatal


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _tool_operations(trajectory: Trajectory) -> Iterator[Operation]:
    """The arithmetic in structured calls: ``add(a=3, b=4)`` by its name, ``calculate("12 * 7")`` by its text."""
    for turn in trajectory.turns:
        for call in turn.action.get("tool_calls") or ():
            function = call.get("function", {})
            given = function.get("arguments")
            try:
                values = json.loads(given) if isinstance(given, str) else given
            except (ValueError, RecursionError):
                continue
            values = list(values.values()) if isinstance(values, dict) else []
            symbol = next((s for n, s in _NAMES.items() if str(function.get("name", "")).startswith(n)), None)
            if symbol and len(values) == 2 and all(map(_is_number, values)):
                operation = Operation(symbol, *(Fraction(str(v)) for v in values))
                yield from [operation] if symbol != "/" or operation.right else []
            for text in values:
                yield from operations_of(text) if isinstance(text, str) else ()
