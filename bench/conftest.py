# SPDX-License-Identifier: Apache-2.0
"""Examples in docstrings run with the suite, but for the peers that live in an environment of their own."""

collect_ignore_glob = ["peers/trl*.py", "peers/vllm.py"]
