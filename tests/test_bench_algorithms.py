# SPDX-License-Identifier: Apache-2.0
"""The bench that trains with every preset: what a run is, that none is repeated, and what the table says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench import algorithms
from bench.algorithms import QUICK, Sizes, app, plan, presets, table
from bench.lab import Crew
from bench.ours import algorithms as ours
from bench.rows import Results
from bench.workers import WorkerError
from palestra.train.config import PRESETS


class Worker:
    """Stands for the processes: plays steps of 300 episodes, and knows more with each. It notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.broken: set[str] = set()
        self.played: dict[str, int] = {}

    def once(self, crew: Crew, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        if name in self.broken:
            raise WorkerError("ours ended without an answer")
        played = self.played.get(name, 0)
        while played < request["episodes"]:
            played += 300
        self.played[name] = played
        self.asked.append((name, request["episodes"], request["held_out"]))
        return {"seconds": 2.0, "accuracy": min(1.0, 0.5 + played / 1500), "episodes": played, "steps": played // 300}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    made = Worker()
    monkeypatch.setattr(Crew, "once", lambda crew, name, request: made.once(crew, name, request))
    monkeypatch.setattr(algorithms, "warm_start", lambda lab, seed, warmup: f"warm/{seed}")
    return made


def command(tmp_path: Path, *words: str) -> Any:
    return CliRunner().invoke(app, [*words, "--json", str(tmp_path / "runs.json"), "--models", str(tmp_path)])


def test_every_preset_that_learns_from_rewards_takes_part_by_itself() -> None:
    assert set(PRESETS) - set(presets()) <= {"distill", "distill_full"}, "they learn from a teacher"
    for preset in presets():
        made = plan(preset, 3, Sizes(), threads=1)
        config = ours.config_of("builtin:calculator", 3, 20, made["algorithm"], made["train"])
        assert (config.algorithm.preset, config.algorithm.group_size, config.seed) == (preset, 8, 3)
        assert (config.train.steps, config.train.tasks_per_step, config.warmup) == (20, 32, None)
        for part, value in PRESETS[preset].items():
            assert getattr(config.algorithm, part) == value, "the preset's own parts, also where the demo has others"
        usual = 1 if config.algorithm.loss == "reinforce" else 2
        assert config.algorithm.updates_per_batch == PRESETS[preset].get("updates_per_batch", usual)


def test_a_run_is_measured_before_after_every_block_and_at_the_end(tmp_path: Path, worker: Worker) -> None:
    found = command(tmp_path, "grpo", "--seeds", "1", "--episodes", "1100")
    assert found.exit_code == 0, found.output
    # Blocks of 512: at 0, then 600 episodes are played; 1024 is met by 1200, which is past the end, where 500 problems
    # are asked for.
    assert [due[1:] for due in worker.asked] == [(0, 100), (512, 100), (1024, 100), (1100, 500)]
    (record,) = Results(tmp_path / "runs.json", resume=True).rows
    assert record["curve"] == [[0, 0.5], [600, 0.9], [1200, 1.0], [1200, 1.0]]
    assert (record["to_enough"], record["accuracy"], record["seconds"]) == (600, 1.0, 8.0)
    assert found.output.splitlines()[-1] == "| grpo | 0.0006 | 1.000 | 600 | 8 |"


def test_a_block_that_a_step_ran_over_is_not_measured_twice(tmp_path: Path, worker: Worker) -> None:
    worker.played["grpo, seed 0"] = 700
    command(tmp_path, "grpo", "--seeds", "1", "--episodes", "1100")
    assert [due[1] for due in worker.asked] == [0, 1024, 1100]


def test_runs_that_are_done_are_kept_and_only_the_others_are_made(tmp_path: Path, worker: Worker) -> None:
    worker.broken.add("dapo, seed 1")
    cut = command(tmp_path, "grpo", "dapo", "--seeds", "2")
    assert cut.exit_code == 1 and "dapo, seed 1: failed" in cut.output
    assert "| dapo | 0.0006 | 1.000 | 600 |" in cut.output, "what there is stands in the table"
    worker.broken.clear()
    worker.asked.clear()
    worker.played.clear()
    assert command(tmp_path, "grpo", "dapo", "--seeds", "2").exit_code == 0
    assert {name for name, *_ in worker.asked} == {"dapo, seed 1"}
    worker.asked.clear()
    command(tmp_path, "grpo", "--seeds", "1", "--episodes", "600")
    assert {name for name, *_ in worker.asked} == {"grpo, seed 0"}, "with another plan it is another run"


def test_an_unknown_preset_is_one_line(tmp_path: Path) -> None:
    found = command(tmp_path, "dappo")
    assert found.exit_code == 2 and "did you mean 'dapo'" in found.output


def test_a_preset_that_did_not_get_there_says_so() -> None:
    run = {"preset": "x", "accuracy": 0.4, "to_enough": None, "seconds": 1.0, "plan": {"train": {"learning_rate": 1.0}}}
    assert table([run, run]).splitlines()[-1] == "| x | 1 | 0.400 (0.400 to 0.400) | never | 1 |"


def test_a_process_plays_whole_steps_and_counts_what_it_discarded() -> None:
    made = plan("dapo", 0, QUICK, threads=1)
    measure = ours.algorithm("builtin:calculator", 0, 2, made["algorithm"] | {"max_gen_batches": 2}, made["train"])
    before = measure({"episodes": 0, "held_out": 2})
    assert (before["episodes"], before["steps"]) == (0, 0)
    after = measure({"episodes": 1, "held_out": 2})
    # Two tasks with two episodes each; this model never answers, so both are drawn again: eight episodes in one step.
    assert (after["episodes"], after["steps"]) == (8, 1) and after["seconds"] > 0
    assert measure({"episodes": 8, "held_out": 2})["steps"] == 1, "enough were played"
