# SPDX-License-Identifier: Apache-2.0
"""A trained reward model as a part of a rubric: ``rewards: {reward_model: {path: RUN/checkpoints/step_000100}}``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from palestra.reward.base import FACTORIES, RewardFunction
from palestra.types import Trajectory


@FACTORIES.register("reward_model")
def reward_model(
    path: str, dtype: str = "float32", device: str = "auto", micro_batch_tokens: int = 8192
) -> RewardFunction:
    """The reward of a checkpoint of ``palestra reward-model``, unscaled, at the last token of each dialogue.

    The dialogue is rendered from its messages as the reward model's own training did, so policy and reward model may
    have different tokenizers; schemas of tools are not shown to it. A dialogue that is longer than the model's context
    is not scored (None). Nothing is loaded before the rubric is made; ModelError where the path holds no reward model.
    """
    import numpy as np
    import torch

    from palestra.chat import make_renderer
    from palestra.learn.batch import Rows, Sample, micro_batches
    from palestra.learn.preference_step import reply_rewards
    from palestra.model.reward_head import load_reward_model

    model, loaded = load_reward_model(path, dtype=dtype, device=device)
    options = {"extra_stop_token_ids": loaded.stop_token_ids, **model.renderer}
    renderer = make_renderer(options.pop("name"), loaded.tokenizer, **options)
    longest = loaded.max_context - 1  # the reward is read at a position of its own

    def row(trajectory: Trajectory, index: int) -> Sample | None:
        ids = renderer.render(trajectory.messages).token_ids if trajectory.turns else []
        if not 0 < len(ids) <= longest:
            return None
        zeros = np.zeros(len(ids), np.int32)
        tokens = np.asarray(ids, np.int32)
        return Sample(tokens, zeros > 0, zeros.astype(np.float32), zeros, "", str(index), 0.0)

    @torch.no_grad()
    def score(trajectories: Sequence[Trajectory], **_: Any) -> list[float | None]:
        found = {i: s for i, t in enumerate(trajectories) if (s := row(t, i)) is not None}
        rows, places = Rows(tuple(found.values())), list(found)
        scores: list[float | None] = [None] * len(trajectories)
        for indices in micro_batches(rows.samples, range(len(rows)), micro_batch_tokens):
            rewards = reply_rewards(model, rows, indices)
            for i in indices:
                scores[places[i]] = float(rewards[i])
        return scores

    return score
