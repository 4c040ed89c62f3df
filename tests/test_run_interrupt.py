# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C strikes where it does no harm."""

from __future__ import annotations

import os
import signal

import pytest

from palestra.run.interrupt import deferred


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
