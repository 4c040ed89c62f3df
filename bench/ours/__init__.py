# SPDX-License-Identifier: Apache-2.0
"""Our side of every comparison: one process per configuration, on the library's public parts."""
