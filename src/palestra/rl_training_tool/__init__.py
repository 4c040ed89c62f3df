# SPDX-License-Identifier: Apache-2.0
"""A facade for agents and notebooks: data, rewards, training and evaluation behind one dictionary.

>>> from palestra.rl_training_tool import RLTrainingTool
>>> RLTrainingTool().run({"action": "trian"})
'{"status": "error", "error": "unknown action \\'trian\\': did you mean \\'train\\'? Known: create_reward, ..."}'
"""

from __future__ import annotations

from palestra.rl_training_tool.datasets import format_math_dataset
from palestra.rl_training_tool.tool import RLTrainingTool

__all__ = ["RLTrainingTool", "format_math_dataset"]
