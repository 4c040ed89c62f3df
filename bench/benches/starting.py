# SPDX-License-Identifier: Apache-2.0
"""How long a person waits: for the import, and for the demo."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.lab import Lab, Measured, bench
from bench.peers.serve import timed
from bench.rows import Bar, Check, Row
from bench.workers import ROOT, WorkerError, environment

_IMPORT = "import time; began = time.perf_counter(); import palestra; print(time.perf_counter() - began)"


@bench("import")
def importing(lab: Lab) -> Iterator[Row]:
    """Seconds of ``import palestra`` in a fresh interpreter."""
    work, dtype = "import palestra", "–"
    if not lab.wants(work, dtype):
        return
    runs = [float(_output(sys.executable, "-c", _IMPORT)) for _ in range(lab.settings.repeats)]
    yield lab.row(work, dtype, Measured({"ours": runs}), unit="s", better="lower", bar=Bar(at_most=0.3))


@bench("demo", suite="learn")
def demo(lab: Lab) -> Iterator[Row]:
    """Seconds of ``palestra demo`` as a person runs it, from scratch to held-out accuracy 0.95."""
    work, dtype = "demo", "float32"
    if not lab.wants(work, dtype):
        return
    short = ["--steps", "1"] if lab.settings.quick else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "demo"
        command = [sys.executable, "-m", "palestra", "demo", "--quiet", "--out", str(out), *short]
        seconds, _ = timed(lambda: _output(*command))
        accuracy = json.loads((out / "summary.json").read_text(encoding="utf-8"))["accuracy_after"]
    yield lab.row(
        work,
        dtype,
        Measured({"ours": [seconds]}),
        unit="s",
        better="lower",
        bar=Bar(at_most=180.0, said="≤ 180 s to ≥ 0.95"),
        checks={"accuracy": Check(accuracy, at_least=0.95)},
    )


def _output(*command: str) -> str:
    """What a command of ours prints."""
    done = subprocess.run(command, cwd=ROOT, env=environment("ours"), capture_output=True, text=True)
    if done.returncode:
        raise WorkerError(f"{' '.join(command[1:3])} failed: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout
