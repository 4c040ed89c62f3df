# SPDX-License-Identifier: Apache-2.0
"""A process that answers one question at a time, with a hard time limit on each.

Signals would stop a runaway computation only in the main thread, and not on Windows; a process can always be killed. It
starts with the first question and is replaced after a time-out.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.errors import RewardError

START_S = 60.0


class JobWorker:
    """One worker process: a JSON job a line in, a JSON reply a line out. Not for two threads at once.

    program: a file of Python that stands alone; its first line out is ``{"ready": true}``, or ``{"error": …}``. what,
    needs: for the message when it does not start: what it is for, and what must be installed.
    """

    def __init__(self, program: Path, *, what: str, needs: str) -> None:
        self.program = program
        self.what = what
        self.needs = needs
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Does nothing when it runs. RewardError when it cannot start."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._lines = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(self.program)],  # -P: this folder's modules must not shadow others
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
            raise RewardError(f"{self.what} is not possible, its worker {reason}; is {self.needs} installed?")

    def ask(self, job: Mapping[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """The reply; None when it did not come in time or the worker died: it is ended then."""
        self.start()
        assert self._process is not None and self._process.stdin is not None
        reply = None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            reply = self._line(timeout_s)
        except OSError:  # it died since the last job, for example for want of memory
            pass
        if reply is None:
            self.close()
        return reply

    def close(self) -> None:
        """Ends the process; the next job starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

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
