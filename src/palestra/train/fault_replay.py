# SPDX-License-Identifier: Apache-2.0
"""``palestra replay RUN --fault FILE``: a batch that was not learned from, through the weights that met it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from palestra.errors import RunError
from palestra.learn.annotate import annotate
from palestra.learn.update import UpdateConfig
from palestra.train.faults import read_fault
from palestra.train.replay import config_of, trainer_at
from palestra.train.sealed import damage

_PARTS = ("advantages", "old", "ref", "values", "returns")


@dataclass(frozen=True, slots=True)
class FaultReplay:
    """step, reason: as the run told them. samples: of the batch. ill: episode → what of it is not finite, the
    log-probs by the weights at hand (``now``) among it. gap: the largest |now - old| of what is finite, in nats."""

    step: int
    reason: str
    weights: str
    samples: int
    ill: Mapping[str, tuple[str, ...]]
    gap: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"format": 1, **asdict(self)}

    def text(self) -> str:
        """For people: what was told, then each ill episode."""
        lines = [f"step {self.step} was skipped: {self.reason}; its {self.samples} samples through {self.weights}:"]
        lines += [f"  episode {name}: not finite: {', '.join(parts)}" for name, parts in self.ill.items()]
        if not self.ill:
            lines.append("  every number that goes into the loss is finite: the gradient overflows, or a ratio does")
        lines.append(f"  largest distance of a token's log-prob to the sampler's: {self.gap:.3g} nats")
        return "\n".join(lines)


def replay_fault(run: Path, file: Path) -> FaultReplay:
    """Look for what is not finite, sample by sample, with the weights before the step (or right behind it, for a
    skipped step leaves them). Nothing in the run directory changes. RunError where nothing of that is there."""
    config = config_of(run)
    about, rows = read_fault(file)
    if about["phase"] != "rl":
        raise RunError(f"{file} is of the phase {about['phase']}: only batches of reinforcement learning are replayed")
    step = int(about["step"])
    folders = [run / "checkpoints" / f"step_{at:06d}" for at in (step - 1, step)]
    there = next((folder for folder in folders if folder.is_dir() and damage(folder) is None), None)
    if there is None:
        names = " nor ".join(folder.name for folder in folders)
        raise RunError(f"{run} holds neither {names}, whose weights met the batch; train.save_every keeps more")
    trainer = trainer_at(config, run, there)
    try:
        trainer.begin_rl()
        made = rows.with_(samples=tuple(replace(s, trained=True) for s in rows.samples))
        tokens = config.algorithm.micro_batch_tokens
        settings = UpdateConfig(advantage="reinforce", kl_coef=0.0, old_logprobs="recompute", micro_batch_tokens=tokens)
        now = annotate(trainer.policy, made, settings, temperature=config.sampling.temperature).old or ()
    finally:
        trainer.engine.close()
    ill: dict[str, tuple[str, ...]] = {}
    gap = 0.0
    for i, sample in enumerate(rows.samples):
        mask = sample.loss_mask
        parts = {name: values[i] for name in _PARTS if (values := getattr(rows, name)) is not None}
        parts |= {"now": now[i], "sampler": sample.logprobs}
        if bad := tuple(name for name, v in parts.items() if not np.isfinite(np.asarray(v)[mask]).all()):
            ill[sample.episode] = bad
        away = np.abs(np.asarray(now[i], np.float64) - sample.logprobs)[mask]
        gap = max(gap, float(np.max(away[np.isfinite(away)], initial=0.0)))
    return FaultReplay(step, str(about["reason"]), there.name, len(rows.samples), ill, gap)


__all__ = ["FaultReplay", "replay_fault"]
