# SPDX-License-Identifier: Apache-2.0
"""A run is a function of its seed: of the size at which torch computes with several threads, whatever else the machine
does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SMALL = [
    "warmup.steps=40",
    "train.steps=3",
    "train.dump_every=1",
    "eval.size=40",
    "eval.every=0",
    "eval.warmup_every=0",
]


def played(out: Path) -> list[dict[str, Any]]:
    """The numbers of a shorter calculator example on two threads, without those of clocks."""
    command = [sys.executable, "-m", "palestra", "rl", str(ROOT / "examples/calculator.yaml"), f"out={out}", *SMALL]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT / "src")}
    subprocess.run(command, check=True, env=environment, capture_output=True)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k.split("/")[0] not in ("time", "speed")} for row in rows]


@pytest.mark.slow  # two runs of forty warm-up steps and three steps of 256 episodes
def test_a_run_repeats_to_the_last_bit_beside_a_process_that_takes_a_core(tmp_path: Path) -> None:
    alone = played(tmp_path / "alone")
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        beside = played(tmp_path / "beside")
    finally:
        busy.kill()
        busy.wait()
    assert len(alone) == 40 + 1 + 3 + 1
    assert beside == alone
