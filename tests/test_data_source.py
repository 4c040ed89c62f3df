# SPDX-License-Identifier: Apache-2.0
"""Sources hand out tasks after a cursor: nothing skipped, nothing doubled, the same again after a restart."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.data.source import SOURCES, Cursor, GeneratedSource, ListSource, TaskSource, make_source
from palestra.errors import ConfigError, DataError
from palestra.types import Group, Task

TEN = tuple(Task(str(i), f"{i}?") for i in range(10))


def ids(tasks: list[Task]) -> list[str]:
    return [t.id for t in tasks]


@given(sizes=st.lists(st.integers(0, 13), min_size=1, max_size=12), seed=st.none() | st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_within_an_epoch_no_task_is_skipped_or_doubled_however_it_is_taken(sizes: list[int], seed: int | None) -> None:
    source, cursor, taken = ListSource(TEN, seed), Cursor(), []
    for n in sizes:
        tasks, cursor = source.take(cursor, n)
        assert len(tasks) == n
        taken += ids(tasks)
    for start in range(0, len(taken) - 9, 10):
        assert Counter(taken[start : start + 10]) == Counter(str(i) for i in range(10))
    whole, _ = source.take(Cursor(), len(taken))
    assert ids(whole) == taken


def test_a_cursor_that_went_through_json_continues_where_it_stood() -> None:
    source = ListSource(TEN, 3)
    first, cursor = source.take(Cursor(), 7)
    again = Cursor.from_dict(json.loads(json.dumps(cursor.to_dict())))
    rest, _ = source.take(again, 8)
    assert ids(first) + ids(rest) == ids(source.take(Cursor(), 15)[0])


def test_each_epoch_and_each_seed_has_an_order_of_its_own_and_no_seed_keeps_the_files() -> None:
    orders = {tuple(ids(ListSource(TEN, seed).take(Cursor(epoch, 0), 10)[0])) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    assert ids(ListSource(TEN).take(Cursor(5, 0), 10)[0]) == ids(list(TEN))


def test_a_generated_source_has_no_end_and_is_addressed_by_index() -> None:
    source = GeneratedSource(lambda i: Task(f"g{i}", "?"))
    tasks, cursor = source.take(Cursor(0, 1_000_000), 2)
    assert ids(tasks) == ["g1000000", "g1000001"]
    assert cursor == Cursor(0, 1_000_002)
    assert source.size is None


def test_equal_prompts_drawn_apart_stay_groups_apart_da_003() -> None:
    tasks = [Task("0", "same text"), Task("1", "same text"), Task("2", "other")]
    taken, _ = ListSource(tuple(tasks)).take(Cursor(), 4)
    groups = {Group(task, draw, ()).id for draw, task in enumerate(taken)}
    assert len(groups) == 4  # the fourth is the first task again, and another group


def test_an_empty_list_an_unknown_source_split_or_option_is_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        ListSource(())
    with pytest.raises(ConfigError, match="did you mean 'arithmetic'"):
        make_source("arithmetics")
    with pytest.raises(ConfigError, match="did you mean 'max_operand'"):
        make_source("arithmetic", max_operands=9)
    with pytest.raises(DataError, match="unknown split 'tset': did you mean 'test'"):
        make_source("arithmetic", split="tset")


def test_every_built_in_source_is_registered_and_is_a_source() -> None:
    files = {"gsm8k", "jsonl", "math", "stream", "table"}
    assert {"arithmetic", "curriculum", "word_problems"} | files <= set(SOURCES)
    source: TaskSource = make_source("word_problems", split="test", seed=4)
    assert len(source.take(Cursor(), 3)[0]) == 3
