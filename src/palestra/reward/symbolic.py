# SPDX-License-Identifier: Apache-2.0
"""Symbolic equality by math-verify, in a worker process with a hard time limit.

Algebra systems can run away on a short expression. Signals would stop them only in the main thread, and not on
Windows; a process can always be killed. It starts with the first comparison and is replaced after a time-out.
"""

from __future__ import annotations

import atexit
import threading
import time
from pathlib import Path

from palestra.reward.jobs import JobWorker

MIN_COMPARE_S = 1.0
PROGRAM = Path(__file__).with_name("algebra_worker.py")


class Algebra:
    """One worker process, used by one thread at a time.

    >>> Algebra().equal("x^2+2x+1", "(x+1)^2")
    True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker = JobWorker(PROGRAM, what="symbolic comparison", needs="math-verify")
        self.timeouts = 0
        """Comparisons that were cut off, and so counted as unequal."""

    def equal(self, gold: str, answer: str, *, rel_tol: float = 1e-6, timeout_s: float = 5.0) -> bool:
        """Whether two LaTeX expressions are the same thing; False when that is not decided in ``timeout_s`` seconds.

        The seconds include the start of the worker, but a slow start alone never decides: at least one second
        is left for the comparison.
        """
        with self._lock:
            deadline = time.monotonic() + timeout_s
            self._worker.start()
            job = {"gold": gold, "answer": answer, "rel_tol": rel_tol}
            reply = self._worker.ask(job, max(MIN_COMPARE_S, deadline - time.monotonic()))
            if reply is None:
                self.timeouts += 1
                return False
            return bool(reply["equal"])

    def close(self) -> None:
        """Ends the worker process; the next comparison starts a new one."""
        self._worker.close()


ALGEBRA = Algebra()
"""The process-wide worker that :func:`palestra.reward.answers.is_correct` uses."""
atexit.register(ALGEBRA.close)
