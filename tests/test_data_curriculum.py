# SPDX-License-Identifier: Apache-2.0
"""Curricula: easy tasks first, by a column or by measured pass rates, and the same again after a restart."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from palestra.data.curriculum import (
    CurriculumSource,
    pass_rates,
    read_pass_rates,
    staged,
    write_pass_rates,
)
from palestra.data.source import Cursor, make_source
from palestra.errors import ConfigError, DataError
from palestra.types import Episode, Group, RewardTerm, StopReason, Task, Trajectory

STEPS = (1, 2, 2, 3, 4, 6)
TASKS = tuple(Task(f"t{i}", "?", "1", {"steps": s}) for i, s in enumerate(STEPS))


def write(tmp_path: Path) -> str:
    rows = [{"id": t.id, "prompt": t.prompt, "answer": t.answer, **t.meta} for t in TASKS]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path)


def made(tmp_path: Path, split: str = "train", **options: Any) -> CurriculumSource:
    source = make_source(
        "curriculum", split=split, seed=5, source={"name": "jsonl", "path": write(tmp_path)}, **options
    )
    assert isinstance(source, CurriculumSource)
    return source


def steps(tasks: list[Task]) -> list[int]:
    return [t.meta["steps"] for t in tasks]


def test_a_stage_draws_from_its_pool_and_the_next_from_a_larger_one(tmp_path: Path) -> None:
    source = made(tmp_path, limits=[2, 4], stage_tasks=6)
    tasks, cursor = source.take(Cursor(), 24)
    assert Counter(steps(tasks[:6])) == {1: 2, 2: 4}  # three tasks, each twice in six draws
    assert set(steps(tasks[6:12])) == {1, 2, 3, 4} and len({t.id for t in tasks[6:11]}) == 5
    assert Counter(t.id for t in tasks[12:18]) == Counter(t.id for t in TASKS)
    assert cursor == Cursor(0, 24)


def test_any_cursor_continues_exactly(tmp_path: Path) -> None:
    source = made(tmp_path, stages=3, stage_tasks=5)
    whole = source.take(Cursor(), 40)[0]
    for at in range(41):
        first, cursor = source.take(Cursor(), at)
        assert first + source.take(Cursor.from_dict(cursor.to_dict()), 40 - at)[0] == whole


def test_pools_of_equal_shares_keep_equally_hard_tasks_together() -> None:
    pools = staged(TASKS, STEPS, stages=3)
    assert [steps(list(pool)) for pool in pools] == [[1, 2, 2], [1, 2, 2, 3], list(STEPS)]


def test_test_splits_have_no_stages(tmp_path: Path) -> None:
    assert len(made(tmp_path, split="test", limits=[2]).pools) == 1


def episode(value: float | None, error: str | None = None) -> Episode:
    rewards = {"accuracy": RewardTerm(value)}
    return Episode(TASKS[0], (Trajectory((), StopReason.ENV_TERMINATED, rewards=rewards),), error=error)


def test_pass_rates_count_what_was_scored(tmp_path: Path) -> None:
    groups = [
        Group(TASKS[0], 0, (episode(1.0), episode(0.0), episode(None), episode(1.0, error="lost"))),
        Group(TASKS[0], 1, (episode(0.9), episode(1.0))),  # the same task again
        Group(TASKS[1], 2, (episode(None),)),
        Group(TASKS[2], 3, ()),
    ]
    rates = pass_rates(groups)
    assert rates == {"t0": 0.5}
    assert pass_rates(groups, passed=0.9) == {"t0": 0.75}
    write_pass_rates(tmp_path / "rates.json", rates, "accuracy")
    assert read_pass_rates(tmp_path / "rates.json") == rates


def test_tasks_may_be_ordered_and_chosen_by_pass_rate(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    write_pass_rates(file, {"t0": 0.0, "t1": 0.9, "t2": 0.2, "t3": 0.5, "t4": 1.0}, "accuracy")  # t5 was not measured
    source = made(
        tmp_path, by="pass_rate", pass_rates=str(file), min_pass_rate=0.1, max_pass_rate=0.95, stages=2, stage_tasks=4
    )
    assert [sorted(t.id for t in pool) for pool in source.pools] == [["t1", "t3", "t5"], ["t1", "t2", "t3", "t5"]]
    with pytest.raises(DataError, match=r"no task has a pass rate from 0\.99 to 0\.995"):
        made(tmp_path, pass_rates=str(write_only(tmp_path)), min_pass_rate=0.99, max_pass_rate=0.995)


def write_only(tmp_path: Path) -> Path:
    write_pass_rates(tmp_path / "all.json", {t.id: 0.5 for t in TASKS}, "accuracy")
    return tmp_path / "all.json"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"by": "level"}, r"task 't\d': column 'level' holds None.*may be: steps"),
        ({"by": "pass_rate"}, "no task of the source has one"),
        ({"stages": 0}, r"data.stages is 0"),
        ({"limits": [0]}, "no task is as easy as 0"),
        ({"pass_rates": "none.json"}, "cannot be read"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, DataError), match=words):
        made(tmp_path, **options)


def test_a_source_without_end_needs_a_count() -> None:
    with pytest.raises(ConfigError, match=r"data.count"):
        make_source("curriculum", source="arithmetic")
    with pytest.raises(ConfigError, match="did you mean 'arithmetic'"):
        make_source("curriculum", source="arithmetics", count=5)
    with pytest.raises(DataError, match="'level' holds None"):
        make_source("curriculum", source="arithmetic", by="level", count=5)
    assert make_source("curriculum", source="word_problems", count=5).size == 5, "generated problems say their steps"


# Gates ------------------------------------------------------------------------------------------------------


def test_a_gated_stage_lasts_until_a_step_at_its_end_passes(tmp_path: Path) -> None:
    source = made(tmp_path, limits=[2, 4], stage_tasks=4, gate=0.75)
    shares = [1.0, 0.5, 0.9, None, 0.75, 0.75, 1.0]
    cursor, seen = Cursor(), []
    for share in shares:
        tasks, after = source.take(cursor, 3)
        seen.append((cursor.position, cursor.stage, max(steps(tasks)) <= (2, 4, 6)[cursor.stage]))
        cursor = source.heard(cursor, after, share)
    # Tasks 4, 8, 12, 16 and 20 are drawn by the steps that begin at 3 (too few passed), 6 (0.9: on), 9 (nothing was
    # scored), 15 (0.75: on) and 18 (passed, in the last stage).
    assert [(at, stage) for at, stage, _ in seen] == [(0, 0), (3, 0), (6, 0), (9, 1), (12, 1), (15, 1), (18, 2)]
    assert all(within for _, _, within in seen)
    assert cursor == Cursor(0, 21, 2)


def test_a_gated_stage_goes_through_its_pool_in_rounds_and_any_cursor_continues_exactly(tmp_path: Path) -> None:
    source = made(tmp_path, limits=[2, 4], stage_tasks=100, gate=0.5)
    whole = source.take(Cursor(0, 0, 1), 20)[0]
    assert [Counter(t.id for t in whole[at : at + 5]) for at in (0, 5, 10)] == [Counter(t.id for t in TASKS[:5])] * 3
    for at in range(21):
        first, cursor = source.take(Cursor(0, 0, 1), at)
        assert first + made(tmp_path, limits=[2, 4], stage_tasks=100, gate=0.5).take(cursor, 20 - at)[0] == whole


def test_a_cursor_keeps_its_stage_and_one_written_without_has_passed_no_gate() -> None:
    assert Cursor.from_dict(Cursor(1, 2, 3).to_dict()) == Cursor(1, 2, 3)
    assert Cursor.from_dict({"epoch": 1, "position": 2}) == Cursor(1, 2, 0)


@pytest.mark.parametrize("gate", [0.0, 1.5, float("nan")])
def test_a_gate_is_a_share(tmp_path: Path, gate: float) -> None:
    with pytest.raises(ConfigError, match=r"data.gate is .*: a share of the episodes"):
        made(tmp_path, gate=gate)


def test_a_run_passes_its_gates_and_a_resumed_one_is_in_the_same_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from palestra.run.progress import Progress
    from palestra.train import groups
    from palestra.train.config import RLConfig
    from palestra.train.rl import train_rl

    shares = iter([0.2, 0.8, 0.8])
    monkeypatch.setattr(groups, "success_rate", lambda *_: next(shares))

    def trained(steps: int, *, resume: bool = False) -> list[float]:
        source = {"name": "jsonl", "path": write(tmp_path)}
        data = {"name": "curriculum", "source": source, "limits": [2, 4], "stage_tasks": 2, "gate": 0.5}
        config = {
            "out": str(tmp_path / "run"),
            "model": "builtin:calculator",
            "renderer": "plain",
            "env": "calculator",
            "data": data,
            "rewards": {"format": {"function": "calculator_format"}},
            "sampling": {"max_new_tokens": 2},
            "algorithm": {"group_size": 2},
            "train": {"steps": steps, "tasks_per_step": 2, "learning_rate": 1e-3},
            "eval": {"size": 0},
        }
        with Progress(quiet=True) as progress:
            train_rl(RLConfig.model_validate(config), progress=progress, resume=resume)
        rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        return [row["rollout/stage"] for row in rows]

    assert trained(2) == [0, 0]
    assert trained(3, resume=True) == [0, 0, 1]
