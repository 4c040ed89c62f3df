# SPDX-License-Identifier: Apache-2.0
"""Scoring a group: each reward function is called once, by keyword, for all its episodes together."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, Sized
from typing import Any

from palestra.errors import ConfigError, RewardError, UserError
from palestra.foreign import message_of
from palestra.reward.base import PerTurn, RewardFunction, Stateful
from palestra.reward.gates import Gate, check_gates, gated
from palestra.reward.trl import EXTRAS, NOTES, Log, TrainerState
from palestra.reward.turns import by_turn, with_payments, without_payments
from palestra.reward.worker import TIMEOUT_S, RewardTimeout, Worker
from palestra.types import Author, Episode, Group, Message, RewardTerm, Task, Trajectory, Turn

RESERVED = ("prompts", "completions", "completion_ids", "trajectories", "answer", "task_id", *EXTRAS)
OUTSIDE_TRAINING = TrainerState()

REWARD_ERRORS = "reward_errors"
"""Under this key an ``Episode.info`` holds what each function that failed to score the episode raised, one line by
name. Episodes that no function failed at do not have it."""


class RewardTypeError(RewardError, TypeError):
    """A reward function returned something that is not a list of numbers."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class View:
    """What is scored as one completion: one agent of one episode.

    Where the agent's context was rewritten it has several trajectories: the functions see the last one, which
    holds the end, and every one of them carries the same terms.
    """

    episode: int
    trajectories: tuple[int, ...]
    last: Trajectory
    turns: tuple[Turn, ...]


class Rubric:
    """Named, weighted reward functions over the episodes of a group.

    functions: name → (function, weight). chat: prompts and completions are message lists instead of strings.
    on_error: ``exclude`` (a completion whose scoring raises gets None, counted in :attr:`errors`, and what was raised
    stands in its episode's info, :data:`REWARD_ERRORS`) or ``raise``.
    env_weights: weights of what the environment pays, by part (1.0 for a part not named). A part that is named
    here, or that any episode of the group was paid, is 0.0 for an episode that was paid nothing.
    gates: part → the part that must have passed for it to count (:mod:`palestra.reward.gates`). timeout_s: of one call
    of a function; what is not scored by then is not scored by it.

    A function gets the columns it has parameters for, all of them when it takes ``**kwargs``: ``prompts``,
    ``completions``, ``completion_ids``, ``trajectories``, ``answer`` (also as ``ground_truth``), ``task_id``,
    ``question`` (the prompt's text, where the task has no column of that name) and the task's ``meta``; and what TRL
    gives beside them (:mod:`palestra.reward.trl`), of which what was logged stands in the episode's info. Episodes with
    an error are not scored. What a function pays :class:`PerTurn` also stands on the turns of the trajectory it saw.

    >>> import asyncio
    >>> from palestra.types import StopReason, Task
    >>> def brief(completions, **columns): return [1.0 if len(c) < 9 else 0.0 for c in completions]
    >>> group = Group(t := Task("t", "2+2?"), 0, (Episode(t, (Trajectory((), StopReason.ENV_TERMINATED),)),))
    >>> rubric = Rubric({"brief": (brief, 0.5)}, chat=False)
    >>> asyncio.run(rubric.score(group)).episodes[0].reward
    0.5
    """

    def __init__(
        self,
        functions: Mapping[str, tuple[RewardFunction, float]],
        *,
        chat: bool,
        on_error: str = "exclude",
        env_weights: Mapping[str, float] | None = None,
        gates: Mapping[str, Gate] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if on_error not in ("exclude", "raise"):
            raise ConfigError(f"on_error is {on_error!r}: choose 'exclude' or 'raise'")
        self.functions = dict(functions)
        for name, (function, _) in self.functions.items():
            parameters_of(name, function)
        self.chat = chat
        self.on_error, self.timeout_s = on_error, timeout_s
        self.env_weights = dict(env_weights or {})
        self.gates = dict(gates or {})
        check_gates(self.gates, self.functions, self.env_weights)
        self.errors: Counter[str] = Counter()
        """How many completions each function failed to score, over the life of this rubric."""
        self.last_error: dict[str, str] = {}
        """The last failure of each function, one line."""
        self._worker = Worker()

    @property
    def stateful(self) -> dict[str, Stateful]:
        """The functions that remember, by name."""
        functions: dict[str, Any] = {name: function for name, (function, _) in self.functions.items()}
        return {name: function for name, function in functions.items() if isinstance(function, Stateful)}

    async def score(self, group: Group, state: TrainerState = OUTSIDE_TRAINING) -> Group:
        """The same group, whose trajectories carry a :class:`RewardTerm` for each part. state: for functions that ask
        for ``trainer_state``."""
        group = without_payments(group)
        views = _views(group)
        terms: list[dict[str, RewardTerm]] = self._env_terms(views)
        paid: dict[int, dict[int, dict[str, float]]] = {}
        failures: dict[int, dict[str, str]] = {}
        log = Log(len(views))
        if views:
            columns: dict[str, Any] = dict(_columns(group, views, self.chat))
            columns |= {"trainer_state": state, "log_extra": log.extra, "log_metric": log.metric}
            for name, (function, weight) in self.functions.items():
                failed: dict[int, str] = {}
                before = dict(log.columns), dict(log.numbers)
                values = await self._values(name, function, columns, len(views), failed)
                if failed:
                    log.forget(*before)  # of a call that failed half of it may be missing
                for index, line in failed.items():
                    failures.setdefault(views[index].episode, {})[name] = line
                for view, held, (value, of_turns) in zip(views, terms, values, strict=True):
                    if name in held:
                        raise RewardError(
                            f"the environment pays a part named {name!r}, as a reward function: rename one"
                        )
                    held[name] = RewardTerm(value, weight)
                    for turn, earned in by_turn(name, view.last, of_turns) if of_turns is not None else ():
                        paid.setdefault(view.episode, {}).setdefault(id(turn), {})[name] = earned
        noted = {view.episode: notes for at, view in enumerate(views) if (notes := log.of(at))}
        return _with_rewards(group, views, [gated(held, self.gates) for held in terms], paid, failures, noted)

    def _env_terms(self, views: Sequence[View]) -> list[dict[str, RewardTerm]]:
        paid = [_payments(v.turns) for v in views]
        parts = sorted(
            {*self.env_weights, *(name for p in paid for name in p)} | (set() if self.functions else {"env"})
        )
        return [{n: RewardTerm(p.get(n, 0.0), self.env_weights.get(n, 1.0)) for n in parts} for p in paid]

    async def _values(
        self, name: str, function: RewardFunction, columns: Mapping[str, Any], count: int, failed: dict[int, str]
    ) -> list[Score]:
        """A score for each completion; ``failed`` gets what was raised, by the index of the completion."""
        chosen = accepted(name, function, columns)
        try:
            returned = await self._worker.call(name, function, chosen, self.timeout_s)
        except UserError:
            raise
        except Exception as error:
            if self.on_error == "raise":
                raise
            if isinstance(error, RewardTimeout):  # one completion at a time would take as long each
                failed |= dict.fromkeys(range(count), self._count(name, error, count))
                return [(None, None)] * count
            if count > 1:
                rows = [_only(chosen, i) for i in range(count)]
                return [await self._alone(name, function, row, i, failed) for i, row in enumerate(rows)]
            failed[0] = self._count(name, error)
            return [(None, None)]
        return _scores(name, self._without_failures(name, returned, failed), count)

    def _without_failures(self, name: str, returned: Any, failed: dict[int, str]) -> Any:
        """None in the place of each exception that a function put there for one completion."""
        if not isinstance(returned, list):
            return returned
        for index, value in enumerate(returned):
            if isinstance(value, UserError) or (isinstance(value, Exception) and self.on_error == "raise"):
                raise value
            if isinstance(value, Exception):
                failed[index] = self._count(name, value)
        return [None if isinstance(value, Exception) else value for value in returned]

    async def _alone(
        self, name: str, function: RewardFunction, row: Mapping[str, Any], index: int, failed: dict[int, str]
    ) -> Score:
        # The whole call failed; one completion at a time shows which of them it was.
        try:
            returned = await self._worker.call(name, function, row, self.timeout_s)
        except UserError:
            raise
        except Exception as error:
            failed[index] = self._count(name, error)
            return None, None
        return _scores(name, returned, 1)[0]

    def _count(self, name: str, error: Exception, times: int = 1) -> str:
        self.errors[name] += times
        self.last_error[name] = " ".join(f"{type(error).__name__}: {message_of(error)}".split())
        return self.last_error[name]


def _only(columns: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The columns of one completion; nothing that is logged about it alone is kept."""
    log = Log(1)
    own = {"log_extra": log.extra, "log_metric": log.metric}
    return {k: own.get(k, v) if k in EXTRAS else [v[index]] for k, v in columns.items()}


Score = tuple[float | None, PerTurn | None]
"""What a function gives one completion, and by turn where it says so."""


def _scores(name: str, returned: Any, count: int) -> list[Score]:
    values = checked(name, returned, count)
    return [(v, r if isinstance(r, PerTurn) else None) for v, r in zip(values, returned, strict=True)]


def checked(name: str, returned: Any, count: int) -> list[float | None]:
    """What a reward function returned, as one finite number or None per completion; NaN abstains like None, and what is
    paid by turn adds up.

    >>> checked("f", [1, float("nan"), None], 3)
    [1.0, None, None]
    >>> checked("f", [1.0, 0.0, 1.0], 4)
    Traceback (most recent call last):
    palestra.errors.RewardError: reward function 'f' returned 3 values for 4 completions; return exactly one each
    """
    listed = isinstance(returned, Sized) and isinstance(returned, Iterable)
    if not listed or isinstance(returned, str | bytes | Mapping | Set):
        kind = type(returned).__name__
        raise RewardTypeError(f"reward function {name!r} returned a {kind}; return a list with one number or None each")
    values = list(returned)
    if len(values) != count:
        raise RewardError(
            f"reward function {name!r} returned {len(values)} values for {count} completions; return exactly one each"
        )
    return [_number(name, i, v) for i, v in enumerate(values)]


def _number(name: str, index: int, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, PerTurn):
        return value.total
    if isinstance(value, str | bytes):
        raise RewardTypeError(f"reward function {name!r} returned {value!r} at {index}; return a number or None")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        kind = type(value).__name__
        raise RewardTypeError(
            f"reward function {name!r} returned a {kind} at {index}; return a number or None"
        ) from error
    if math.isinf(number):
        raise RewardError(f"reward function {name!r} returned {number} at {index}; a reward must be finite, or None")
    return None if math.isnan(number) else number


def mean_scored(values: Iterable[float | None]) -> float | None:
    """Mean over the values that were scored; None when none was.

    >>> mean_scored([0.25, None, 0.75, None, 0.5, 0.9])
    0.6
    """
    scored = [v for v in values if v is not None and not math.isnan(v)]
    return math.fsum(scored) / len(scored) if scored else None


def _views(group: Group) -> list[View]:
    views: list[View] = []
    for index, episode in enumerate(group.episodes):
        if episode.error is not None:
            continue
        by_agent: dict[str, list[int]] = {}
        for at, trajectory in enumerate(episode.trajectories):
            by_agent.setdefault(trajectory.agent, []).append(at)
        for held in by_agent.values():
            # A turn kept verbatim in a rewritten context stands in two trajectories, and is one turn.
            turns = {id(t): t for at in held for t in episode.trajectories[at].turns}
            views.append(View(index, tuple(held), episode.trajectories[held[-1]], tuple(turns.values())))
    return views


def _payments(turns: Sequence[Turn]) -> dict[str, float]:
    names = {name for t in turns for name in t.rewards}
    return {name: math.fsum(t.rewards[name] for t in turns if name in t.rewards) for name in names}


def _columns(group: Group, views: Sequence[View], chat: bool) -> dict[str, list[Any]]:
    task, count = group.task, len(views)
    for name in task.meta:
        if name in RESERVED:
            raise RewardError(f"task {task.id!r} has a column {name!r}, which reward functions get from us: rename it")
    columns: dict[str, list[Any]] = {
        "ground_truth": [task.answer] * count,
        "question": [_asked(task)] * count,
        **{name: [value] * count for name, value in task.meta.items()},
        "answer": [task.answer] * count,
        "task_id": [task.id] * count,
        "trajectories": [v.last for v in views],
        "completion_ids": [_model_ids(v.last) for v in views],
    }
    if chat:
        columns["prompts"] = [list(v.last.turns[0].observation if v.last.turns else task.messages()) for v in views]
        columns["completions"] = [_reply(v.last) for v in views]
    else:
        columns["prompts"] = [_text(task)] * count
        columns["completions"] = [v.last.completion_text for v in views]
    return columns


def _text(task: Task) -> str:
    return task.prompt if isinstance(task.prompt, str) else "\n".join(m.get("content", "") for m in task.prompt)


def _asked(task: Task) -> str:
    """What the user asks: the prompt, of a dialogue the last message of the user."""
    said = [m.get("content", "") for m in task.messages() if m.get("role") == "user"]
    return said[-1] if said else _text(task)


def _reply(trajectory: Trajectory) -> list[Message]:
    """Everything after the prompt: actions, and what was observed between them."""
    first, *rest = trajectory.turns or (None,)
    return [] if first is None else [first.action, *(m for t in rest for m in (*t.observation, t.action))]


def _model_ids(trajectory: Trajectory) -> list[int]:
    return [i for s in trajectory.spans if s.author is Author.MODEL for i in s.tokens.tolist()]


def parameters_of(name: str, function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a reward function. Raises ConfigError for a callable that does not show them.

    >>> parameters_of("mine", dict)
    Traceback (most recent call last):
    palestra.errors.ConfigError: reward function 'mine' is 'dict', whose parameters cannot be read; give a function
    """
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        shown = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(
            f"reward function {name!r} is {shown!r}, whose parameters cannot be read; give a function"
        ) from None


def required(name: str, function: Callable[..., Any]) -> list[str]:
    """What a reward function cannot be called without: its parameters that have no default."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters_of(name, function) if p.default is p.empty and p.kind in kinds]


def accepted(name: str, function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns this function has parameters for."""
    parameters = parameters_of(name, function)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        wanted = dict(columns)
    else:
        wanted = {p.name: columns[p.name] for p in parameters if p.name in columns}
    for column in required(name, function):
        if column not in wanted:
            known = ", ".join(sorted(columns))
            raise RewardError(
                f"reward function {name!r} asks for a column {column!r}, and there is none; there are: {known}"
            )
    return wanted


def _with_rewards(
    group: Group,
    views: Sequence[View],
    terms: Sequence[Mapping[str, RewardTerm]],
    paid: Mapping[int, Mapping[int, Mapping[str, float]]],
    failures: Mapping[int, Mapping[str, str]],
    noted: Mapping[int, Mapping[str, Any]],
) -> Group:
    found: dict[tuple[int, int], Mapping[str, RewardTerm]] = {}
    for view, held in zip(views, terms, strict=True):
        found.update({(view.episode, at): held for at in view.trajectories})
    episodes: list[Episode] = []
    for index, episode in enumerate(group.episodes):
        trajectories = tuple(
            dataclasses.replace(t, rewards=found.get((index, at), t.rewards))
            for at, t in enumerate(with_payments(episode.trajectories, paid.get(index, {})))
        )
        info = {name: value for name, value in episode.info.items() if name not in (REWARD_ERRORS, NOTES)}
        if index in failures:
            info[REWARD_ERRORS] = dict(failures[index])
        if index in noted:
            info[NOTES] = dict(noted[index])
        episodes.append(dataclasses.replace(episode, trajectories=trajectories, info=info))
    return dataclasses.replace(group, episodes=tuple(episodes))
