# SPDX-License-Identifier: Apache-2.0
"""How a measuring process talks: one JSON object a line on stdin and stdout. Standard library only.

The first line in is the configuration; the process loads what it needs and answers ``{"ready": true, …}``. Every
further line is one request, answered by one measurement, until stdin ends.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

Reply = dict[str, Any]
GIB = 2**30


class Finished(Exception):
    """Nothing more is asked for: what a trainer that waits for requests is left with."""


class Channel:
    """Both directions of the talk. Whatever libraries print to stdout goes to stderr instead."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self.config: dict[str, Any] = json.loads(sys.stdin.readline())
        self._began = time.perf_counter()

    def ready(self, packages: Sequence[str] = ()) -> None:
        """Loaded: the versions of these packages, and the seconds it took."""
        self.reply(ready=True, versions=versions(packages), load_s=time.perf_counter() - self._began)

    def requests(self) -> Iterator[dict[str, Any]]:
        """The requests, as they come; garbage of the last one is collected before the next is handed out."""
        while line := sys.stdin.readline():
            gc.collect()
            yield json.loads(line)

    def reply(self, **facts: Any) -> None:
        """One line out."""
        self._out.write(json.dumps(facts) + "\n")
        self._out.flush()


def serve(prepare: Callable[[Channel], Callable[[dict[str, Any]], Reply] | None], packages: Sequence[str]) -> None:
    """Run ``prepare(channel)``; the function that it returns answers each request. One that returns None has talked
    itself. An exception becomes ``{"error": …}`` and ends the process."""
    channel = Channel()
    try:
        measure = prepare(channel)
        if measure is None:
            return
        channel.ready(packages)
        for request in channel.requests():
            channel.reply(**measure(request))
    except Exception as error:
        traceback.print_exc()
        channel.reply(error=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        sys.exit(1)


def versions(packages: Sequence[str]) -> dict[str, str]:
    """The installed version of each package; one that is absent is left out.

    >>> versions(["no-such-package"])
    {}
    """
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result) of one call."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def reset_peak() -> None:
    """Begin a new measurement of the peak where the system can (Linux); elsewhere it stays that of the process."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return


def peak_gib() -> float:
    """The largest resident size of this process since :func:`reset_peak`, or since it began, in GiB."""
    return _status_gib("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT / GIB


def resident_gib() -> float:
    """The resident size now, in GiB (the peak where the system does not tell)."""
    return _status_gib("VmRSS") or peak_gib()


_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def _status_gib(name: str) -> float | None:
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            kib = next(int(line.split()[1]) for line in file if line.startswith(f"{name}:"))
    except (OSError, StopIteration):
        return None
    return kib * 1024 / GIB
