# SPDX-License-Identifier: Apache-2.0
"""``palestra demo``: the whole road in a few minutes, with nothing to download."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from palestra import config as configuration
from palestra.run.progress import Progress
from palestra.train.config import RLConfig
from palestra.train.rl import train_rl


def demo_config(out: str | Path, *, seed: int = 0, steps: int | None = None) -> RLConfig:
    """The demo as a config (``train/demo.yaml``), which ``palestra rl`` would run just the same."""
    file = resources.files("palestra.train") / "demo.yaml"
    overrides = [
        f"out={json.dumps(str(out))}",
        f"seed={seed}",
        *([f"train.steps={steps}"] if steps is not None else []),
    ]
    with resources.as_file(file) as path:
        return configuration.load(path, overrides, RLConfig)


def run_demo(
    out: str | Path, *, seed: int = 0, steps: int | None = None, progress: Progress, resume: bool = False
) -> dict[str, Any]:
    """Warm up, evaluate, learn, evaluate; returns the summary that ``out/summary.json`` holds."""
    return train_rl(demo_config(out, seed=seed, steps=steps), progress=progress, resume=resume)
