# SPDX-License-Identifier: Apache-2.0
"""The loss of a supervised run on rows that it does not train on, while it trains."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from palestra.chat.base import Renderer
from palestra.data.dialogues import make_dialogues
from palestra.learn.batch import Rows
from palestra.learn.policy import Policy
from palestra.learn.preference_step import token_logprobs
from palestra.train.sft import dialogue_samples
from palestra.types import FloatArray

AT_ONCE, SILENCE_S = 32, 2.0
"""Rows between two looks at the clock, and how long nothing is said."""


class HeldOut:
    """Measures a policy on the dialogues of ``file`` at every multiple of ``every`` and at the last step.

    losses: step → cross-entropy per trained token, in nats. last: whether a step is the last one. tell: hears of each
    measurement, and every few seconds of one that takes longer.
    """

    def __init__(
        self,
        file: Path,
        every: int,
        *,
        max_length: int,
        max_tokens: int,
        last: Callable[[int], bool],
        tell: Callable[[int, str], None],
    ) -> None:
        self.losses: dict[int, float] = {}
        self._file, self._every, self._last, self._tell = file, every, last, tell
        self._max_length, self._max_tokens = max_length, max_tokens

    def __call__(self, step: int, policy: Policy, renderer: Renderer) -> None:
        if step % self._every == 0 or self._last(step):
            self.losses[step] = self._loss(step, policy, renderer)
            self._tell(step, f"Held-out loss: {self.losses[step]:.4g}")

    def _loss(self, step: int, policy: Policy, renderer: Renderer) -> float:
        dialogues = make_dialogues("jsonl", seed=0, path=str(self._file))
        samples = dialogue_samples(dialogues, renderer, max_length=self._max_length)
        logprobs: list[FloatArray] = []
        spoken = time.monotonic()
        for start in range(0, len(samples), AT_ONCE):
            if time.monotonic() - spoken > SILENCE_S:
                spoken = time.monotonic()
                self._tell(step, f"measured {start} of {len(samples)} held-out rows")
            part = Rows(tuple(samples[start : start + AT_ONCE]))
            logprobs += token_logprobs(policy, part, max_tokens=self._max_tokens)
        # The first token of a sequence is predicted by nothing; its log-prob is 0 and it counts as none.
        masks = [sample.loss_mask.copy() for sample in samples]
        for mask in masks:
            mask[0] = False
        total = math.fsum(float(lp[mask].sum()) for lp, mask in zip(logprobs, masks, strict=True))
        return -total / sum(int(mask.sum()) for mask in masks)
