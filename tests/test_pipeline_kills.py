# SPDX-License-Identifier: Apache-2.0
"""A pipeline that is killed in each of its stages, at its beginning, in its midst and after its work, and run again."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from small_pipeline import small, weights
from test_resume_matrix import forked, one_thread  # noqa: F401

from palestra.pipeline import Book, Outcome, Stage, run_pipeline
from palestra.pipeline_stages import numbers
from palestra.run.progress import Progress

pytestmark = [
    pytest.mark.slow,  # a process for each of three moments of every stage
    pytest.mark.skipif(sys.platform != "linux", reason="forks a process in which torch is loaded"),
]

STAGES = list(small(Path()).stages)
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


def killed(out: Path, stage: str, moment: str) -> int:
    """The signal that ended a pipeline which goes on in a process of its own."""

    def keep(book: Book, stage: Stage, outcome: Outcome, seconds: float) -> None:
        progress.strike("worked")
        whole_keep(book, stage, outcome, seconds)

    def work() -> None:
        Book.keep = keep  # type: ignore[method-assign]  # in the child alone
        run_pipeline(small(out), progress=progress)

    whole_keep, progress = Book.keep, Killed(stage, moment)
    _, status = os.waitpid(forked(work, seconds=300), 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


@pytest.fixture(scope="module")
def uncut(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:  # noqa: F811
    out = tmp_path_factory.mktemp("uncut") / "p"
    run_pipeline(small(out), progress=Progress(quiet=True))
    yield out


def test_a_pipeline_killed_in_every_stage_ends_as_an_uncut_one(uncut: Path, tmp_path: Path) -> None:
    out = tmp_path / "p"
    for number, stage in enumerate(STAGES):
        for moment in ("begun", "midst", "worked"):
            if moment == "midst" and stage in UNTOLD:
                continue
            assert killed(out, stage, moment) == signal.SIGKILL, (stage, moment)
            done = {name for name in STAGES if (out / "results" / f"{name}.json").is_file()}
            assert done == set(STAGES[:number]), f"killed in {stage}, {moment}"
    summary = run_pipeline(small(out), progress=Progress(quiet=True))
    assert {result["status"] for result in summary["stages"].values()} == {"done"}
    ours, theirs = weights(out / "export"), weights(uncut / "export")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for stage in ("eval_rl", "compare"):
        one, other = (numbers_of(path / "results" / f"{stage}.json") for path in (out, uncut))
        assert one == other


def numbers_of(file: Path) -> dict[str, float | None]:
    found = numbers(json.loads(file.read_text())["summary"])
    return {name: value for name, value in found.items() if "second" not in name and "time" not in name}
