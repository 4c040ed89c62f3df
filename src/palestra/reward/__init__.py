# SPDX-License-Identifier: Apache-2.0
"""What is good. Importing the room registers the built-in reward functions."""

from palestra.reward import calculator as calculator
from palestra.reward import code as code
from palestra.reward import formats as formats
from palestra.reward import functions as functions
from palestra.reward import information as information
from palestra.reward import judge as judge
from palestra.reward import novelty as novelty
from palestra.reward import progress as progress
from palestra.reward import reasoning_gym as reasoning_gym
from palestra.reward import reward_model as reward_model
from palestra.reward import safety as safety
