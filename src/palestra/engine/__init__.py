# SPDX-License-Identifier: Apache-2.0
"""Tokens in, tokens out: the protocol, the public double, the in-process engine."""
