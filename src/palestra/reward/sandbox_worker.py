# SPDX-License-Identifier: Apache-2.0
"""The program around one run of untrusted code: one JSON job on stdin, one JSON reply on stdout.

It stands alone (``python -P sandbox_worker.py``). The process that reads the job never runs the code: it isolates
itself as far as the platform allows, forks, watches the child and ends everything that the child started.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import math
import numbers
import os
import resource
import select
import signal
import sys
import time
import traceback
import types
from typing import Any

NOBODY = 65534
POLL_S = 0.05
MAX_DEPTH = 50
NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x40000000 | 0x20000000 | 0x08000000  # user, mount, network, pid, ipc
PRIVATE, NO_SUID_DEV = 0x4000 | 0x40000, 2 | 4  # MS_REC | MS_PRIVATE, MS_NOSUID | MS_NODEV
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
SET_PDEATHSIG, SET_DUMPABLE, SET_SUBREAPER, NO_NEW_PRIVS = 1, 4, 36, 38


def main() -> None:
    job = json.load(sys.stdin)
    linux = sys.platform == "linux"
    held = _isolate(job) if linux else set()
    if linux:  # behind the isolation, for a change of user takes it back
        ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != job["parent"]:  # it was killed meanwhile
            return
    if set(job["require"]) - held:
        print(json.dumps({"ended": "refused", "held": sorted(held)}), flush=True)
        return
    records, output, errors, alive = os.pipe(), os.pipe(), os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(alive[1])  # from now on it ends with this process's parent
            _child(job, held, records[1], output[1], errors[1], alive[0])
        finally:
            os._exit(1)
    for pipe in (records, output, errors):
        os.close(pipe[1])
    ended, texts = _watch(job, child, (records[0], output[0], errors[0]))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if linux:
        _end_orphans()
    code = None if ended is not None else os.waitstatus_to_exitcode(status)
    said, out, err = (t.decode("utf-8", "replace") for t in texts)
    lines = [line for line in said.splitlines() if line.startswith("{")]
    reply = {"ended": ended, "exit_code": code, "records": lines, "stdout": out, "stderr": err, "held": sorted(held)}
    print(json.dumps(reply), flush=True)


def _watch(job: dict[str, Any], child: int, pipes: tuple[int, ...]) -> tuple[str | None, list[bytearray]]:
    """What the child wrote until it ended; how it was stopped (timeout, output), None where it ended by itself."""
    texts = [bytearray() for _ in pipes]
    open_, deadline = set(pipes), time.monotonic() + job["timeout_s"]
    while open_:
        over = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        ready, _, _ = select.select(sorted(open_), [], [], 0 if over else POLL_S)
        if over and not ready:
            break  # something that the child started holds a pipe open
        for pipe in ready:
            part = os.read(pipe, 65536)
            texts[pipes.index(pipe)] += part
            if not part:
                open_.discard(pipe)
        if max(map(len, texts)) > job["output_bytes"]:
            return "output", texts
        if time.monotonic() > deadline:
            return "timeout", texts
    return None, texts


def _end_orphans() -> None:
    """Kills and reaps what the child left behind; where it had a pid namespace the kernel has done it already."""
    path = f"/proc/self/task/{os.getpid()}/children"
    for _ in range(1000):
        try:
            with open(path) as file:
                left = [int(pid) for pid in file.read().split()]
        except OSError:
            return
        if not left:
            return
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


# ---------------------------------------------------------------- isolation


def _isolate(job: dict[str, Any]) -> set[str]:
    """Namespaces of our own, as far as the kernel lets us; returns what holds: network, files, processes."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(SET_SUBREAPER, 1, 0, 0, 0)
    if os.getuid() == 0 and _readable_by_nobody():
        os.chown(job["workdir"], NOBODY, NOBODY)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        libc.prctl(SET_DUMPABLE, 1, 0, 0, 0)  # or our own /proc/self/uid_map is not ours to write
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEW_NAMESPACES) != 0:
        return set()
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    held = {"network", "processes"}
    libc.mount(b"none", b"/", None, PRIVATE, None)
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)
    if libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, ctypes.sizeof(attributes)) == 0:
        size = f"size={job['file_bytes']},mode=700".encode()
        if libc.mount(b"tmpfs", job["workdir"].encode(), b"tmpfs", NO_SUID_DEV, size) == 0:
            held.add("files")
    libc.prctl(SET_DUMPABLE, 0, 0, 0, 0)  # the child may not look into this process
    return held


def _readable_by_nobody() -> bool:
    """Whether Python still works after giving up root: it may be installed in a home directory."""
    os.seteuid(NOBODY)
    try:
        needed = [json.__file__, sys.executable, os.path.dirname(os.getcwd())]
        return all(os.access(path, os.R_OK, effective_ids=True) for path in needed)
    finally:
        os.seteuid(0)


def _confine(job: dict[str, Any], held: set[str]) -> None:
    """In the child, before the code: limits, a /proc of its own, no capabilities."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(SET_DUMPABLE, 1, 0, 0, 0)
        if "processes" in held:
            if libc.mount(b"proc", b"/proc", b"proc", NO_SUID_DEV, None) != 0:
                libc.mount(b"tmpfs", b"/proc", b"tmpfs", NO_SUID_DEV, b"size=4k")  # better none than the host's
            with contextlib.suppress(OSError), open("/proc/sys/kernel/pid_max", "w") as file:
                file.write("301")  # the least there is; root is bound by no RLIMIT_NPROC
        header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        libc.capset(header, nothing)
        libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    others = 2 if "processes" in held else _running()  # in a namespace of our own: this process and its parent
    limits = [
        ("RLIMIT_CPU", math.ceil(job["timeout_s"]) + 1),
        ("RLIMIT_FSIZE", job["file_bytes"]),
        ("RLIMIT_NPROC", job["processes"] + others),
        ("RLIMIT_NOFILE", 64),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_AS", job["memory_bytes"]),
    ]
    for name, most in limits:
        with contextlib.suppress(AttributeError, ValueError, OSError):  # not every platform has every limit
            resource.setrlimit(getattr(resource, name), (most, most))


def _running() -> int:
    """Tasks of our user, which RLIMIT_NPROC counts along where we have no namespace of our own."""
    count = 0
    for pid in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError):
            if pid.isdigit() and os.stat(f"/proc/{pid}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{pid}/task"))
    return count or 10_000


# ---------------------------------------------------------------- the code's own process


def _child(job: dict[str, Any], held: set[str], records: int, output: int, errors: int, alive: int) -> None:
    os.chdir(job["workdir"])
    with open("stdin", "w+", encoding="utf-8") as file:
        file.write(job.get("stdin") or "")
        file.flush()
        file.seek(0)
        os.dup2(file.fileno(), 0)
    os.unlink("stdin")
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.setpgid(0, 0)  # so that killing its group is not killing the process that watches it
    _confine(job, held)
    if select.select([alive], [], [], 0)[0]:  # its parent was killed before the kernel was told to tell
        os._exit(1)
    os.close(alive)
    # The parent's stream objects hold what it has read and not yet written.
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(n, "w", False), encoding="utf-8") for n in (1, 2))
    code = 0
    try:
        _run(job, records)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc(limit=-3)
        code = 1
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)


def _run(job: dict[str, Any], records: int) -> None:
    tests = job["tests"]
    module = types.ModuleType("__main__" if tests is None else "solution")
    sys.modules[module.__name__], sys.argv = module, ["solution.py"]
    names = vars(module)
    exec(compile(job["code"], "solution.py", "exec"), names)
    for index, test in enumerate(tests or ()):
        record: dict[str, Any] = {"test": index}
        try:
            if test["kind"] == "value":
                record["value"] = repr(plain(eval(compile(test["code"], "test", "eval"), names)))
            else:
                exec(compile(test["code"], "test", "exec"), {**names, "_plain": plain})
                record["passed"] = True
        except BaseException as error:
            record["error"] = f"{type(error).__name__}: {error}"[:200]
        os.write(records, (json.dumps(record) + "\n").encode())


def plain(value: Any, depth: int = 0) -> Any:
    """The value in built-in types, whose equality nobody can redefine."""
    if type(value) in (int, float, complex, str, bytes, bool, type(None)):
        return value
    if hasattr(value, "tolist"):  # numpy
        return plain(value.tolist(), depth + 1)
    containers: tuple[Any, ...] = (list, tuple, set, frozenset)
    for base in containers:
        if isinstance(value, base) and depth < MAX_DEPTH:
            return base(plain(v, depth + 1) for v in base.__iter__(value))
    if isinstance(value, dict) and depth < MAX_DEPTH:
        return {plain(k, depth + 1): plain(v, depth + 1) for k, v in dict.items(value)}
    if isinstance(value, int):
        return int.__add__(value, 0)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, numbers.Number):  # Fraction, Decimal
        return float(value)  # type: ignore[arg-type]
    raise TypeError(f"a {type(value).__name__} is no plain value")


if __name__ == "__main__":
    main()
