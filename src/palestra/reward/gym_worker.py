# SPDX-License-Identifier: Apache-2.0
"""The program of the reasoning-gym process: one JSON job a line in, one JSON reply a line out.

Some of the package's scorers hand a reply to an algebra system or to Python itself, so they run here, where a runaway
one can be ended. It stands alone and imports nothing of the library, like ``algebra_worker.py``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from typing import Any

MEMORY_BYTES = 4 * 2**30
"""Of address space: a huge power must not take the machine's memory before its time is up."""
ORPHAN_S = 120
"""A job that runs longer has no parent any more: the parent would have ended this process before."""


def main() -> None:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each thread's stack would count as address space
    replies = sys.stdout
    sys.stdout = sys.stderr  # whatever a scorer prints is not a reply
    logging.disable(logging.CRITICAL)
    try:
        from reasoning_gym import create_dataset
    except ImportError as error:
        print(json.dumps({"error": str(error)}), file=replies, flush=True)
        return
    with contextlib.suppress(ImportError, OSError, ValueError):  # no such limit on this platform
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print(json.dumps({"ready": True}), file=replies, flush=True)
    alarm = getattr(signal, "alarm", lambda seconds: 0)
    sets: dict[str, Any] = {}
    for line in sys.stdin:
        job = json.loads(line)
        alarm(ORPHAN_S)
        try:
            reply = scored(create_dataset, sets, job)
        except Exception as error:  # a scorer may raise anything at what a model wrote
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)
        alarm(0)


def scored(create_dataset: Any, sets: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    recipe = job["gym"]
    key = json.dumps([recipe["name"], recipe["seed"], recipe["size"], recipe["options"]], sort_keys=True)
    if key not in sets:
        sets[key] = create_dataset(recipe["name"], seed=recipe["seed"], size=recipe["size"], **recipe["options"])
    entry = sets[key][recipe["index"]]
    if str(entry["question"]) != job["question"]:
        return {"differs": True}
    return {"score": float(sets[key].score_answer(job["answer"], entry))}


if __name__ == "__main__":
    main()
