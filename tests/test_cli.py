# SPDX-License-Identifier: Apache-2.0
"""The command line: what each verb hands to its loop, and how a mistake is told."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import palestra.run
from palestra import cli
from palestra.config import Config
from palestra.errors import DataError, EngineError
from palestra.run.progress import Progress


class Settings(Config):
    """Stands in for the configs of the loops."""

    out: str = "runs/a"
    steps: int = 10


class Loops:
    """Stand-ins for ``palestra.train``, recording what they were called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.fails: BaseException | None = None
        modules: dict[str, dict[str, Any]] = {
            "palestra.train.config": dict.fromkeys(("SFTConfig", "RLConfig", "EvalConfig"), Settings),
            "palestra.train.demo": {"run_demo": self.loop("demo")},
            "palestra.train.sft": {"train_sft": self.loop("sft")},
            "palestra.train.rl": {"train_rl": self.loop("rl")},
            "palestra.train.evaluation": {"run_eval": self.loop("eval")},
            "palestra.train.plan": {"describe": lambda config: f"plan of {config.steps} steps"},
        }
        for name, content in modules.items():
            module = types.ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)

    def loop(self, verb: str) -> Callable[..., Mapping[str, Any]]:
        def run(*args: Any, **kwargs: Any) -> Mapping[str, Any]:
            self.calls.append((verb, args, kwargs))
            if self.fails is not None:
                raise self.fails
            return {"format": 1, "accuracy_after": 0.98, "seconds": 75.0, "note": "text is not shown"}

        return run


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Loops:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("steps: 20\n")
    return Loops(monkeypatch)


def call(*args: str) -> Result:
    return CliRunner().invoke(cli.app, list(args))


@pytest.mark.parametrize("verb", ["sft", "rl", "eval"])
def test_a_verb_hands_the_resolved_config_to_its_loop(loops: Loops, verb: str) -> None:
    result = call(verb, "run.yaml", "steps=30", "--out", "1e5", "--quiet")
    assert (result.exit_code, result.output) == (0, "")
    ((called, (settings,), kwargs),) = loops.calls
    assert called == verb and settings == Settings(steps=30, out="1e5")
    assert isinstance(kwargs["progress"], Progress) and kwargs["progress"].quiet


@pytest.mark.parametrize("verb", ["sft", "rl"])
@pytest.mark.parametrize("flags", [[], ["--resume"]])
def test_resume_is_passed_on(loops: Loops, verb: str, flags: list[str]) -> None:
    call(verb, "run.yaml", *flags)
    assert loops.calls[0][2]["resume"] is bool(flags)


def test_the_demo_takes_out_seed_and_steps(loops: Loops, tmp_path: Path) -> None:
    assert call("demo", "--out", "d", "--seed", "4", "--steps", "5").exit_code == 0
    ((_, (out,), kwargs),) = loops.calls
    assert (out, kwargs["seed"], kwargs["steps"]) == (Path("d"), 4, 5)


def test_a_second_demo_gets_a_directory_of_its_own(loops: Loops, tmp_path: Path) -> None:
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    call("demo")
    assert loops.calls[0][1] == (Path("runs/demo-2"),)


@pytest.mark.parametrize(("there", "resumed"), [([], "demo"), (["demo"], "demo"), (["demo", "demo-2"], "demo-2")])
def test_a_resumed_demo_is_the_last_one(loops: Loops, tmp_path: Path, there: list[str], resumed: str) -> None:
    for name in there:
        (tmp_path / "runs" / name).mkdir(parents=True)
    call("demo", "--resume")
    assert loops.calls[0][1] == (Path("runs") / resumed,) and loops.calls[0][2]["resume"] is True


def test_the_numbers_and_the_place_are_told_at_the_end(loops: Loops) -> None:
    output = call("rl", "run.yaml").stdout
    assert [" ".join(line.split()) for line in output.splitlines()] == [
        "accuracy after 0.980",
        "seconds 1:15",
        "results in runs/a",
    ]


@pytest.mark.parametrize("verb", ["sft", "rl", "eval"])
def test_a_dry_run_prints_the_plan_and_touches_nothing(loops: Loops, tmp_path: Path, verb: str) -> None:
    result = call(verb, "run.yaml", "steps=7", "--dry-run")
    assert (result.exit_code, result.stdout) == (0, "plan of 7 steps\n")
    assert loops.calls == [] and [p.name for p in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["rl", "nope.yaml"], "error: config file nope.yaml does not exist; check the path\n"),
        (["rl", "run.yaml", "stpes=3"], "error: unknown key 'stpes' (command line): did you mean 'steps'?\n"),
        (["view", "nope"], "error: rollouts file nope does not exist; check the path\n"),
        (["view", "."], "error: . holds no rollouts; there are: none\n"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(loops: Loops, args: list[str], said: str) -> None:
    result = call(*args)
    assert (result.exit_code, result.stderr, result.stdout) == (2, said, "")


def struck() -> RuntimeError:
    """Ctrl-C while a module is imported, as Python 3.11 tells it of a class body."""
    error = RuntimeError("Error calling __set_name__")
    error.__cause__ = KeyboardInterrupt()
    return error


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [
        (DataError("tasks.jsonl:3: no\n 'answer'"), 2, "error: tasks.jsonl:3: no 'answer'"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: the disk is full"),
        (EngineError("canary failed"), 1, "error: EngineError: canary failed (run again with --debug for the tr"),
        (ZeroDivisionError(), 1, "error: ZeroDivisionError (run again with --debug for the traceback)"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (struck(), 130, "interrupted"),
    ],
)
def test_what_a_loop_raises_becomes_one_line_and_a_code(
    loops: Loops, failure: BaseException, code: int, said: str
) -> None:
    loops.fails = failure
    result = call("rl", "run.yaml")
    assert result.exit_code == code
    assert result.stderr.startswith(said) and result.stderr.count("\n") == 1 and "Traceback" not in result.stderr


@pytest.mark.parametrize("failure", [DataError("x"), ZeroDivisionError("x")])
def test_debug_shows_the_traceback_and_keeps_the_code(loops: Loops, failure: Exception) -> None:
    loops.fails = failure
    result = call("rl", "run.yaml", "--debug")
    assert "Traceback (most recent call last)" in result.stderr and "in run" in result.stderr
    assert result.exit_code == (2 if isinstance(failure, DataError) else 1)


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["rl"], ["missing argument 'CONFIG.yaml'", "`palestra rl --help`"]),
        (["dem"], ["no such command 'dem'", "'demo'", "`palestra --help`"]),
        (["data", "chek"], ["no such command 'chek'", "'check'", "`palestra data --help`"]),
        (["--nonsense"], ["no such option: --nonsense"]),
        (["demo", "--sed", "3"], ["no such option: --sed", "--seed", "`palestra demo --help`"]),
        (["demo", "--seed", "x"], ["invalid value for '--seed'", "integer"]),
        (["demo", "--steps", "0"], ["invalid value for '--steps'", "1"]),
        (["demo", "--seed"], ["option '--seed' requires an argument"]),
        (["rl", "run.yaml", "--steps=3"], ["no such option: --steps"]),
        (["rl", "run.yaml", "--train.steps=3"], ["--train.steps", "without dashes: key.sub=value"]),
    ],
)
def test_a_command_line_that_makes_no_sense_is_one_line_and_exit_code_2(
    loops: Loops, args: list[str], names: list[str]
) -> None:
    result = CliRunner().invoke(cli.app, args, prog_name="palestra")
    assert (result.exit_code, result.stdout, loops.calls) == (2, "", [])
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    for name in names:
        assert name in result.stderr


@pytest.mark.parametrize("args", [[], ["data"], ["--help"]])
def test_a_command_without_a_verb_shows_its_help(args: list[str]) -> None:
    result = call(*args)
    assert "Commands:" in result.output and "error" not in result.output
    assert result.exit_code == (0 if "--help" in args else 2)


@pytest.mark.parametrize("args", [["demo"], ["demo", "--resume"], ["rl", "run.yaml"], ["sft", "run.yaml", "--resume"]])
def test_a_place_that_cannot_be_written_is_told_before_the_loop_begins(loops: Loops, args: list[str]) -> None:
    result = call(*args, "--out", "run.yaml/a/b")
    assert (result.exit_code, loops.calls) == (2, [])
    assert result.stderr == (
        "error: cannot write run.yaml/a/b: a part of the path is a file, not a directory; choose another --out\n"
    )


def test_ctrl_c_says_what_is_there_and_how_to_go_on(loops: Loops, tmp_path: Path) -> None:
    loops.fails = KeyboardInterrupt()
    assert call("rl", "run.yaml").stderr == "interrupted: nothing was written that is worth keeping\n"
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (run / "run.json").write_text('{"format": 1}')
    assert call("rl", "run.yaml", "--resume").stderr == "interrupted: what was done is in runs/a; go on by --resume\n"
    for place in ("warmup/step_000100", "checkpoints/step_000002", "checkpoints/step_000010"):
        (run / place).mkdir(parents=True)
        (run / place / "COMPLETE").touch()
    (run / "checkpoints" / "step_000011").mkdir()  # not whole
    result = call("rl", "run.yaml", "--resume")
    assert result.exit_code == 130
    assert result.stderr == "interrupted: the last checkpoint is runs/a/checkpoints/step_000010; go on by --resume\n"


def group() -> dict[str, Any]:
    spans = [
        {"author": "env", "role": "user", "text": "2+2=", "tokens": [1], "logprobs": None, "version": None},
        {"author": "model", "role": "assistant", "text": "four", "tokens": [2], "logprobs": [-0.5], "version": 0},
    ]
    spans = [span | {"kept_logmass": None} for span in spans]
    told = {"observation": [{"role": "user", "content": "2+2="}], "action": {"role": "assistant", "content": "four"}}
    turn = {**told, "finish_reason": "eos", "rewards": {}, "tool_calls": 0, "spans": spans, "info": {}}
    rewards = {"accuracy": {"value": 1.0, "weight": 1.0}}
    view = {"agent": "agent", "stop": "env_terminated", "rewards": rewards, "advantage": 0.5, "turns": [turn]}
    task = {"id": "t", "prompt": "2+2=", "answer": 4, "meta": {}}
    episode = {"member": 0, "error": None, "trajectories": [view], "timings": {}, "info": {}}
    return {"format": 1, "draw": 0, "task": task, "episodes": [episode]}


def run_directory(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    (run / "rollouts" / "step_000003.jsonl").write_text((json.dumps(group()) + "\n") * 3)
    (run / "metrics.jsonl").write_text('{"step": 3, "phase": "rl", "time": 0, "train/reward": 0.25}\n')
    (run / "summary.json").write_text('{"format": 1, "accuracy_after": 0.75}')
    return run


def test_view_shows_as_many_groups_as_asked_for(tmp_path: Path) -> None:
    result = call("view", str(run_directory(tmp_path)), "--groups", "2")
    assert result.exit_code == 0
    assert result.stdout.count("four") == 2 and result.stdout.count("advantage 0.500") == 2


def test_view_writes_a_page_with_the_runs_numbers(tmp_path: Path) -> None:
    result = call("view", str(run_directory(tmp_path)), "--html", str(tmp_path / "page.html"))
    source = (tmp_path / "page.html").read_text()
    assert result.exit_code == 0 and "four" in source and "0.750" in source and "<svg" in source


def test_a_page_of_a_rollouts_file_alone_has_no_curve(tmp_path: Path) -> None:
    file = run_directory(tmp_path) / "rollouts" / "step_000003.jsonl"
    assert call("view", str(file), "--html", str(tmp_path / "page.html")).exit_code == 0
    assert "<svg" not in (tmp_path / "page.html").read_text()


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    result = call("view", str(run_directory(tmp_path)), "--html", str(tmp_path / "no" / "page.html"))
    assert result.exit_code == 2 and "cannot write" in result.stderr


def test_the_version_is_told() -> None:
    result = call("--version")
    assert result.exit_code == 0 and result.stdout.startswith("palestra ")


@pytest.mark.parametrize("verb", ["demo", "sft", "rl", "eval", "view"])
def test_every_verb_explains_itself(verb: str) -> None:
    result = call(verb, "--help")
    assert result.exit_code == 0 and "--debug" in result.stdout


def test_help_is_quick_because_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from palestra import cli\n"
        "try: cli.app(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'tensorboard', 'jinja2', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    sources = str(Path(palestra.run.__file__).parents[2])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": sources})


def test_python_m_palestra_is_the_same_command() -> None:
    sources = str(Path(palestra.run.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "palestra", "view", "nope"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": sources},
    )
    assert (done.returncode, done.stderr) == (2, "error: rollouts file nope does not exist; check the path\n")
