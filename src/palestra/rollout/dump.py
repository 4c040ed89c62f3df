# SPDX-License-Identifier: Apache-2.0
"""Groups ⇄ JSON lines: the rollouts files of a run, and what the viewer reads.

One line per group, ``"format": 1``; tokens, log-probs, spans, texts, messages, rewards, stops and versions come
back exactly as they were.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from palestra.config import FORMAT
from palestra.errors import DataError
from palestra.run.files import sync
from palestra.run.view import read_groups
from palestra.types import Author, Episode, Group, RewardTerm, Span, StopReason, Task, Trajectory, Turn

Advantages = Sequence[Sequence[float | None]]
"""One number (or None) per trajectory of each episode of a group."""


def group_to_dict(group: Group, advantages: Advantages | None = None) -> dict[str, Any]:
    """A group as plain data. ``advantages`` are written beside the trajectories for the viewer; learning knows
    them, an episode does not, so :func:`group_from_dict` leaves them out.

    >>> group_to_dict(Group(Task("t1", "2+2?", 4), 7, ()))["task"]["id"]
    't1'
    """
    shares = advantages if advantages is not None else [[None] * len(e.trajectories) for e in group.episodes]
    return {
        "format": FORMAT,
        "draw": group.draw,
        "task": _task_to_dict(group.task),
        "episodes": [_episode_to_dict(e, share) for e, share in zip(group.episodes, shares, strict=True)],
    }


def group_from_dict(data: Mapping[str, Any], where: str = "rollouts") -> Group:
    """The group again. Raises DataError, naming ``where``, for a format this version does not know or a field that
    is missing."""
    if data.get("format") != FORMAT:
        raise DataError(
            f"{where}: rollouts of format {data.get('format')!r}; this version reads format {FORMAT}. "
            "Read them with the version of palestra that wrote them"
        )
    try:
        task = _task_from_dict(data["task"])
        return Group(task, data["draw"], tuple(_episode_from_dict(e, task) for e in data["episodes"]))
    except KeyError as missing:
        raise DataError(f"{where}: field {missing} is missing; the file is no rollouts file of palestra") from missing
    except (TypeError, ValueError, AttributeError, OverflowError) as wrong:
        raise DataError(f"{where}: {wrong}; the file is no rollouts file of palestra") from wrong


def to_line(group: Group, advantages: Advantages | None = None) -> str:
    """A group as one line of JSON. What learning reads comes back by :func:`from_line` to the last bit; what JSON has
    no word for, in a task's columns or an info, as its repr.

    >>> from_line(to_line(Group(Task("t1", "2+2?", 4), 7, ()))).id
    '7:t1'
    """
    data = group_to_dict(group, advantages)
    try:
        return json.dumps(data, ensure_ascii=False, default=_plain)
    except TypeError:  # a key that is no text
        return json.dumps(_named(data), ensure_ascii=False, default=_plain)


def from_line(line: str, where: str = "rollouts") -> Group:
    """The inverse of :func:`to_line`; raises DataError as :func:`group_from_dict` does."""
    return group_from_dict(json.loads(line), where)


def write_rollouts(
    path: str | Path, groups: Iterable[Group], advantages: Iterable[Advantages | None] | None = None
) -> None:
    """Write groups to ``path`` (``.jsonl.zst``): beside it first, then in one move, so that it is whole or absent."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    groups = list(groups)
    shares = [None] * len(groups) if advantages is None else list(advantages)
    try:
        with aside.open("wb") as raw, zstandard.ZstdCompressor(level=6).stream_writer(raw) as out:
            for group, share in zip(groups, shares, strict=True):
                # Half a surrogate, which no encoding has, becomes the escape that JSON has for it.
                out.write(to_line(group, share).encode("utf-8", "backslashreplace") + b"\n")
        sync(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def read_rollouts(path: str | Path) -> Iterator[Group]:
    """The groups of a file, one at a time. Raises DataError with file and line for whatever cannot be read."""
    for number, data in enumerate(read_groups(path), start=1):
        yield group_from_dict(data, f"{path}:{number}")


def _task_to_dict(task: Task) -> dict[str, Any]:
    prompt = task.prompt if isinstance(task.prompt, str) else list(task.prompt)
    return {"id": task.id, "prompt": prompt, "answer": task.answer, "meta": dict(task.meta)}


def _task_from_dict(data: Mapping[str, Any]) -> Task:
    prompt = data["prompt"]
    return Task(data["id"], prompt if isinstance(prompt, str) else tuple(prompt), data["answer"], data["meta"])


def _episode_to_dict(episode: Episode, advantages: Sequence[float | None]) -> dict[str, Any]:
    return {
        "member": episode.member,
        "error": episode.error,
        "timings": dict(episode.timings),
        "info": dict(episode.info),
        "trajectories": [
            {
                "agent": t.agent,
                "stop": t.stop.value,
                "rewards": {name: {"value": r.value, "weight": r.weight} for name, r in t.rewards.items()},
                "advantage": advantage,
                "turns": [_turn_to_dict(turn) for turn in t.turns],
            }
            for t, advantage in zip(episode.trajectories, advantages, strict=True)
        ],
    }


def _episode_from_dict(data: Mapping[str, Any], task: Task) -> Episode:
    trajectories = tuple(
        Trajectory(
            tuple(_turn_from_dict(turn) for turn in t["turns"]),
            StopReason(t["stop"]),
            t["agent"],
            {name: RewardTerm(r["value"], r["weight"]) for name, r in t["rewards"].items()},
        )
        for t in data["trajectories"]
    )
    return Episode(task, trajectories, data["error"], data["timings"], data["member"], data["info"])


def _turn_to_dict(turn: Turn) -> dict[str, Any]:
    return {
        "observation": list(turn.observation),
        "action": turn.action,
        "finish_reason": turn.finish_reason,
        "rewards": dict(turn.rewards),
        "tool_calls": turn.tool_calls,
        "info": dict(turn.info),
        "spans": [_span_to_dict(span) for span in turn.spans],
    }


def _turn_from_dict(data: Mapping[str, Any]) -> Turn:
    return Turn(
        tuple(_span_from_dict(span) for span in data["spans"]),
        tuple(data["observation"]),
        data["action"],
        data["finish_reason"],
        data["rewards"],
        data["tool_calls"],
        data["info"],
    )


def _span_to_dict(span: Span) -> dict[str, Any]:
    return {
        "author": span.author.value,
        "role": span.role,
        "text": span.text,
        "tokens": span.tokens.tolist(),
        "logprobs": _short(span.logprobs),
        "version": span.version,
        "kept_logmass": _short(span.kept_logmass),
    }


def _span_from_dict(data: Mapping[str, Any]) -> Span:
    logprobs, mass = data["logprobs"], data["kept_logmass"]
    return Span(
        np.asarray(data["tokens"], np.int32),
        Author(data["author"]),
        data["role"],
        data["text"],
        None if logprobs is None else np.asarray(logprobs, np.float32),
        data["version"],
        None if mass is None else np.asarray(mass, np.float32),
    )


def _short(values: npt.NDArray[np.float32] | None) -> list[float] | None:
    """float32 numbers in their shortest form that reads back to the same float32: half the bytes of a double's."""
    return None if values is None else [float(str(v)) for v in values]


def _named(value: Any) -> Any:
    """The same with every key as JSON can have it: text and numbers as they are, others as their repr."""
    if isinstance(value, Mapping):
        return {k if k is None or isinstance(k, str | int | float) else repr(k): _named(v) for k, v in value.items()}
    return [_named(v) for v in value] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    """What JSON has no word for (in a task's columns or an info): numpy as numbers, the rest as its repr."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return sorted(value, key=repr) if isinstance(value, set | frozenset) else repr(value)
