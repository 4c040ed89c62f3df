# SPDX-License-Identifier: Apache-2.0
"""Running untrusted Python: a process of its own with hard limits, and nothing left when it is over.

Everywhere: a separate process group that is killed in the end, an empty folder that is deleted, a clean environment
(no API keys), limits on time, memory, file size, open files and processes. On Linux also, where the kernel allows
user namespaces: no network, no writing outside the folder, no sight of other processes. :attr:`Run.held` says which
of these held. It keeps out accidents and cheating, not an attacker with a kernel exploit.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.errors import ConfigError, RewardError, unknown

PROGRAM = Path(__file__).with_name("sandbox_worker.py")
GRACE_S = 60.0
PREFIX = "palestra-sandbox-"
STALE_S = 3600.0
ISOLATION = ("files", "network", "processes")


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What one run may take.

    timeout_s: wall clock. memory_mb: address space of each process. file_mb: all that is written into the folder.
    processes: processes and threads beside the first. output_kb: of each of stdout, stderr and the results.
    require: kinds of isolation (files, network, processes) without which nothing is run at all.
    """

    timeout_s: float = 10.0
    memory_mb: int = 512
    file_mb: int = 16
    processes: int = 8
    output_kb: int = 1024
    require: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("timeout_s", "memory_mb", "file_mb", "processes", "output_kb"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: a limit of the sandbox is above 0")
        for kind in self.require:
            if kind not in ISOLATION:
                raise ConfigError(unknown("kind of isolation", kind, ISOLATION))


@dataclass(frozen=True, slots=True)
class Run:
    """What a run left.

    ended: ``timeout``, ``output`` or ``killed`` when it was stopped, None when it ended by itself. exit_code:
    negative for a signal, None when it was stopped. records: one mapping per test that ran. held: kinds of
    isolation in force.
    """

    ended: str | None
    exit_code: int | None
    records: tuple[Mapping[str, Any], ...]
    stdout: str
    stderr: str
    held: frozenset[str]


def run_python(
    code: str,
    *,
    stdin: str = "",
    tests: Sequence[Mapping[str, str]] | None = None,
    limits: SandboxLimits | None = None,
) -> Run:
    """Run ``code`` as a program with ``stdin``, or as a module on which ``tests`` are then run in order.

    A test is ``{"kind": "value", "code": EXPRESSION}``, whose record holds the value's repr in built-in types, or
    ``{"kind": "passes", "code": STATEMENTS}``, which pass when they do not raise.

    >>> run_python("print(int(input()) + 1)", stdin="41").stdout
    '42\\n'
    >>> run_python("def f(x): return x + 1", tests=[{"kind": "value", "code": "f(41)"}]).records
    ({'test': 0, 'value': '42'},)
    """
    limits = limits or SandboxLimits()
    sweep()
    folder = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")
    job = {
        "code": code,
        "stdin": stdin,
        "tests": None if tests is None else [dict(test) for test in tests],
        "workdir": folder,
        "parent": os.getpid(),
        "timeout_s": limits.timeout_s,
        "memory_bytes": limits.memory_mb * 2**20,
        "file_bytes": limits.file_mb * 2**20,
        "processes": limits.processes,
        "output_bytes": limits.output_kb * 2**10,
        "require": list(limits.require),
    }
    try:
        reply = _ask(job, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    held = frozenset(reply["held"])
    if missing := sorted(set(limits.require) - held):
        raise RewardError(
            f"code is not run: this machine cannot isolate {', '.join(missing)} (it holds: "
            f"{', '.join(sorted(held)) or 'nothing'}); allow user namespaces, or take it out of `require`"
        )
    return Run(
        reply["ended"], reply["exit_code"], tuple(_records(reply["records"])), reply["stdout"], reply["stderr"], held
    )


@functools.cache
def sweep() -> None:
    """Remove the folders that processes left which were killed: once in each process, and only what is an hour old, for
    who shares the place may not see our processes."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if owner.isdigit() and time.time() - folder.stat().st_mtime > STALE_S and not _alive(int(owner)):
                shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _ask(job: Mapping[str, Any], folder: str) -> dict[str, Any]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-s", "-B", str(PROGRAM)],  # -P: this folder's modules must not shadow others
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        cwd=folder,
        env=_environment(folder),
        start_new_session=True,
    )
    try:
        out, err = process.communicate(json.dumps(job), timeout=job["timeout_s"] + GRACE_S)
    except subprocess.TimeoutExpired:
        return {"ended": "timeout", "exit_code": None, "records": [], "stdout": "", "stderr": "", "held": []}
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    try:
        return dict(json.loads(out))
    except ValueError:
        if process.returncode < 0:  # the code found a way to kill what watched it
            return {"ended": "killed", "exit_code": None, "records": [], "stdout": "", "stderr": "", "held": ISOLATION}
        last = err.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        raise RewardError(f"the sandbox could not start: {last[0]}") from None


def _environment(folder: str) -> dict[str, str]:
    kept = {k: os.environ[k] for k in ("PATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH") if k in os.environ}
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    return {**kept, **threads, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}


def _records(lines: Sequence[str]) -> list[dict[str, Any]]:
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):  # cut off by the end of the process
            found.append(json.loads(line))
    return [record for record in found if isinstance(record, dict)]
