# SPDX-License-Identifier: Apache-2.0
"""What the machine can do, measured at the start of every run: the computed limits of the other rows stand on it."""

from __future__ import annotations

from collections.abc import Iterator

from bench.lab import Lab, Measured, Member, bench
from bench.limits import Ceilings
from bench.rows import Row
from bench.workers import WorkerError


@bench("ceilings")
def ceilings(lab: Lab) -> Iterator[Row]:
    """The rate of large matrix products by dtype, and the bandwidth of reading memory (the best of several)."""
    sizes = {"size": 256, "floats": 2**22} if lab.settings.quick else {}
    with lab.crew({"ours": Member("ours", {"work": "ceilings", **sizes})}) as crew:
        replies = crew.take_turns({})
    found = replies.by["ours"]
    if not found:
        raise WorkerError(replies.absent["ours"])
    rates = {dtype: [reply["flops"][dtype] for reply in found] for dtype in found[0]["flops"]}
    reading = [reply["bandwidth"] for reply in found]
    lab.ceilings = Ceilings({dtype: max(values) for dtype, values in rates.items()}, max(reading))
    for dtype, values in rates.items():
        measured = Measured({"ours": [value / 1e9 for value in values]}, versions=replies.versions)
        yield lab.row("ceiling: matrix product", dtype, measured, unit="GFLOP/s")
    yield lab.row("ceiling: memory read", "float32", replies.values(lambda r: r["bandwidth"] / 1e9), unit="GB/s")
