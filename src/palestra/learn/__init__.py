# SPDX-License-Identifier: Apache-2.0
"""Rows → advantages → batch → log-probs → loss. Torch only: knows nothing of how episodes are made."""
