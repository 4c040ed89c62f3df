# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at a moment of our choosing: never halfway through an update; and SIGTERM as Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def heed_termination() -> None:
    """From here on SIGTERM, by which schedulers and ``kill`` say that the end is near, is what Ctrl-C is; also in what
    a shell script started in the background, which ignores SIGINT."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, pass_on)


@contextmanager
def deferred() -> Iterator[Callable[[], None]]:
    """Hold back SIGINT; the function this yields raises KeyboardInterrupt if one came. A second Ctrl-C strikes at
    once. Outside the main thread, where Python delivers no signals, nothing is held back.

    >>> with deferred() as safe_point:
    ...     safe_point()  # nothing came
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = signal.getsignal(signal.SIGINT)
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    def safe_point() -> None:
        if came:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield safe_point
    finally:
        signal.signal(signal.SIGINT, before)
