# SPDX-License-Identifier: Apache-2.0
"""Where an episode's reward lands among its tokens."""

from __future__ import annotations

import numpy as np

from palestra.learn.batch import rows
from palestra.learn.shaping import paid_tokens
from palestra.types import Author, Episode, Group, RewardTerm, Span, StopReason, Task, Trajectory, Turn

TASK = Task("t", "?")


def turn(seen: int, said: int) -> Turn:
    shown = Span(np.full(seen, 3), Author.ENV, "user")
    spans = (shown, Span(np.full(said, 5), Author.MODEL, "assistant", "", np.zeros(said), 0)) if said else (shown,)
    return Turn(spans, (), {"role": "assistant", "content": ""}, "eos")


def test_rw_013_the_score_is_on_the_last_token_that_the_model_wrote_and_on_nothing_behind_it() -> None:
    # the model writes three tokens; two more come after them, which it did not write
    played = Trajectory((turn(0, 3), turn(2, 0)), StopReason.ENV_TERMINATED, rewards={"accuracy": RewardTerm(1.0)})
    made = rows([Group(TASK, 0, (Episode(TASK, (played,)),))], min_group=1)
    assert made.samples[0].loss_mask.tolist() == [True, True, True, False, False]
    (paid,) = paid_tokens(made, "k1", 0.0)
    assert paid.tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]
