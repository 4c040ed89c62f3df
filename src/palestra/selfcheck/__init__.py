# SPDX-License-Identifier: Apache-2.0
"""Known answers, checked on the user's own machine: does the code here compute what it says it does?"""
