# SPDX-License-Identifier: Apache-2.0
"""``report.html`` of a run, from what the run directory holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from palestra.run.report import write_report
from palestra.run.trackers import read_metrics
from palestra.run.view import read_groups


def report_run(
    path: Path, summary: Mapping[str, Any], *, decode: Callable[[Sequence[int]], str] | None = None, groups: int = 8
) -> Path:
    """Write the report: the learning curve from ``metrics.jsonl`` and sample groups from the first and last
    rollout files."""
    files = sorted((path / "rollouts").glob("*.jsonl.zst"))
    chosen = [files[0], files[-1]] if len(files) > 1 else files
    shown = [g for f in chosen for g in islice(read_groups(f), groups // max(1, len(chosen)))]
    write_report(
        path / "report.html",
        title=f"Palestra run {path.name}",
        summary={k: v for k, v in summary.items() if not isinstance(v, dict)},
        metrics=read_metrics(path / "metrics.jsonl"),
        groups=shown,
        decode=decode,
    )
    return path / "report.html"
