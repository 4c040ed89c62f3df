# SPDX-License-Identifier: Apache-2.0
"""Symbolic equality by math-verify, in a worker process with a hard time limit.

Algebra systems can run away on a short expression. Signals would stop them only in the main thread, and not on
Windows; a process can always be killed. It starts with the first comparison and is replaced after a time-out.
"""

from __future__ import annotations

import atexit
import json
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from palestra.errors import RewardError

START_S = 60.0
MIN_COMPARE_S = 1.0
PROGRAM = Path(__file__).with_name("algebra_worker.py")


class Algebra:
    """One worker process, used by one thread at a time.

    >>> Algebra().equal("x^2+2x+1", "(x+1)^2")
    True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.timeouts = 0
        """Comparisons that were cut off, and so counted as unequal."""

    def equal(self, gold: str, answer: str, *, rel_tol: float = 1e-6, timeout_s: float = 5.0) -> bool:
        """Whether two LaTeX expressions are the same thing; False when that is not decided in ``timeout_s`` seconds.

        The seconds include the start of the worker, but a slow start alone never decides: at least one second
        is left for the comparison.
        """
        with self._lock:
            deadline = time.monotonic() + timeout_s
            self._start()
            job = {"gold": gold, "answer": answer, "rel_tol": rel_tol}
            reply = self._ask(job, max(MIN_COMPARE_S, deadline - time.monotonic()))
            if reply is None:
                self.timeouts += 1
                self.close()
                return False
            return bool(reply["equal"])

    def close(self) -> None:
        """Ends the worker process; the next comparison starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._lines = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)],  # -P: this folder's modules must not shadow others
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        )
        threading.Thread(target=_read_lines, args=(self._process, self._lines), daemon=True).start()
        reply = self._line(START_S)
        if reply is None or "ready" not in reply:
            self.close()
            reason = "did not start in time" if reply is None else reply.get("error", "ended at once")
            raise RewardError(f"symbolic comparison is not possible, its worker {reason}; is math-verify installed?")

    def _ask(self, job: dict[str, Any], wait_s: float) -> dict[str, Any] | None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except OSError:  # it died since the last comparison, for example for want of memory
            return None
        return self._line(wait_s)

    def _line(self, wait_s: float) -> dict[str, Any] | None:
        try:
            line = self._lines.get(timeout=wait_s)
        except queue.Empty:
            return None
        return None if line is None else dict(json.loads(line))


def _read_lines(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    try:
        for line in process.stdout:
            lines.put(line)
    except ValueError:  # closed by the other thread after a time-out
        pass
    lines.put(None)


ALGEBRA = Algebra()
"""The process-wide worker that :func:`palestra.reward.answers.is_correct` uses."""
atexit.register(ALGEBRA.close)
