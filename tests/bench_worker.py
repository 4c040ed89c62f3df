# SPDX-License-Identifier: Apache-2.0
"""A measuring process for tests: as fast as it is told, and it writes down when it was asked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peers.serve import Channel, Reply, serve


def prepare(channel: Channel) -> Callable[[dict[str, Any]], Reply]:
    """config: name, seconds (of 100 tokens), diary (a file). A request with ``die`` ends the process."""
    config = channel.config
    print("chatter of a library")  # must not reach the talk
    if config.get("broken"):
        raise ValueError("no such\nmodel")

    def measure(request: dict[str, Any]) -> Reply:
        with Path(config["diary"]).open("a", encoding="utf-8") as diary:
            diary.write(f"{config['name']} {request.get('what', '')}\n")
        if request.get("die"):
            os._exit(3)
        time.sleep(request.get("sleep", 0))
        return {
            "tokens": 100,
            "seconds": config["seconds"],
            "pid": os.getpid(),
            "spin": os.environ.get("GOMP_SPINCOUNT"),
        }

    return measure


if __name__ == "__main__":
    serve(prepare, [])
