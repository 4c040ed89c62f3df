# SPDX-License-Identifier: Apache-2.0
"""Scored episodes as data to train on: the best as dialogues, better against worse as preference pairs.

What is not taken is counted by reason, so that a small file explains itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.learn.advantage import SAME
from palestra.train.sample_config import DialogueSettings, PairSelection
from palestra.types import Episode, Group, Message

REASONS = {
    "failed": "failed",
    "unscored": "never scored",
    "rewritten": "with a rewritten context or several agents",
    "cut_off": "cut off in the middle of a turn",
    "below_threshold": "below the threshold",
    "repeated": "saying what a kept one says",
    "not_best": "not among the best",
    "too_few": "of a task with fewer than two usable episodes",
    "tie": "of equal reward",
    "margin": "within the margin",
    "other_prompt": "with another prompt",
    "same_reply": "saying the same",
}
"""Why an episode or a pair is left out, in words that follow a number."""


@dataclass(slots=True)
class Count:
    """How many were taken, and how many were not, by reason."""

    kept: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def line(self, unit: str) -> str:
        """For people.

        >>> Count(2, Counter(tie=3)).line("pairs")
        '2 pairs; left out: 3 of equal reward'
        """
        told = ", ".join(f"{n:,} {REASONS[reason]}" for reason, n in sorted(self.left_out.items()))
        return f"{self.kept:,} {unit}" + (f"; left out: {told}" if told else "")


def best_episodes(group: Group, settings: DialogueSettings, count: Count) -> list[Episode]:
    """The ``keep`` best-scored episodes of a group that can be imitated, best first; equals in the order of members.

    An episode that says word for word what a better one says does not count towards ``keep``.
    """
    kept: list[Episode] = []
    for episode in _usable(group, count):
        reward = _reward(episode)
        if settings.threshold is not None and reward < settings.threshold:
            count.left_out["below_threshold"] += 1
        elif any(_messages(episode) == _messages(other) for other in kept):
            count.left_out["repeated"] += 1
        elif len(kept) == settings.keep:
            count.left_out["not_best"] += 1
        else:
            kept.append(episode)
    count.kept += len(kept)
    return kept


def pairs(group: Group, settings: PairSelection, count: Count) -> list[tuple[Episode, Episode]]:
    """(better, worse) episodes of one task: the best with the worst, the second best with the second worst, and so on.

    Rewards must differ by more than the margin; a tie makes no pair, nor do two episodes that say the same.
    """
    usable = _usable(group, Count())  # what cannot be compared is missing from pairs, not left out of them
    made: list[tuple[Episode, Episode]] = []
    for i in range(settings.per_task):
        if 2 * i + 1 >= len(usable):
            if i == 0:
                count.left_out["too_few"] += 1
            break
        better, worse = usable[i], usable[-1 - i]
        gap = _reward(better) - _reward(worse)
        if gap <= SAME:
            count.left_out["tie"] += 1
        elif gap <= settings.margin:
            count.left_out["margin"] += 1
        elif _prompt(better) != _prompt(worse):
            count.left_out["other_prompt"] += 1
        elif _messages(better) == _messages(worse):
            count.left_out["same_reply"] += 1
        else:
            made.append((better, worse))
    count.kept += len(made)
    return made


def dialogue_row(episode: Episode, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One line of a dialogues file: what ``data: {name: jsonl}`` of ``palestra sft`` reads."""
    return {"messages": _messages(episode), **_tools(tools), "task": episode.task.id, "reward": _reward(episode)}


def pair_row(better: Episode, worse: Episode, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One line of a pairs file: what ``data: {name: table}`` of ``palestra prefer`` and ``reward-model`` reads."""
    prompt = _prompt(better)
    replies = {"chosen": _messages(better)[len(prompt) :], "rejected": _messages(worse)[len(prompt) :]}
    rewards = {"chosen_reward": _reward(better), "rejected_reward": _reward(worse)}
    return {"prompt": prompt, **replies, **_tools(tools), "task": better.task.id, **rewards}


def _usable(group: Group, count: Count) -> list[Episode]:
    """Scored episodes that are one whole dialogue, best first."""
    usable = []
    for episode in group.episodes:
        if episode.error is not None:
            count.left_out["failed"] += 1
        elif episode.reward is None:
            count.left_out["unscored"] += 1
        elif len(episode.trajectories) != 1:
            count.left_out["rewritten"] += 1
        elif any(turn.finish_reason == "length" for turn in episode.trajectories[0].turns):
            count.left_out["cut_off"] += 1  # to imitate it would be to learn to stop there
        else:
            usable.append(episode)
    return sorted(usable, key=lambda e: (-_reward(e), e.member))


def _reward(episode: Episode) -> float:
    assert episode.reward is not None
    return episode.reward


def _messages(episode: Episode) -> list[Message]:
    return list(episode.trajectories[0].messages)


def _prompt(episode: Episode) -> list[Message]:
    """What the environment showed before the first action."""
    return list(episode.trajectories[0].turns[0].observation)


def _tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"tools": list(tools)} if tools else {}
