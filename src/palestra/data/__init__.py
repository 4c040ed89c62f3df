# SPDX-License-Identifier: Apache-2.0
"""Where tasks come from. Importing the room registers the built-in sources."""

from palestra.data import arithmetic as arithmetic
from palestra.data import curriculum as curriculum
from palestra.data import gsm8k as gsm8k
from palestra.data import reasoning_gym as reasoning_gym
from palestra.data import rows as rows
from palestra.data import stream as stream
from palestra.data import tables as tables
from palestra.data import word_problems as word_problems
