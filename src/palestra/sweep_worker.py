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


def _end_with_parent() -> None:
    # The file descriptor and not sys.stdin: a thread inside its lock would keep the interpreter from ending.
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    """Run the verb as the command line would, going on where an earlier try ended."""
    verb, config = sys.argv[1:]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.argv = ["palestra", verb, config, "--resume", "--quiet"]
    cli.main()


if __name__ == "__main__":
    main()
