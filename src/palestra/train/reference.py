# SPDX-License-Identifier: Apache-2.0
"""What a policy is compared with: its own beginning, or a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import nn

from palestra.errors import ModelError, RunError
from palestra.learn.policy import frozen_copy
from palestra.model.loading import LoadedModel
from palestra.model.lora import base_model
from palestra.train import setup
from palestra.train.checkpoint import latest_checkpoint, restore_model, save_checkpoint
from palestra.train.config import RLConfig

_NO_REFERENCE = (
    "so the KL term has no reference: put back a copy, go on without one by algorithm.kl_coef=0, or start again in "
    "another --out"
)


def load_teacher(config: RLConfig, student: LoadedModel) -> LoadedModel | None:
    """The teacher of a config, frozen; None where there is none. Raises ModelError unless it reads the same tokens."""
    if config.teacher is None:
        return None
    teacher = setup.load(config.teacher)
    check_vocabulary(teacher, student)
    teacher.model.requires_grad_(requires_grad=False)
    return teacher


def check_vocabulary(teacher: LoadedModel, student: LoadedModel) -> None:
    """Refuse a teacher for whom a token id means another token, or has no logit; raises ModelError.

    Logits beyond the vocabulary are padding: families pad their sizes differently, so the teacher may have more.
    """
    theirs, ours = _vocabulary(teacher), _vocabulary(student)
    if theirs != ours:
        token = min((t for t in {*theirs, *ours} if theirs.get(t) != ours.get(t)), key=lambda t: ours.get(t, 1 << 30))
        raise ModelError(
            f"teacher {teacher.source!r} and model {student.source!r} have different vocabularies: {token!r} is "
            f"{_id(theirs, token)} for the teacher and {_id(ours, token)} for the model; a teacher scores the model's "
            "own tokens, so choose one of the same family"
        )
    if (width := _logits(teacher)) < (needed := _logits(student)):
        raise ModelError(
            f"teacher {teacher.source!r} has {width:,} logits and model {student.source!r} has {needed:,}: it cannot "
            "score every token that the model may sample; choose a teacher of at least that size"
        )


def keep_reference(
    config: RLConfig, model: nn.Module, tokenizer: Any, teacher: LoadedModel | None, kept: Path, *, resumed: bool
) -> bool | nn.Module:
    """The reference of a policy, as :class:`~palestra.learn.policy.Policy` takes it; False where nothing asks for one.

    A teacher, where there is one. Else the policy itself before its first update: a fresh adapter's is the base under
    it, and otherwise it is a copy, which ``kept`` holds too: a resumed run must not be pulled towards the weights that
    it was interrupted at.
    """
    algorithm = config.algorithm
    if not algorithm.needs_reference:
        return False
    if teacher is not None:
        return teacher.model
    if config.lora is not None and config.warmup is None:
        return True
    if not resumed:
        save_checkpoint(kept, 0, model=model, tokenizer=tokenizer, trainer_state={}, keep_last=1)
        return frozen_copy(model)
    try:
        found = latest_checkpoint(kept)
    except RunError as error:  # its advice, to begin anew, is for a run's own checkpoints
        raise RunError(f"{str(error).partition(';')[0]}; {_NO_REFERENCE}") from None
    if found is None:
        raise RunError(f"{kept} is missing; {_NO_REFERENCE}")
    return restore_model(found, frozen_copy(model))


def _vocabulary(loaded: LoadedModel) -> Mapping[str, int]:
    return cast(Mapping[str, int], loaded.tokenizer.get_vocab())


def _id(vocabulary: Mapping[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "unknown"


def _logits(loaded: LoadedModel) -> int:
    """How many logits the model gives at each position."""
    return int(cast(Any, base_model(loaded.model)).get_output_embeddings().weight.shape[0])
