# SPDX-License-Identifier: Apache-2.0
"""The run directory: claimed by one run, whole or absent, and no metric row lost or doubled."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from palestra.config import Config, load
from palestra.errors import ConfigError, DataError, RunError
from palestra.run import directory, files, trackers
from palestra.run.directory import Run, check_free, check_writable, git_state, read_run
from palestra.run.files import write_json, write_text
from palestra.run.metrics import FAMILIES, METRICS, check, help_of
from palestra.run.trackers import read_metrics

SOURCES = str(Path(directory.__file__).parents[2])


class Settings(Config):
    seed: int = 7
    learning_rate: float = 1e-5


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside any work tree, where asking git is quick."""
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))


def names(path: Path) -> set[str]:
    return {p.name for p in path.iterdir()}


def rows(path: Path) -> list[tuple[str, int]]:
    return [(row["phase"], row["step"]) for row in read_metrics(path / "metrics.jsonl")]


def test_a_new_run_holds_its_config_and_where_it_came_from(tmp_path: Path) -> None:
    with Run.open(tmp_path / "a" / "b", Settings(seed=3)) as run:
        info = read_run(run.path)
        assert (info["format"], info["seed"], info["versions"]["python"]) == (1, 3, sys.version.split()[0])
        assert set(info["versions"]) >= {"palestra", "torch", "transformers", "peft"}
        assert load(run.path / "config.yaml", [], Settings) == Settings(seed=3)


def test_opening_a_run_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from palestra.config import Config; from palestra.run.directory import Run\n"
        f"run = Run.open({str(tmp_path / 'a')!r}, Config())\n"
        "run.log(1, {'train/loss': 1.0}, phase='rl'); run.close()\n"
        "assert not {'torch', 'transformers', 'tensorflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": SOURCES})


def test_an_empty_directory_may_be_used(tmp_path: Path) -> None:
    Run.open(tmp_path, Settings()).close()
    assert "run.json" in names(tmp_path)


def test_a_directory_with_another_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    with Run.open(tmp_path / "a", Settings(seed=1)) as run:
        run.log(1, {"train/loss": 1.0}, phase="rl")
    before = (tmp_path / "a" / "run.json").read_text(), rows(tmp_path / "a")
    with pytest.raises(RunError, match="already holds a run; go on with it by --resume or choose another --out"):
        Run.open(tmp_path / "a", Settings(seed=2))
    assert before == ((tmp_path / "a" / "run.json").read_text(), rows(tmp_path / "a"))


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunError, match="is not empty and holds no run"):
        Run.open(tmp_path, Settings())
    assert names(tmp_path) == {"thesis.tex"}


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(RunError, match="choose another --out"):
        Run.open(tmp_path / "a", Settings())
    with pytest.raises(RunError, match="a part of the path is a file"):
        Run.open(tmp_path / "a" / "b", Settings())


@pytest.mark.parametrize(
    ("code", "said"), [(errno.EACCES, "no permission"), (errno.ENOSPC, "the disk is full"), (errno.EROFS, "read-only")]
)
def test_a_place_that_takes_no_file_is_told_at_once_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    asked = []

    def refused(*, dir: Path) -> None:
        asked.append(dir)
        raise OSError(code, "simulated")

    check_writable(tmp_path / "a" / "b")
    monkeypatch.setattr(directory.tempfile, "TemporaryFile", refused)
    with pytest.raises(RunError, match=f"cannot write {tmp_path}/a/b: .*{said}"):
        check_writable(tmp_path / "a" / "b")
    assert asked == [tmp_path] and names(tmp_path) == set()


def test_ctrl_c_before_anything_was_logged_gives_the_directory_back(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Run.open(tmp_path / "a", Settings()):
        raise KeyboardInterrupt
    assert names(tmp_path) == set()
    with pytest.raises(KeyboardInterrupt), Run.open(tmp_path / "a", Settings()) as run:
        run.log(1, {"train/loss": 1.0}, phase="rl")
        raise KeyboardInterrupt
    assert rows(tmp_path / "a") == [("rl", 1)]


def test_an_evaluation_that_is_there_already_cannot_be_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"format": 1, "kind": "EvalConfig"}')
    with pytest.raises(RunError, match="already holds a run; choose another --out"):
        check_free(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RunError, match="no permission"):
        Run.open(tmp_path / "a", Settings())


@pytest.mark.parametrize("code, said", [(errno.ENOSPC, "the disk is full"), (errno.EACCES, "no permission")])
@pytest.mark.parametrize("broken", ["run.json", "config.yaml", "metrics.jsonl"])
def test_a_disk_that_fails_half_way_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, code: int, said: str
) -> None:
    replace, open_file = os.replace, Path.open

    def failing_replace(source: str, target: Any) -> None:
        if Path(target).name == broken:
            raise OSError(code, "simulated")
        replace(source, target)

    def failing_open(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name == broken:
            raise OSError(code, "simulated")
        return open_file(self, *args, **kwargs)

    monkeypatch.setattr(files.os, "replace", failing_replace)
    monkeypatch.setattr(Path, "open", failing_open)
    with pytest.raises(RunError, match=said):
        Run.open(tmp_path / "runs" / "a", Settings())
    assert names(tmp_path) == set()


def test_a_disk_that_fills_up_while_logging_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Run.open(tmp_path / "a", Settings()) as run:
        monkeypatch.setattr(trackers.JsonlTracker, "log", full)
        with pytest.raises(RunError, match="the disk is full"):
            run.log(1, {"train/loss": 1.0}, phase="rl")


def test_a_failed_write_keeps_the_old_file_and_no_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "summary.json", {"a": 1})
    monkeypatch.setattr(files.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(RunError, match="the disk is full"):
        write_json(tmp_path / "summary.json", {"a": 2})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"a": 1}
    assert names(tmp_path) == {"summary.json"}


def test_a_written_file_is_readable_as_the_umask_says(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        write_text(tmp_path / "a", "x")
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_json_never_holds_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert names(tmp_path) == set()


def test_ev_013_every_call_has_its_own_step_and_no_row_is_lost(tmp_path: Path) -> None:
    with Run.open(tmp_path / "a", Settings(), strict=True) as run:
        run.log(5, {"train/loss": 0.1}, phase="rl")
        run.log(5, {"train/reward": 0.2}, phase="rl")
        run.log(3, {"eval/accuracy": 0.3}, phase="rl")
    found = read_metrics(tmp_path / "a" / "metrics.jsonl")
    assert [{k: v for k, v in row.items() if k != "time"} for row in found] == [
        {"step": 5, "phase": "rl", "train/loss": 0.1},
        {"step": 5, "phase": "rl", "train/reward": 0.2},
        {"step": 3, "phase": "rl", "eval/accuracy": 0.3},
    ]


def test_a_value_that_does_not_exist_is_left_out_and_never_zero(tmp_path: Path) -> None:
    with Run.open(tmp_path / "a", Settings()) as run:
        run.log(1, {"train/kl": float("nan"), "train/reward": None, "train/loss": float("inf")}, phase="rl")
        run.log(2, {"train/kl": 0.0}, phase="rl")
    first, second = read_metrics(tmp_path / "a" / "metrics.jsonl")
    assert set(first) == {"step", "phase", "time"}
    assert second["train/kl"] == 0.0


def test_tensorboard_gets_the_same_numbers_at_the_same_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    with Run.open(tmp_path / "a", Settings()) as run:
        run.log(5, {"train/reward": 0.5, "train/kl": float("nan")}, phase="rl")
        run.log(3, {"eval/accuracy": 0.25}, phase="rl")
    (events,) = (tmp_path / "a" / "tensorboard").iterdir()
    seen = [(e.step, v.tag) for e in EventFileLoader(str(events)).Load() for v in e.summary.value]
    assert seen == [(5, "train/reward"), (3, "eval/accuracy")]


def test_resuming_goes_on_in_the_same_files_and_writes_down_that_it_did(tmp_path: Path) -> None:
    with Run.open(tmp_path / "a", Settings()) as run:
        run.log(1, {"train/loss": 1.0}, phase="rl")
    with pytest.warns(UserWarning, match="learning_rate 1e-05 → 1e-06"):
        resumed = Run.open(tmp_path / "a", Settings(learning_rate=1e-6), resume=True)
    with resumed as run:
        run.log(2, {"train/loss": 0.5}, phase="rl")
    assert rows(tmp_path / "a") == [("rl", 1), ("rl", 2)]
    assert len(read_run(tmp_path / "a")["resumed"]) == 1
    assert load(tmp_path / "a" / "config.yaml", [], Settings).learning_rate == 1e-6


def test_rows_after_the_resumed_step_are_forgotten_so_none_is_doubled(tmp_path: Path) -> None:
    with Run.open(tmp_path / "a", Settings()) as run:
        for phase, step in [("sft", 1), ("sft", 20), ("rl", 1), ("rl", 2), ("rl", 3)]:
            run.log(step, {"train/loss": 1.0}, phase=phase)
    with Run.open(tmp_path / "a", Settings(), resume=True) as run:
        assert run.rewind(2, phase="rl") == 1
        run.log(3, {"train/loss": 0.5}, phase="rl")
    assert rows(tmp_path / "a") == [("sft", 1), ("sft", 20), ("rl", 1), ("rl", 2), ("rl", 3)]
    with Run.open(tmp_path / "a", Settings(), resume=True) as run:
        assert run.rewind(1) == 3
    assert rows(tmp_path / "a") == [("sft", 1), ("rl", 1)]


def test_of_the_resumed_step_its_own_row_stays_and_what_was_measured_behind_it_goes(tmp_path: Path) -> None:
    with Run.open(tmp_path / "a", Settings()) as run:
        for phase, step, name in [("rl", 0, "eval/accuracy"), ("sft", 2, "sft/loss"), ("rl", 1, "train/loss"),
                                  ("rl", 2, "train/loss"), ("rl", 2, "eval/accuracy")]:  # fmt: skip
            run.log(step, {name: 1.0}, phase=phase)
    with Run.open(tmp_path / "a", Settings(), resume=True) as run:
        assert run.rewind(2, phase="rl") == 1
    left = read_metrics(tmp_path / "a" / "metrics.jsonl")
    assert rows(tmp_path / "a") == [("rl", 0), ("sft", 2), ("rl", 1), ("rl", 2)]
    assert "train/loss" in left[-1] and "eval/accuracy" not in left[-1]


def test_a_line_torn_by_a_kill_is_dropped_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    with Run.open(tmp_path / "a", Settings()) as run:
        run.log(1, {"train/loss": 1.0}, phase="rl")
    log = tmp_path / "a" / "metrics.jsonl"
    log.write_text(log.read_text() + '{"step": 2, "pha')
    with Run.open(tmp_path / "a", Settings(), resume=True) as run:
        run.log(2, {"train/loss": 1.0}, phase="rl")
    assert rows(tmp_path / "a") == [("rl", 1), ("rl", 2)]
    log.write_text("nonsense\n" + log.read_text())
    with pytest.raises(DataError, match=r"metrics.jsonl:1: not a metrics row"):
        read_metrics(log)


def test_resuming_what_never_began_starts_it(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "run.json").touch()  # claimed, and killed before it was described
    (tmp_path / "killed" / "tensorboard").mkdir()
    for name in ("absent", "empty", "killed"):
        with Run.open(tmp_path / name, Settings(), resume=True) as run:
            run.log(1, {"train/loss": 0.5}, phase="rl")
        assert "resumed" not in read_run(tmp_path / name)
        with Run.open(tmp_path / name, Settings(), resume=True):
            assert len(read_run(tmp_path / name)["resumed"]) == 1


def test_other_files_are_not_taken_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("work of years")
    with pytest.raises(RunError, match="holds no run"):
        Run.open(tmp_path, Settings(), resume=True)
    assert (tmp_path / "thesis.tex").exists()


def test_a_run_of_an_unknown_format_is_not_resumed(tmp_path: Path) -> None:
    Run.open(tmp_path / "a", Settings()).close()
    write_json(tmp_path / "a" / "run.json", {"format": 2})
    with pytest.raises(RunError, match="format 2 is not known here"):
        Run.open(tmp_path / "a", Settings(), resume=True)


def test_the_git_state_says_commit_and_whether_files_differ(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None

    def git(*args: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *args], check=True, capture_output=True)

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "first")
    state = git_state(tmp_path)
    assert state is not None and len(state["commit"]) == 40 and state["dirty"] is False
    (tmp_path / "a").write_text("2")
    assert (git_state(tmp_path) or {})["dirty"] is True


def test_git_not_installed_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(Path.cwd()) is None


def test_an_unregistered_metric_is_refused_when_strict_and_a_shapeless_name_always(tmp_path: Path) -> None:
    with Run.open(tmp_path / "a", Settings(), strict=True) as run:
        with pytest.raises(ConfigError, match="did you mean 'train/reward'"):
            run.log(1, {"train/rewrad": 1.0}, phase="rl")
        run.log(1, {"reward/format": 1.0}, phase="rl")
    with pytest.raises(ConfigError, match="area/name"):
        check(["loss"], strict=False)
    check(["mine/own"], strict=False)


@pytest.mark.parametrize("key", ["reward", "kl", "loss", "learning_rate", "epoch"])
def test_the_keys_that_other_tools_expect_exist(key: str) -> None:
    assert help_of(f"train/{key}")


def test_every_metric_has_a_line_of_help_and_a_family_needs_a_member() -> None:
    assert all(text and "\n" not in text for text in (METRICS | FAMILIES).values())
    assert help_of("reward/") is None
    assert help_of("eval/reward/format") == FAMILIES["eval/reward/"]


def test_an_unknown_tracker_is_refused_before_anything_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown tracker 'wandbb': did you mean 'wandb'"):
        Run.open(tmp_path / "a", Settings(), trackers=["wandbb"])
    assert names(tmp_path) == set()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_whose_package_is_missing_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        Run.open(tmp_path / "a", Settings(), trackers=[name])
    assert names(tmp_path) == set()


class FakeRun:
    """Records what a tracker's client is told."""

    id = "abc"

    def __init__(self, **options: Any) -> None:
        self.options, self.rows, self.axes, self.artifacts, self.finished = options, [], [], [], False

    def log(self, row: dict[str, Any], **options: Any) -> None:
        self.rows.append((row, options))

    def define_metric(self, name: str, **options: Any) -> None:
        self.axes.append((name, options))

    def log_artifact(self, artifact: Any, aliases: list[str]) -> None:
        self.artifacts.append(aliases[0])

    def finish(self) -> None:
        self.finished = True


class FakeClient:
    """Stands in for the modules wandb and trackio."""

    class errors:
        class Error(Exception):
            pass

    class Artifact:
        def __init__(self, name: str, type: str) -> None:
            pass

        def add_dir(self, path: str) -> None:
            pass

    def __init__(self) -> None:
        self.runs: list[FakeRun] = []

    def init(self, **options: Any) -> FakeRun:
        self.runs.append(FakeRun(**options))
        return self.runs[-1]


def test_wandb_follows_our_step_the_environments_project_and_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeClient()
    monkeypatch.setitem(sys.modules, "wandb", client)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_LOG_MODEL", "end")
    for resume in (False, True):
        with Run.open(tmp_path / "a", Settings(), trackers=["wandb"], resume=resume) as run:
            run.log(5, {"train/loss": 0.5}, phase="rl")
            run.log(3, {"eval/accuracy": 0.1, "train/kl": None}, phase="rl")
            for step in ("step_000010", "step_000020"):
                (run.path / "checkpoints" / step).mkdir(parents=True, exist_ok=True)
    first, second = client.runs
    assert [row for row, _ in first.rows] == [
        {"train/loss": 0.5, "step": 5, "phase": "rl"},
        {"eval/accuracy": 0.1, "step": 3, "phase": "rl"},
    ]
    assert ("*", {"step_metric": "step"}) in first.axes
    assert first.options["project"] == "mine" and first.options["id"] == second.options["id"]
    assert first.artifacts == ["step_000020"] and first.finished


def test_wandb_that_cannot_start_is_one_line_that_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeClient()

    def refuse(**options: Any) -> FakeRun:
        raise client.errors.Error("api_key not\nconfigured")

    monkeypatch.setitem(sys.modules, "wandb", client)
    monkeypatch.setattr(client, "init", refuse)
    with pytest.raises(ConfigError, match="api_key not configured; log in, or set WANDB_MODE=offline"):
        Run.open(tmp_path / "a", Settings(), trackers=["wandb"])


def test_trackio_keeps_runs_of_one_name_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient()
    monkeypatch.setitem(sys.modules, "trackio", client)
    for parent in ("x", "y"):
        with Run.open(tmp_path / parent / "a", Settings(), trackers=["trackio"]) as run:
            run.log(4, {"train/loss": 0.5}, phase="rl")
    assert client.runs[0].options["name"] != client.runs[1].options["name"]
    assert client.runs[0].rows == [({"train/loss": 0.5, "phase": "rl"}, {"step": 4})]


def test_closing_twice_is_fine(tmp_path: Path) -> None:
    run = directory.Run.open(tmp_path / "a", Settings())
    run.close()
    run.close()


class Other(Config):
    seed: int = 0


class Played(Config):
    seed: int = 0
    model: str = "a"
    data: str = "easy"


def test_a_mistake_before_anything_was_kept_leaves_the_directory_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "new" / "run", tmp_path / "empty"):
        with pytest.raises(ConfigError), Run.open(path, Settings()):
            raise ConfigError("the reward has no such part")
    assert names(tmp_path) == {"empty"} and not names(tmp_path / "empty")


@pytest.mark.parametrize("kept", ["row", "checkpoint", "bug"])
def test_what_was_logged_or_saved_stays_and_so_does_what_a_bug_leaves(tmp_path: Path, kept: str) -> None:
    with pytest.raises((ConfigError, ZeroDivisionError)), Run.open(tmp_path / "a", Settings()) as run:
        if kept == "row":
            run.log(1, {"train/reward": 0.5}, phase="rl")
        if kept == "checkpoint":
            (run.path / "checkpoints").mkdir()
        raise ConfigError("too late") if kept != "bug" else ZeroDivisionError
    assert (tmp_path / "a" / "run.json").exists()


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (Other(), "a run whose kind is Played, not Other"),
        (Played(seed=1), "a run whose seed is 0, not 1"),
        (Played(model="b"), "a run of the model a, not b"),
    ],
    ids=["kind", "seed", "model"],
)
def test_a_run_is_not_gone_on_with_as_another_one(tmp_path: Path, other: Config, told: str) -> None:
    Run.open(tmp_path / "a", Played()).close()
    before = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir() if p.is_file()}
    with pytest.raises(RunError, match=told):
        Run.open(tmp_path / "a", other, resume=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir() if p.is_file()} == before


class Loop(Config):
    learning_rate: float = 1e-3
    steps: int = 10
    save_every: int = 5


class Deep(Config):
    seed: int = 0
    out: str = "runs/a"
    data: dict[str, Any] = Field(default_factory=lambda: {"name": "easy", "count": 9})
    train: Loop = Loop()


def test_every_key_that_is_not_as_it_was_is_told_in_a_resumed_run(tmp_path: Path) -> None:
    Run.open(tmp_path / "a", Deep()).close()
    other = Deep(data={"name": "easy", "count": 12}, train=Loop(learning_rate=5e-4))
    said = r"goes on with another config than it had: data\.count 9 → 12; train\.learning_rate 0\.001 → 0\.0005$"
    with pytest.warns(UserWarning, match=said):
        Run.open(tmp_path / "a", other, resume=True).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # compared with the last time, and what changes no number is free
        longer = other.model_copy(update={"out": "b", "train": Loop(learning_rate=5e-4, steps=20, save_every=1)})
        Run.open(tmp_path / "a", longer, resume=True).close()


def test_a_text_is_written_through_a_link_and_into_a_pipe(tmp_path: Path) -> None:
    """``--out`` may be either; putting a new file in its place would leave the other end without one."""
    (tmp_path / "kept").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "kept").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "said")
    assert os.read(reader, 10) == b"said" and not (tmp_path / "pipe").is_file()
    os.close(reader)


def test_a_link_to_nothing_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RunError, match="cannot write"):
        check_writable(tmp_path / "link" / "run")


@pytest.mark.skipif(directory.fcntl is None, reason="no locks there")
def test_a_run_that_is_being_written_is_not_gone_on_with_a_second_time(tmp_path: Path) -> None:
    with Run.open(tmp_path / "a", Settings()) as run:
        with pytest.raises(RunError, match="is being written by another process"):
            Run.open(tmp_path / "a", Settings(), resume=True)
        run.log(1, {"train/loss": 1.0}, phase="rl")
    for _ in range(2):  # closed, and closed again
        Run.open(tmp_path / "a", Settings(), resume=True).close()


def test_tensorboard_shows_no_row_twice_after_a_phase_went_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    with Run.open(tmp_path / "a", Settings()) as run:
        for phase, step in [("sft", 1), ("sft", 9), ("rl", 1), ("rl", 2), ("rl", 3)]:
            run.log(step, {f"{'train' if phase == 'rl' else phase}/loss": 1.0}, phase=phase)
    with Run.open(tmp_path / "a", Settings(), resume=True) as run:
        run.rewind(2, phase="rl")
        run.log(3, {"train/loss": 0.5}, phase="rl")
    files = sorted((tmp_path / "a" / "tensorboard").iterdir())
    seen = [(e.step, v.tag) for f in files for e in EventFileLoader(str(f)).Load() for v in e.summary.value]
    assert seen == [(1, "sft/loss"), (9, "sft/loss"), (1, "train/loss"), (2, "train/loss"), (3, "train/loss")]
