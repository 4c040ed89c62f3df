# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face causal LM as we hold it: loading, adapters, the attention hook, the tiny built-in one."""
