# SPDX-License-Identifier: Apache-2.0
"""What every test runs under."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the command line does; see cli.main
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded at run time
if "PYTEST_XDIST_WORKER" in os.environ:  # processes side by side would wait for each other's threads
    os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("palestra", deadline=None)  # how long an example takes says nothing on a shared machine
settings.load_profile("palestra")

collect_ignore = ["golden/make_from_trl.py"]  # runs with the environment of TRL
