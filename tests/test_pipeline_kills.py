# SPDX-License-Identifier: Apache-2.0
"""A pipeline that is killed in each of its stages, at its beginning, in its midst and after its work, and run again."""

from __future__ import annotations

import json
import os
import signal
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from small_pipeline import feedback, small, weights
from test_resume_matrix import forked, one_thread  # noqa: F401

from palestra.pipeline import Book, Outcome, PipelineConfig, Stage, run_pipeline
from palestra.pipeline_stages import numbers
from palestra.run.progress import Progress

pytestmark = [
    pytest.mark.slow,  # a process for each of three moments of every stage
    pytest.mark.skipif(sys.platform != "linux", reason="forks a process in which torch is loaded"),
]

UNTOLD = ("gate", "compare")  # too short to report anything in between


class Killed(Progress):
    """SIGKILL of the own process when a stage begins, or at its first report."""

    def __init__(self, stage: str, moment: str) -> None:
        super().__init__(quiet=True)
        self.at, self.moment, self.now = stage, moment, ""

    def note(self, text: str, *, warning: bool = False) -> None:
        if text.startswith("stage "):
            self.now = text.rpartition(", ")[2]
            self.strike("begun")

    def update(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        self.strike("midst")

    def strike(self, moment: str) -> None:
        if (self.now, moment) == (self.at, self.moment):
            os.kill(os.getpid(), signal.SIGKILL)


def killed(config: PipelineConfig, stage: str, moment: str) -> int:
    """The signal that ended a pipeline which goes on in a process of its own."""

    def keep(book: Book, stage: Stage, outcome: Outcome, seconds: float) -> None:
        progress.strike("worked")
        whole_keep(book, stage, outcome, seconds)

    def work() -> None:
        Book.keep = keep  # type: ignore[method-assign]  # in the child alone
        run_pipeline(config, progress=progress)

    whole_keep, progress = Book.keep, Killed(stage, moment)
    _, status = os.waitpid(forked(work, seconds=300), 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


@pytest.mark.parametrize(
    ("make", "models", "measured"),
    [
        (small, ("export",), ("eval_rl", "compare")),
        (feedback, ("prefer/checkpoints/step_000002", "rl/checkpoints/step_000001"), ("sample", "judge", "pairs")),
    ],
    ids=["road", "feedback"],
)
def test_a_pipeline_killed_in_every_stage_ends_as_an_uncut_one(
    make: Callable[[Path], PipelineConfig],
    models: tuple[str, ...],
    measured: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("likes_variety")
    vars(module)["liked"] = lambda completions, **_: [float(len({*text})) for text in completions]
    monkeypatch.setitem(sys.modules, "likes_variety", module)
    out, uncut = tmp_path / "p", tmp_path / "uncut"
    stages = list(make(out).stages)
    for number, stage in enumerate(stages):
        for moment in ("begun", "midst", "worked"):
            if moment == "midst" and stage in UNTOLD:
                continue
            assert killed(make(out), stage, moment) == signal.SIGKILL, (stage, moment)
            done = {name for name in stages if (out / "results" / f"{name}.json").is_file()}
            assert done == {*stages[:number]}, f"killed in {stage}, {moment}"
    summary = run_pipeline(make(out), progress=Progress(quiet=True))
    assert {result["status"] for result in summary["stages"].values()} == {"done"}
    run_pipeline(make(uncut), progress=Progress(quiet=True))
    for model in models:
        ours, theirs = weights(out / model), weights(uncut / model)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for stage in measured:
        one, other = (numbers_of(path / "results" / f"{stage}.json") for path in (out, uncut))
        assert one == other


def numbers_of(file: Path) -> dict[str, float | None]:
    found = numbers(json.loads(file.read_text())["summary"])
    return {name: value for name, value in found.items() if "second" not in name and "time" not in name}
