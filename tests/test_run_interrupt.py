# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C strikes where it does no harm."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from palestra.run.interrupt import deferred, heed_termination


@pytest.fixture
def handlers() -> Iterator[None]:
    """As they were, afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_ctrl_c_waits_for_the_safe_point() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), deferred() as safe_point:
        os.kill(os.getpid(), signal.SIGINT)
        done.append("the update was finished")
        safe_point()
        done.append("never reached")
    assert done == ["the update was finished"]


def test_a_second_ctrl_c_strikes_at_once_and_the_old_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), deferred():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("foreground", [True, False])
def test_sigterm_is_what_ctrl_c_is_in_the_background_too(foreground: bool) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler if foreground else signal.SIG_IGN)
    heed_termination()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("handlers")
def test_sigterm_waits_for_the_safe_point_too() -> None:
    heed_termination()
    done = []
    with pytest.raises(KeyboardInterrupt), deferred() as safe_point:
        os.kill(os.getpid(), signal.SIGTERM)
        done.append("the update was finished")
        safe_point()
    assert done == ["the update was finished"]
