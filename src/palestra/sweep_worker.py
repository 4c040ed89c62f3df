# SPDX-License-Identifier: Apache-2.0
"""One trial of a sweep, in a process of its own: ``python -m palestra.sweep_worker VERB CONFIG.yaml``.

It lives as long as its standard input: when the sweep closes that, or dies, the run ends as after Ctrl-C, with a
checkpoint of its last whole step.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from palestra import cli


def end_with_parent() -> None:
    """From here on this process is interrupted when its standard input ends."""
    # What a shell script starts in the background ignores the signal, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    # The file descriptor and not sys.stdin: a thread inside its lock would keep the interpreter from ending.
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    """Run the verb as the command line would, going on where an earlier try ended."""
    verb, config = sys.argv[1:]
    end_with_parent()
    sys.argv = ["palestra", verb, config, "--resume", "--quiet"]
    cli.main()


if __name__ == "__main__":
    main()
