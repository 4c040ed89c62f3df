# SPDX-License-Identifier: Apache-2.0
"""What is measured: a function per bench, registered under its name. Importing this folder registers all of them."""

from bench.benches import episodes, learning, machine, sampling, scaling, starting, training

__all__ = ["episodes", "learning", "machine", "sampling", "scaling", "starting", "training"]
