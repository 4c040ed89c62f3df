# SPDX-License-Identifier: Apache-2.0
"""Alarms of a run: shown at once, kept in the run directory, found again by ``palestra doctor``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_health import BASE, Row, after, level, rl_rows
from test_train_rl import config as tiny_config
from test_train_rl import logged, train
from typer.testing import CliRunner

from palestra.cli import app
from palestra.config import load
from palestra.errors import RunError
from palestra.run.directory import Run
from palestra.run.doctor import diagnose
from palestra.run.health import Watch
from palestra.run.progress import Progress
from palestra.train.config import RAILS, RLConfig

CONFIG = load(BASE, [], RLConfig)
SICK = rl_rows(60, train__kl=after(30, level(0.05), level(0.9)))


def a_run(path: Path, rows: list[tuple[int, Row]]) -> list[str]:
    """A run directory with these rows, watched as a loop watches it; returns what was told."""
    told: list[str] = []
    with Run.open(path, CONFIG) as run:
        watch = Watch(path, CONFIG.model_dump(mode="json"), rails=RAILS, tell=told.append)
        for step, row in rows:
            watch.observe(step, row, phase="rl")
            run.log(step, row, phase="rl")
    return told


def kept(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "alarms.jsonl").read_text(encoding="utf-8").splitlines()]


def resumed(path: Path, rows: list[tuple[int, Row]], at: int) -> list[str]:
    """Go on after step ``at``, as a resumed run does: what lies behind it is forgotten first."""
    told: list[str] = []
    with Run.open(path, CONFIG, resume=True) as run:
        run.rewind(at, phase="rl")
        watch = Watch(path, CONFIG.model_dump(mode="json"), rails=RAILS, tell=told.append)
        for step, row in rows[at:]:
            watch.observe(step, row, phase="rl")
            run.log(step, row, phase="rl")
    return told


def test_an_alarm_is_told_at_once_and_kept_in_the_run(tmp_path: Path) -> None:
    told = a_run(tmp_path / "run", SICK)
    (line,) = told
    (alarm,) = kept(tmp_path / "run")
    assert line.startswith("kl_high since step 30: ")
    assert (alarm["format"], alarm["rule"], alarm["phase"], alarm["since"]) == (1, "kl_high", "rl", 30)
    assert set(alarm) == {"format", "rule", "phase", "since", "step", "seen", "cause", "changes"}
    assert alarm["changes"][1] == {
        "key": "algorithm.kl_coef",
        "why": "holds the policy near the reference, now 0.05",
        "override": "algorithm.kl_coef=0.1",
    }


def test_a_run_without_alarms_has_no_file_of_them(tmp_path: Path) -> None:
    assert a_run(tmp_path / "run", rl_rows(60)) == []
    assert not (tmp_path / "run" / "alarms.jsonl").exists()


@pytest.mark.parametrize("at", [10, 31, 34, 50])
def test_a_resumed_run_keeps_the_alarms_of_an_uninterrupted_one(tmp_path: Path, at: int) -> None:
    a_run(tmp_path / "whole", SICK)
    a_run(tmp_path / "cut", SICK)
    told = resumed(tmp_path / "cut", SICK, at)
    assert kept(tmp_path / "cut") == kept(tmp_path / "whole")
    (alarm,) = kept(tmp_path / "whole")
    assert len(told) == (1 if at < alarm["step"] else 0), "what was told before is not told again"


def test_a_resume_from_before_the_alarm_forgets_it_when_it_does_not_come_again(tmp_path: Path) -> None:
    a_run(tmp_path / "run", SICK)
    assert resumed(tmp_path / "run", rl_rows(60), 20) == []
    assert kept(tmp_path / "run") == []


def test_the_doctor_says_the_same_as_the_run_did(tmp_path: Path) -> None:
    rows = rl_rows(
        60, train__kl=lambda s: 0.9 if 20 <= s < 30 else 0.05, rollout__errors=after(40, level(0), level(60))
    )
    a_run(tmp_path / "run", rows)
    diagnosis = diagnose(tmp_path / "run", rails=RAILS)
    assert [json.loads(json.dumps(a.to_dict())) for a in diagnosis.alarms] == kept(tmp_path / "run")
    assert [a.rule for a in diagnosis.alarms] == ["kl_high", "episodes_fail"]
    assert (list(diagnosis.over), dict(diagnosis.steps), diagnosis.finished) == ([0], {"rl": 60}, False)


def doctor(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["doctor", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_the_verb_prints_alarms_for_people_and_as_json(tmp_path: Path) -> None:
    path = tmp_path / "run"
    a_run(path, SICK)
    code, said, _ = doctor(str(path))
    assert code == 0
    head, blank, title, *rest = said.splitlines()
    assert head == f"{path}: not finished, 60 rl steps; 1 alarm" and blank == ""
    assert title.startswith("kl_high (rl): since step 30, rang at step 3") and title.endswith("so to the end")
    text = "\n".join(rest)
    for part in (
        "  seen    the KL to the reference",
        "  cause   the policy runs away",
        "  change  algorithm.kl_coef=0.1",
    ):
        assert part in text
    code, said, _ = doctor(str(path), "--json")
    found = json.loads(said)
    assert (code, found["format"], found["finished"], found["steps"]) == (0, 1, False, {"rl": 60})
    assert found["alarms"] == [{**kept(path)[0], "over": None}]


def test_a_healthy_run_is_called_so(tmp_path: Path) -> None:
    a_run(tmp_path / "run", rl_rows(60))
    with Run.open(tmp_path / "run", CONFIG, resume=True) as run:
        run.write_summary({})
    assert doctor(str(tmp_path / "run"))[1] == f"{tmp_path / 'run'}: finished, 60 rl steps; no alarm\n"


def test_a_run_that_is_being_written_can_be_looked_at(tmp_path: Path) -> None:
    a_run(tmp_path / "run", SICK)
    file = tmp_path / "run" / "metrics.jsonl"
    text = file.read_text()
    file.write_text(text + '{"step": 61, "phase": "rl", "train/k')
    assert len(diagnose(tmp_path / "run", rails=RAILS).alarms) == 1
    assert file.read_text().endswith("train/k"), "it only reads"


def test_what_is_no_run_is_one_line(tmp_path: Path) -> None:
    code, _, said = doctor(str(tmp_path / "absent"))
    assert code == 2 and said == f"error: {tmp_path / 'absent'} holds no run (no run.json); check the path\n"
    with Run.open(tmp_path / "new", CONFIG):
        pass
    (tmp_path / "new" / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match="has logged nothing yet"):
        diagnose(tmp_path / "new")


# In the loop -----------------------------------------------------------------------------------------------


class Noted(Progress):
    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.warnings: list[str] = []

    def note(self, text: str, *, warning: bool = False) -> None:
        self.warnings += [text] if warning else []


def test_the_training_loop_feeds_the_watch_and_counts_its_alarms(tmp_path: Path) -> None:
    progress = Noted()
    settings = tiny_config(tmp_path / "run", "train.steps=6", "eval.size=0", "train.save_every=2")
    summary = train(settings, progress=progress)
    (alarm,) = kept(tmp_path / "run")
    assert (alarm["rule"], alarm["since"], alarm["step"]) == ("small_group", 1, 5), "groups of two"
    assert summary["alarms"] == 1
    assert any(line.startswith("small_group since step 1: an advantage compares an episode with 1 other") for line in
               progress.warnings)  # fmt: skip
    assert [a.rule for a in diagnose(tmp_path / "run", rails=RAILS).alarms] == ["small_group"]
    assert "alarms.jsonl" in {p.name for p in (tmp_path / "run").iterdir()}
    assert max(row["step"] for row in logged(tmp_path / "run")) == 6


def test_the_doctor_says_of_which_phase_there_are_no_rules(tmp_path: Path) -> None:
    with Run.open(tmp_path / "run", CONFIG) as run:
        run.log(1, {"prefer/loss": 0.7}, phase="prefer")
    assert "1 prefer steps; no alarm (prefer has no rules)" in diagnose(tmp_path / "run").text()
