# SPDX-License-Identifier: Apache-2.0
"""``train.max_staleness`` above 0: who samples what is a rule, so a run that is stopped anywhere ends as if it had not
been."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ahead_runs import HOOKS, PATIENCE_S, STEPS, lagging, no_hooks, rows_of, step_of  # noqa: F401
from test_resume_matrix import KINDS, PLAYED, check, one_thread, small, uninterrupted  # noqa: F401
from test_train_rl import Interrupted, logged, train, weights_in

from palestra.errors import DataError
from palestra.eval.evaluate import evaluate
from palestra.rollout.dump import read_rollouts
from palestra.train import rl
from palestra.train.checkpoint import load_checkpoint
from palestra.train.config import RLConfig
from palestra.train.groups import Collected
from palestra.types import Task


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Whoever runs the tests in the background may have them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Runs that nobody stopped, by their bound."""
    done: dict[int, Path] = {}

    def run(lag: int) -> Path:
        if lag not in done:
            done[lag] = tmp_path_factory.mktemp("whole") / f"{lag}"
            train(lagging(done[lag], lag, "train.keep_last=9"))
        return done[lag]

    return run


# The rule --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_batch_of_step_n_is_sampled_by_version_n_minus_k(whole: Callable[[int], Path], lag: int) -> None:
    out = whole(lag)
    for step in range(STEPS):
        groups = list(read_rollouts(out / "rollouts" / f"step_{step + 1:06d}.jsonl.zst"))
        assert {step_of(g.task) for g in groups} == {step}
        views = [t for g in groups for e in g.episodes for t in e.trajectories]
        assert {int(v) for t in views for v in t.versions[t.loss_mask]} == {max(0, step - lag)}
        assert {e.info["stale"] for g in groups for e in g.episodes} == {False}
    steps = [r for r in logged(out) if "train/updates" in r]
    assert [r["rollout/staleness_max"] for r in steps] == [min(n, lag) for n in range(STEPS)]
    assert [r["train/ratio_first_step_max"] < 1e-4 for r in steps] == [n == 0 or lag == 0 for n in range(STEPS)]
    assert ("time/wait_s" in steps[0]) == (lag > 0)
    assert not (out / "alarms.jsonl").exists()


# Stopped and gone on with ----------------------------------------------------------------------------------


def same_end(cut: Path, whole: Path, *, resume: RLConfig, steps: int = STEPS) -> None:
    """Go on with the run that was cut short: it ends as the other one, to the last bit."""
    train(resume, resume=True)
    assert weights_in(cut, steps) == weights_in(whole, steps)
    assert rows_of(cut) == rows_of(whole)


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process in which torch is loaded")
@pytest.mark.parametrize(
    ("lag", "adapter", "moment"),
    [
        (1, False, "update"),
        (2, True, "rollout"),
        pytest.param(1, False, "rollout", marks=pytest.mark.slow),  # three runs a case
        pytest.param(1, True, "checkpoint", marks=pytest.mark.slow),
        pytest.param(2, False, "between", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_as_if_it_had_never_been_stopped(
    uninterrupted: Callable[[str, bool], dict[str, Any]],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lag: int,
    adapter: bool,
    moment: str,
) -> None:
    shape, verb, given = KINDS["grpo"]
    kind = f"grpo, {lag} behind"
    monkeypatch.setitem(KINDS, kind, (shape, verb, given | {"train": PLAYED["train"] | {"max_staleness": lag}}))
    check(uninterrupted, tmp_path / "run", kind, adapter, moment)


@pytest.mark.parametrize("lag", [1, 2])
def test_an_interrupted_run_keeps_the_weights_that_what_is_under_way_is_sampled_by(
    whole: Callable[[int], Path], tmp_path: Path, lag: int
) -> None:
    want, out = whole(lag), tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        train(lagging(out, lag, "train.save_every=0"), progress=Interrupted(2))
    kept = load_checkpoint(out / "checkpoints" / "step_000002").trainer["ahead"]
    done = len(kept["batches"])
    assert sorted(kept["weights"]) == list(range(2 + done - lag, 2)), "of what is not whole, and only of that"
    same_end(out, want, resume=lagging(out, lag, "train.save_every=0"))


def test_an_interrupted_adapter_keeps_only_the_older_adapter(tmp_path: Path) -> None:
    out, more = tmp_path / "cut", {"lora": {"r": 2}}
    train(lagging(tmp_path / "whole", 1, **more))
    with pytest.raises(KeyboardInterrupt):
        train(lagging(out, 1, "train.save_every=0", **more), progress=Interrupted(2))
    kept = load_checkpoint(out / "checkpoints" / "step_000002").trainer["ahead"]
    assert all("lora_" in name for weights in kept["weights"].values() for name in weights)
    same_end(out, tmp_path / "whole", resume=lagging(out, 1, "train.save_every=0", **more))


@pytest.mark.parametrize("lag", [1, 2])
def test_a_checkpoint_in_between_holds_batches_and_no_weights_twice(whole: Callable[[int], Path], lag: int) -> None:
    kept = load_checkpoint(whole(lag) / "checkpoints" / "step_000002").trainer["ahead"]
    assert kept["weights"] == {} and len(kept["batches"]) == lag
    groups = [g for batch in kept["batches"] for g in Collected.from_dict(batch).groups]
    assert sorted({step_of(g.task) for g in groups}) == [2, 3][:lag]
    end = load_checkpoint(whole(lag) / "checkpoints" / "step_000004").trainer["ahead"]
    assert (end["weights"], end["batches"]) == ({}, [])


def test_a_run_that_goes_on_with_another_bound_starts_its_batches_anew(tmp_path: Path) -> None:
    out = tmp_path / "a"
    with pytest.raises(KeyboardInterrupt):
        train(lagging(out, 1), progress=Interrupted(2))
    with pytest.warns(UserWarning, match="train.max_staleness 1 → 2"):
        train(lagging(out, 2), resume=True)
    for step, version in ((2, 2), (3, 2)):
        groups = read_rollouts(out / "rollouts" / f"step_{step + 1:06d}.jsonl.zst")
        views = [t for g in groups for e in g.episodes for t in e.trajectories]
        assert {int(v) for t in views for v in t.versions[t.loss_mask]} == {version}


# What goes wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1])
def test_an_error_in_collection_is_told_by_the_step_that_needs_it(
    whole: Callable[[int], Path], tmp_path: Path, lag: int
) -> None:
    def broken(task: Task) -> None:
        if step_of(task) == 2:
            raise DataError("the shelf is empty; fill it")

    want, out = whole(lag), tmp_path / "cut"
    HOOKS["step"] = broken
    with pytest.raises(DataError, match=r"^the shelf is empty; fill it$"):
        train(lagging(out, lag, "train.save_every=0"))
    assert [r["step"] for r in logged(out) if "train/updates" in r] == [1, 2]
    HOOKS["step"] = lambda task: None
    same_end(out, want, resume=lagging(out, lag, "train.save_every=0"))


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_while_a_step_is_learned_from_ends_behind_it(
    whole: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn, taken, want, out = rl.train_step, 0, whole(1), tmp_path / "cut"

    def struck(*args: Any, **options: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken == 2:
            interrupt()
            time.sleep(0.2)
        return learn(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(rl, "train_step", struck)
        with pytest.raises(KeyboardInterrupt):
            train(lagging(out, 1, "train.save_every=0"))
    assert (out / "checkpoints" / "step_000002").is_dir()
    same_end(out, want, resume=lagging(out, 1, "train.save_every=0"))


def test_ctrl_c_while_episodes_are_played_leaves_the_last_whole_step(
    whole: Callable[[int], Path], tmp_path: Path
) -> None:
    struck, want, out = threading.Event(), whole(1), tmp_path / "cut"

    def hangs(task: Task) -> None:
        if step_of(task) == 2 and not struck.is_set():
            struck.set()
            interrupt()
        if step_of(task) == 2:
            time.sleep(PATIENCE_S)

    HOOKS["step"] = hangs
    with pytest.raises(KeyboardInterrupt):
        train(lagging(out, 1, "train.save_every=0"))
    assert struck.is_set()
    HOOKS["step"] = lambda task: None
    same_end(out, want, resume=lagging(out, 1, "train.save_every=0"))


@pytest.mark.parametrize("lag", [0, 1])
def test_ctrl_c_during_an_evaluation_of_the_curve_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lag: int
) -> None:
    measure, more = rl.evaluate, ["eval.every=1", "train.save_every=0", "train.steps=3"]
    train(lagging(tmp_path / "whole", lag, *more))
    asked = 0

    async def struck(*args: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 2:
            interrupt()
            await asyncio.sleep(PATIENCE_S)
        return await measure(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(rl, "evaluate", struck)
        with pytest.raises(KeyboardInterrupt):
            train(lagging(tmp_path / "cut", lag, *more))
    assert [r["step"] for r in logged(tmp_path / "cut")] == [1], "the row of step 2 waits for its evaluation"
    same_end(tmp_path / "cut", tmp_path / "whole", resume=lagging(tmp_path / "cut", lag, *more), steps=3)


def test_an_evaluation_in_between_is_of_the_present_weights_and_changes_nothing(
    whole: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = whole(2)
    versions: list[set[int]] = []

    async def seen(*args: Any, **options: Any) -> Any:
        result = await evaluate(*args, **options)
        spans = [s for g in result.groups for e in g.episodes for t in e.trajectories for s in t.spans]
        versions.append({s.version for s in spans if s.version is not None})
        return result

    monkeypatch.setattr(rl, "evaluate", seen)
    train(lagging(tmp_path / "with", 2, "eval.every=1", "eval.size=2"))
    assert versions == [{0}, {1}, {2}, {3}, {4}]
    assert weights_in(tmp_path / "with", STEPS) == weights_in(want, STEPS)
