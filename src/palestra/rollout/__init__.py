# SPDX-License-Identifier: Apache-2.0
"""How one episode runs, and how many run at once and come back as groups."""
