# SPDX-License-Identifier: Apache-2.0
"""Code judged by unit tests: what passes, what cheating earns, and what a sandbox leaves behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from palestra.errors import ConfigError, RewardError
from palestra.reward import sandbox
from palestra.reward.build import make_rubric
from palestra.reward.code import extract_code, parse_tests, run_tests, unit_tests
from palestra.reward.sandbox import Run, SandboxLimits, run_python

linux = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
ADD = "def add(a, b):\n    return a + b\n"


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na = 1\n```\nno, better\n```\na = 2\n```", "a = 2\n"),
        ("```python\na = 1\n```\nrun it:\n```bash\npip install x\n```", "a = 1\n"),
        ("<think>```python\na = 1\n```</think> I give up ```", None),
        ("a = 1", "a = 1"),
        ("```python\na = 1", None),  # cut off inside its code
        ("  ", None),
    ],
)
def test_the_code_is_the_last_block_of_python(text: str, code: str | None) -> None:
    assert extract_code(text) == code


def test_gold_passes_and_garbage_fails() -> None:
    tests = ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]\nassert add(0.5, float('inf')) == 1e999"]
    completions = [
        fenced(ADD),
        fenced("def add(a, b): return 3"),
        fenced("def add(a, b): return"),
        fenced("def add("),
        "",
    ]
    given = {"completions": completions, "tests": [tests] * 5}
    assert unit_tests(partial=True)(**given) == [1.0, pytest.approx(1 / 3), 0.0, 0.0, 0.0]
    assert unit_tests()(completions=completions[:2], tests=[tests, None]) == [1.0, None]


CHEATS = {
    "an object that is equal to everything": """
class Yes:
    def __eq__(self, other): return True
    def __call__(self, *a): return self
add = Yes()""",
    "a list that is equal to everything": """
class Yes(list):
    def __eq__(self, other): return True
def add(a, b): return Yes()""",
    "a number that is equal to everything": """
class Yes(int):
    def __eq__(self, other): return True
    def __repr__(self): return '3'
def add(a, b): return Yes(9)""",
    "leaving with success": "import os\nos._exit(0)",
    "leaving quietly": "raise SystemExit(0)",
}
STATEMENTS = "def check(f):\n    assert f(1, 2) == 3\ncheck(add)"


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheating_earns_nothing(cheat: str) -> None:
    assert run_tests(CHEATS[cheat], parse_tests(["assert add(1, 2) == 3", STATEMENTS])) == [False, False]


def test_whole_statements_and_programs_are_tests_too() -> None:
    assert run_tests(ADD, parse_tests([STATEMENTS, "assert not add(1, -1)", "add(1)"])) == [True, True, False]
    doubled = [{"input": "4\n", "output": "8"}, {"input": "x\n", "output": "xx"}]
    assert run_tests("n = int(input())\nprint(2 * n, ' ')\n", parse_tests(doubled)) == [True, False]


def test_a_module_of_its_own_so_that_dataclasses_work() -> None:
    code = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
    assert run_tests(code, parse_tests("assert P(1).x == 1")) == [True]


@pytest.mark.parametrize(
    ("tests", "words"),
    [("assert add(", "not Python"), ([], "no unit tests"), ([{"input": "1"}], "a unit test has input")],
)
def test_a_test_that_is_none_is_told_and_does_not_score_zero(tests: Any, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        unit_tests()(completions=[fenced(ADD)], tests=[tests])


def test_a_missing_column_and_a_wrong_limit_are_told() -> None:
    with pytest.raises(RewardError, match=r"column 'cases'.*tests"):
        unit_tests(column="cases")(completions=["x"], tests=["assert x"])
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        make_rubric({"unit_tests": {"timeout_s": 0}}, chat=True)
    with pytest.raises(ConfigError, match="did you mean 'network'"):
        SandboxLimits(require=("networks",))


def run(code: str, **limits: Any) -> Run:
    return run_python(code, limits=SandboxLimits(**limits))


def test_time_memory_files_and_output_are_limited() -> None:
    started = time.monotonic()
    assert run("while True: pass", timeout_s=0.5).ended == "timeout"
    assert time.monotonic() - started < 15  # with a busy machine's start
    assert "MemoryError" in run("x = [0] * 10**10").stderr
    assert "File too large" in run("open('a', 'w').write('x' * 3 * 2**20)", file_mb=1).stderr
    flood = run("while True: print('x' * 1000)", output_kb=10)
    assert (flood.ended, len(flood.stdout) < 10 * 1024 + 70_000) == ("output", True)


def left_behind() -> set[str]:
    running = {p for p in os.listdir("/proc") if p.isdigit()} if os.path.isdir("/proc") else set()
    said = {p: Path(f"/proc/{p}/cmdline") for p in running}
    return {p for p, file in said.items() if file.exists() and b"sandbox_worker" in file.read_bytes()}


RUNAWAY = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)\n    os._exit(0)"
SPY = """
import os, socket
print(sorted(os.environ.keys() & {"SECRET_KEY"}), os.listdir("."))
write, call = lambda: open(OUTSIDE, "w"), lambda: socket.create_connection(("192.0.2.1", 80), 1)
for attempt in (write, call, lambda: os.kill(PARENT, 0)):
    try:
        attempt()
        print("done")
    except OSError as error:
        print(type(error).__name__)
"""


BOMB = """
import os, time
n = 0
try:
    while n < 1000:
        if os.fork() == 0: time.sleep(60)
        n += 1
except OSError:
    pass
print(n)
"""


def spy(tmp_path: Path) -> Run:
    return run(SPY.replace("OUTSIDE", repr(str(tmp_path / "evil"))).replace("PARENT", str(os.getpid())))


@linux
def test_nothing_is_left_and_nothing_leaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "s")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    held = run(RUNAWAY).held
    assert left_behind() == set()
    said = spy(tmp_path).stdout.splitlines()
    assert said[0] == "[] []"
    if {"files", "network", "processes"} <= held:
        assert said[1:] == ["OSError", "OSError", "ProcessLookupError"]
        assert int(run(BOMB).stdout) < 310
    assert list(tmp_path.iterdir()) == []


@linux
def test_without_namespaces_limits_and_cleaning_up_still_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = sandbox.PROGRAM.read_text(encoding="utf-8")
    closed = tmp_path / "sandbox_worker.py"
    closed.write_text(program.replace("if libc.unshare(NEW_NAMESPACES) != 0:", "if True:"), encoding="utf-8")
    monkeypatch.setattr(sandbox, "PROGRAM", closed)
    assert run_tests(ADD, parse_tests("assert add(1, 2) == 3")) == [True]
    assert run(RUNAWAY).held == frozenset()
    assert left_behind() == set()
    assert run("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)").ended == "killed"
    evidence = tmp_path / "ran"
    with pytest.raises(RewardError, match="cannot isolate network"):
        run(f"open({str(evidence)!r}, 'w')", require=("network",))
    assert not evidence.exists()


@linux
def test_code_ends_with_the_process_that_waits_for_it(tmp_path: Path) -> None:
    """Whoever kills the run with SIGKILL leaves nothing that works on for the rest of its time."""
    waiting = (
        "from palestra.reward.sandbox import *; run_python('while True: pass', limits=SandboxLimits(timeout_s=300))"
    )
    place = os.environ | {"TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", waiting], env=place)
    until = time.monotonic() + 30
    while not (workers := working_in(tmp_path)) and time.monotonic() < until:
        time.sleep(0.05)
    assert workers
    parent.kill()
    parent.wait()
    while working_in(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    assert working_in(tmp_path) == []


def working_in(folder: Path) -> list[str]:
    """The processes whose working directory lies in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if os.readlink(process).startswith(str(folder)):
                found.append(process.parent.name)
    return found


def test_folders_of_killed_processes_are_removed_once_they_are_old(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = (f"{gone.pid}-a", f"{gone.pid}-b", f"{os.getpid()}-c")
    folders = {name: tmp_path / f"palestra-sandbox-{name}" for name in names}
    for name, folder in folders.items():
        folder.mkdir()
        if not name.endswith("b"):
            os.utime(folder, (0, 0))
    sandbox.sweep.cache_clear()
    sandbox.sweep()
    assert [name[-1] for name, folder in folders.items() if folder.exists()] == ["b", "c"]
