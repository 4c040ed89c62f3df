# SPDX-License-Identifier: Apache-2.0
"""How good is this policy on these tasks."""
