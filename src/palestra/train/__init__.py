# SPDX-License-Identifier: Apache-2.0
"""The loops: supervised warm-up, reinforcement learning, evaluation; the configs that drive them."""
