# SPDX-License-Identifier: Apache-2.0
"""The run directory and what is written into it: trackers, progress, report. Never imports torch."""
