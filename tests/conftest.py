# SPDX-License-Identifier: Apache-2.0
"""What every test runs under."""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the command line does; see cli.main
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded at run time

collect_ignore = ["golden/make_from_trl.py"]  # runs with the environment of TRL
