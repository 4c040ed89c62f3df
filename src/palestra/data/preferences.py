# SPDX-License-Identifier: Apache-2.0
"""Preferences: pairs of replies to one prompt, or single replies with a label; from a table or generated.

A row has ``prompt``, ``chosen`` and ``rejected``, or ``prompt``, ``completion`` and ``label``; each text or a list of
messages, ``tools`` where there are any. ``chosen`` and ``rejected`` may also be whole dialogues: what they begin with
in common is then the prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, Literal, Protocol

import numpy as np

from palestra.data import arithmetic
from palestra.data.noise import Noise, Slips
from palestra.data.rows import Row
from palestra.data.source import Cursor, check_count, check_split
from palestra.data.tables import hub_rows, read_table, table_file
from palestra.errors import ConfigError, DataError, UserError, unknown
from palestra.registry import Registry, check_options
from palestra.types import BoolArray, IntArray, Message

Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt with a better and a worse reply, each one or more messages. where: what errors call it."""

    prompt: Messages
    chosen: Messages
    rejected: Messages
    tools: tuple[Mapping[str, Any], ...] = ()
    where: str = ""

    @property
    def replies(self) -> tuple[Messages, ...]:
        return (self.chosen, self.rejected)


@dataclass(frozen=True, slots=True)
class Labelled:
    """One prompt with one reply and whether it is desirable."""

    prompt: Messages
    completion: Messages
    label: bool
    tools: tuple[Mapping[str, Any], ...] = ()
    where: str = ""

    @property
    def replies(self) -> tuple[Messages, ...]:
        return (self.completion,)


Preference = Comparison | Labelled
PREFERENCES: Registry[Callable[..., Sequence[Preference]]] = Registry("preference source")
"""Sources of preferences by name. A factory takes ``seed`` and the further options of ``data:`` as keywords."""


def make_preferences(name: str, *, seed: int, **options: Any) -> Sequence[Preference]:
    """The preferences of the registered source ``name``; unknown options are refused with the nearest right one."""
    factory = PREFERENCES[name]
    check_options(f"preference source {name!r}", factory, options, ("seed",))
    found = factory(seed=seed, **options)
    if not found:
        raise DataError(f"preference source {name!r} is empty; give at least one row")
    return found


# Rows ------------------------------------------------------------------------------------------------------


def row_to_preference(row: Row, where: str) -> Preference:
    """A data row as a preference; DataError names the place, what is there and what is needed.

    >>> row_to_preference({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, "a.jsonl:1").chosen[0]["content"]
    '4'
    >>> row_to_preference({"prompt": "2+2?", "completion": "5", "label": False}, "a.jsonl:2").label
    False
    """
    tools = tuple(row.get("tools") or ())
    if row.get("chosen") is not None and row.get("rejected") is not None:
        prompt, chosen, rejected = _parted(row, where)
        return Comparison(prompt, chosen, rejected, tools, where)
    if all(row.get(name) is not None for name in ("prompt", "completion", "label")):
        if row["label"] not in (True, False):
            raise DataError(f"{where}: `label` is {row['label']!r}; write true (desirable) or false")
        prompt = _messages(row["prompt"], "user", f"{where}: `prompt`")
        completion = _messages(row["completion"], "assistant", f"{where}: `completion`")
        return Labelled(prompt, completion, bool(row["label"]), tools, where)
    raise DataError(
        f"{where}: needs `prompt`, `chosen` and `rejected`, or `prompt`, `completion` and `label`; "
        f"it has {', '.join(map(repr, row)) or 'nothing'}"
    )


def unpaired(preferences: Iterable[Preference]) -> list[Labelled]:
    """Every pair as two labelled replies; those that are labelled already stay."""
    single: list[Labelled] = []
    for one in preferences:
        if isinstance(one, Labelled):
            single.append(one)
        else:
            sides = ((one.chosen, True), (one.rejected, False))
            single += [Labelled(one.prompt, reply, label, one.tools, one.where) for reply, label in sides]
    return single


def _parted(row: Row, where: str) -> tuple[Messages, Messages, Messages]:
    chosen = _messages(row["chosen"], "assistant", f"{where}: `chosen`")
    rejected = _messages(row["rejected"], "assistant", f"{where}: `rejected`")
    given = row.get("prompt")
    if chosen[0]["role"] == "assistant" and rejected[0]["role"] == "assistant":
        if given is None:
            raise DataError(f"{where}: no `prompt`, and `chosen` and `rejected` are replies, not whole dialogues")
        return _messages(given, "user", f"{where}: `prompt`"), chosen, rejected
    # Whole dialogues: the prompt is what they begin with in common, up to where the two answer differently.
    alike = sum(1 for _ in _while_equal(chosen, rejected))
    while alike and (alike >= min(len(chosen), len(rejected)) or chosen[alike]["role"] != "assistant"):
        alike -= 1
    prompt = chosen[:alike]
    if not prompt or rejected[alike]["role"] != "assistant":
        raise DataError(
            f"{where}: `chosen` and `rejected` do not answer one prompt: they differ before the first reply"
        )
    said = {m.get("content") for m in prompt}
    if (isinstance(given, str) and given not in said) or (isinstance(given, list) and list(prompt) != given):
        raise DataError(f"{where}: `prompt` is not what the dialogues in `chosen` and `rejected` begin with")
    return prompt, chosen[alike:], rejected[alike:]


def _while_equal(one: Messages, other: Messages) -> Iterator[Message]:
    for a, b in zip(one, other, strict=False):
        if a != b:
            return
        yield a


def _messages(value: Any, role: str, where: str) -> Messages:
    if isinstance(value, str):
        return ({"role": role, "content": value},)
    if not isinstance(value, list | tuple) or not value:
        raise DataError(f"{where} is a {type(value).__name__}; give a text or a list of messages")
    kept: list[Any] = []
    for i, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}, message {i}: needs a role")
        kept.append({k: v for k, v in message.items() if v is not None})  # columnar files fill absent keys with nulls
    return tuple(kept)


@PREFERENCES.register("table")
def table(
    seed: int,
    path: str | None = None,
    hub: str | None = None,
    subset: str | None = None,
    split: str = "train",
    count: int | None = None,
) -> list[Preference]:
    """Rows of a file (JSONL, JSON, Parquet), of a directory with one file per split, or of a data set on the Hub.

    hub, subset: the data set and its configuration. count: the first rows only. The order is that of the source.
    """
    if (path is None) == (hub is None):
        raise ConfigError("preference source 'table' reads a file or the Hub: give either data.path or data.hub")
    rows: Iterable[tuple[int, Row]]
    if hub is not None:
        name, rows = hub, enumerate(hub_rows(hub, subset, split, "or give data.path"), 1)
    else:
        name = str(file := table_file(str(path), split))
        rows = read_table(file)
    return [row_to_preference(row, f"{name}:{n}") for n, row in islice(rows, count)]


MISTAKES = tuple(f.name for f in fields(Slips))


@PREFERENCES.register("arithmetic")
def arithmetic_pairs(
    seed: int, count: int = 2000, split: str = "train", mistake: str = "wrong_last", max_operand: int = 99
) -> list[Comparison]:
    """Calculator dialogues with a known preference: done right, against one ``mistake`` and a wrong answer.

    ``mistake``: wrong_last, wrong_first, stop_early or operand, as in the demonstrations' noise. Results of calls are
    true in both dialogues; only a choice is wrong in one. ``test`` shares no expression with ``train``.

    >>> pair = arithmetic_pairs(seed=0, count=1)[0]
    >>> pair.prompt[0]["content"], [m["content"] for m in pair.rejected if m["role"] == "assistant"][1:]
    ('63*(44+47)\\n', ['<call>add(63,91)</call>', '<answer>\\\\boxed{154}</answer>'])
    """
    check_split(split)
    if mistake not in MISTAKES:
        raise ConfigError(unknown("mistake", mistake, MISTAKES))
    check_count(count)
    source = arithmetic.arithmetic(split=split, seed=seed + 1_000_003, max_operand=max_operand)
    wrong = Noise(other=Slips(**{mistake: 1.0}))
    pairs: list[Comparison] = []
    cursor = Cursor()
    while len(pairs) < count:
        (task,), cursor = source.take(cursor, 1)
        good = arithmetic.demonstration(task, random.Random(0), Noise.clean())
        bad = arithmetic.demonstration(task, random.Random(0), wrong)
        if good[-1] != bad[-1]:  # 2 + 2 is 2 * 2: such a mistake is none
            pairs.append(Comparison(tuple(good[:1]), tuple(good[1:]), tuple(bad[1:]), where=task.id))
    return pairs


# Tokens ----------------------------------------------------------------------------------------------------


class Renders(Protocol):
    """What is needed of a renderer: messages → tokens, and which of them the model itself would have sampled."""

    def render(self, messages: Sequence[Message], *, tools: Any = None, add_generation_prompt: bool = False) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One preference in tokens. prompt int32[P], shared by all replies; replies int32[R] each, trained bool[R] each:
    the tokens that count. label: of a labelled reply."""

    prompt: IntArray
    replies: tuple[IntArray, ...]
    trained: tuple[BoolArray, ...]
    label: bool | None = None


@dataclass(slots=True)
class Counts:
    """What was left out, by reason."""

    too_long: int = 0
    equal: int = 0
    empty: int = 0
    examples: dict[str, str] = field(default_factory=dict)

    def drop(self, reason: str, where: str) -> None:
        setattr(self, reason, getattr(self, reason) + 1)
        self.examples.setdefault(reason, where)

    @property
    def dropped(self) -> int:
        return self.too_long + self.equal + self.empty


def encode(
    preferences: Iterable[Preference], renderer: Renders, *, max_length: int, too_long: Literal["drop", "cut"] = "drop"
) -> tuple[list[Encoded], Counts]:
    """Preferences as tokens; what cannot be learned from is dropped and counted.

    ``max_length`` holds for prompt and reply together, for each side by itself. ``too_long``: ``drop`` the pair, or
    ``cut`` the end of each reply that is over its own budget. Dropped as well: replies without a trained token, and
    pairs whose replies are equal. DataError when nothing is left.
    """
    kept: list[Encoded] = []
    counts = Counts()
    total = 0
    for one in preferences:
        total += 1
        found = _encoded(one, renderer)
        fitting = fit(found, max_length, too_long)
        if not all(t.any() for t in found.trained):
            counts.drop("empty", one.where)
        elif fitting is None:
            counts.drop("too_long", one.where)
        elif len(fitting.replies) == 2 and np.array_equal(*fitting.replies):
            counts.drop("equal", one.where)
        else:
            kept.append(fitting)
    if not kept:
        raise DataError(
            f"none of the {total} preferences can be learned from: {counts.too_long} too long for max_length="
            f"{max_length}, {counts.equal} with equal replies, {counts.empty} with an empty reply"
        )
    return kept, counts


def fit(one: Encoded, max_length: int, too_long: str) -> Encoded | None:
    """``one`` within ``max_length`` tokens a side; None where it has no place without losing a whole reply.

    >>> ids = lambda n: np.arange(n, dtype=np.int32)
    >>> pair = Encoded(ids(6), (ids(5), ids(2)), (np.ones(5, bool), np.ones(2, bool)))
    >>> [len(reply) for reply in fit(pair, 8, "cut").replies], fit(pair, 8, "drop"), fit(pair, 6, "cut")
    ([2, 2], None, None)
    """
    budget = max_length - len(one.prompt)
    if all(len(reply) <= budget for reply in one.replies):
        return one
    if too_long == "drop" or budget < 1:
        return None
    trained = tuple(t[:budget] for t in one.trained)
    if not all(t.any() for t in trained):
        return None
    return Encoded(one.prompt, tuple(r[:budget] for r in one.replies), trained, one.label)


def _encoded(one: Preference, renderer: Renders) -> Encoded:
    """The prompt is rendered alone, with the generation prompt; each reply is what its dialogue adds to that."""
    tools = one.tools or None
    try:
        prompt = list(renderer.render(one.prompt, tools=tools, add_generation_prompt=True).token_ids)
        wholes = [renderer.render((*one.prompt, *reply), tools=tools) for reply in one.replies]
    except UserError as error:
        raise DataError(f"{one.where}: {error}") from error
    replies, trained = [], []
    for whole in wholes:
        if list(whole.token_ids[: len(prompt)]) != prompt:
            raise DataError(
                f"{one.where}: the chat template writes this prompt in another way when the reply follows, so the "
                "replies would not share its tokens; use a template that leaves history as it is"
            )
        replies.append(np.asarray(whole.token_ids[len(prompt) :], np.int32))
        trained.append(np.asarray(whole.sampled_mask[len(prompt) :], np.bool_))
    label = one.label if isinstance(one, Labelled) else None
    return Encoded(np.asarray(prompt, np.int32), tuple(replies), tuple(trained), label)


__all__ = [
    "PREFERENCES",
    "Comparison",
    "Counts",
    "Encoded",
    "Labelled",
    "Preference",
    "arithmetic_pairs",
    "encode",
    "fit",
    "make_preferences",
    "row_to_preference",
    "unpaired",
]
