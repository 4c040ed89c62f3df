# SPDX-License-Identifier: Apache-2.0
"""How fast it is, measured: ours and what a user would pick instead, on the same work, in one run.

    python -m bench --list
    python -m bench sampling --json bench/results/sampling.json

docs/performance.md explains every term. Files: ``benches/`` what is measured, ``ours/`` and ``peers/`` the processes
that do the work, ``lab.py`` how they take turns, ``rows.py`` what becomes of the numbers, ``limits.py`` what the
machine could do at most.
"""
