# SPDX-License-Identifier: Apache-2.0
"""The C sources beside this file, compiled by the system's C compiler when they are first needed.

What is compiled is kept in the user's cache folder, under a name that changes with the sources and the processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch

_HERE = Path(__file__).parent
_FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-ffp-contract=fast", "-w", "-fopenmp", "-shared", "-fPIC")
_BUILD_S = 60


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None elsewhere than on Linux with AVX2 or more, where they are not wanted, and, with a
    warning that says why, where they cannot be built."""
    if os.environ.get("PALESTRA_KERNELS", "1") == "0" or platform.system() != "Linux" or not _wide():
        return None
    try:
        return _loaded()
    except (OSError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"kernels could not be built ({_first_line(error)}), so models run on torch's own operations, which takes "
            "up to twice as long on a CPU; install a C compiler, or say PALESTRA_KERNELS=0 if that is meant",
            stacklevel=2,
        )
        return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def which() -> str:
    """What computes here: a name that changes with the sources and the processor, or ``torch`` alone."""
    return "torch" if library() is None else _key((*_FLAGS, *_wide()))


def _wide() -> tuple[str, ...]:
    """What the compiler may use. torch knows what this processor can do; "-march=native" would leave it to who made the
    cache."""
    wide = {"AVX2": ("-mavx2", "-mfma"), "AVX512": ("-mavx2", "-mfma", "-mavx512f", "-mavx512vl")}
    return wide.get(torch.backends.cpu.get_cpu_capability(), ())


def _key(flags: tuple[str, ...]) -> str:
    sources = [path.read_bytes() for path in sorted(_HERE.glob("*.[ch]"))]
    machine = (platform.machine(), platform.system(), platform.libc_ver())
    return hashlib.sha256(repr((sources, flags, machine)).encode()).hexdigest()[:16]


def _loaded() -> ctypes.CDLL:
    """OSError or SubprocessError where it cannot be compiled."""
    flags = (*_FLAGS, *_wide())
    name = f"kernels-{_key(flags)}.so"
    try:
        kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "palestra" / name
        kept.parent.mkdir(parents=True, exist_ok=True)
        if not kept.exists():
            _compile(kept, flags)
        return ctypes.CDLL(str(kept))
    except (OSError, RuntimeError):
        # No home, no room, no right to write, or made by a machine that shares the home: once loaded no file is needed.
        with tempfile.TemporaryDirectory() as aside:
            _compile(Path(aside) / name, flags)
            return ctypes.CDLL(str(Path(aside) / name))


def _compile(target: Path, flags: tuple[str, ...]) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    with tempfile.TemporaryDirectory(dir=target.parent) as aside:
        made = Path(aside) / target.name
        sources = map(str, sorted(_HERE.glob("*.c")))
        command = [*compiler.split(), *flags, *sources, "-o", str(made), "-lm"]
        done = subprocess.run(command, capture_output=True, timeout=_BUILD_S, check=False)
        if done.returncode != 0:
            raise subprocess.SubprocessError(done.stderr.decode(errors="replace"))
        os.replace(made, target)
