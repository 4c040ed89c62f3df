# SPDX-License-Identifier: Apache-2.0
"""``python -m palestra``."""

from palestra.cli import main

main()
