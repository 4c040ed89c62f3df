# SPDX-License-Identifier: Apache-2.0
"""The loss of a supervised run on rows that it does not train on, at its checkpoints."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from palestra.data.dialogues import make_dialogues
from palestra.learn.batch import Rows
from palestra.learn.preference_step import token_logprobs
from palestra.model.loading import load_model
from palestra.train import setup
from palestra.train.config import SFTConfig
from palestra.train.sft import dialogue_samples, make_policy

TOKENS = 8192


def held_out_losses(checkpoints: Path, config: SFTConfig, file: Path, every: int) -> dict[int, float]:
    """Step → cross-entropy per trained token (nats) on the dialogues of ``file``, for the checkpoints at multiples of
    ``every`` and the last one. Of the others, which were kept for this, only the run's newest two stay."""
    found = sorted(checkpoints.glob("step_*"))
    losses: dict[int, float] = {}
    for path in found:
        step = int(path.name.removeprefix("step_"))
        if step % every == 0 or path == found[-1]:
            losses[step] = _loss(path, config, file)
    for path in found[:-2]:
        shutil.rmtree(path)
    return losses


def _loss(checkpoint: Path, config: SFTConfig, file: Path) -> float:
    loaded = load_model(str(checkpoint), dtype=config.model.dtype, device=config.model.device)
    renderer = setup.renderer_for(config.renderer, loaded)
    dialogues = make_dialogues("jsonl", seed=0, path=str(file))
    samples = dialogue_samples(dialogues, renderer, max_length=config.sft.max_length)
    policy = make_policy(loaded.model, config.sft, reference=False)
    logprobs = token_logprobs(policy, Rows(tuple(samples)), max_tokens=TOKENS)
    # The first token of a sequence is predicted by nothing; its log-prob is 0 and it counts as none.
    masks = [sample.loss_mask.copy() for sample in samples]
    for mask in masks:
        mask[0] = False
    total = math.fsum(float(lp[mask].sum()) for lp, mask in zip(logprobs, masks, strict=True))
    return -total / sum(int(mask.sum()) for mask in masks)
