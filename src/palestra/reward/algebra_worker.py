# SPDX-License-Identifier: Apache-2.0
"""The program of the algebra process: one JSON job a line in, one JSON reply a line out.

It stands alone (``python -P algebra_worker.py``) and imports nothing of the library, so it starts in a second,
whatever the parent has loaded and however the library was found.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
from typing import Any

MEMORY_BYTES = 4 * 2**30
"""Of address space: 10^10^10 must not take the machine's memory before its time is up."""
ORPHAN_S = 120
"""A comparison that runs longer has no parent any more: the parent would have ended this process before."""


def main() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # no such limit on this platform
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    replies = sys.stdout
    sys.stdout = sys.stderr  # whatever an algebra system prints is not a reply
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        print(json.dumps({"error": str(error)}), file=replies, flush=True)
        return
    equal("x^2+2x+1", "(x+1)^2", 1e-6)  # the first comparison loads the algebra, in no answer's time
    print(json.dumps({"ready": True}), file=replies, flush=True)
    alarm = getattr(signal, "alarm", lambda seconds: 0)
    for line in sys.stdin:
        job = json.loads(line)
        alarm(ORPHAN_S)
        print(json.dumps({"equal": equal(job["gold"], job["answer"], job["rel_tol"])}), file=replies, flush=True)
        alarm(0)


def equal(gold: str, answer: str, rel_tol: float) -> bool:
    """Equal for math-verify, and where both are numbers also within the relative tolerance.

    math-verify rounds to decimals, an absolute tolerance under which all tiny numbers are equal.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    formula = (LatexExtractionConfig(),)  # without the other way of reading, which takes a 3 out of "3\\pi."
    try:
        a, b = (
            parse(f"${text}$", extraction_config=formula, parsing_timeout=None, raise_on_error=False)
            for text in (gold, answer)
        )
        if not a or not b or not verify(a, b, timeout_seconds=None, raise_on_error=False):
            return False
        return close(a[0], b[0], rel_tol)
    except Exception:  # an expression that the algebra cannot read equals nothing; the parser raises any type
        return False


def close(a: Any, b: Any, rel_tol: float) -> bool:
    import sympy

    numbers = [isinstance(x, sympy.Expr) and x.is_number and x.is_finite is not False for x in (a, b)]
    if not all(numbers):
        return True
    x, y = a.evalf(30), b.evalf(30)
    return bool(abs(x - y) <= rel_tol * max(abs(x), abs(y)))


if __name__ == "__main__":
    main()
