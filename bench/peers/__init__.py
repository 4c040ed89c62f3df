# SPDX-License-Identifier: Apache-2.0
"""One process per peer, each in its own environment: standard library and the peer, nothing of ours but this folder."""
