# SPDX-License-Identifier: Apache-2.0
"""The algorithms by name, each with the paper that its parts are from."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # Williams 1992. token_mean: one divisor for all tokens, so the direction is that of summed log-probs.
    "reinforce": dict(advantage="reinforce_baseline", loss="reinforce", kl_coef=0.0, reduction="token_mean"),
    # arXiv:2402.14740, with the KL in the reward; the clip does nothing in the first update of a step.
    "rloo": dict(advantage="rloo", loss="clip", kl="k1", kl_in="reward", reduction="token_mean"),
    # arXiv:2501.03262, both: KL per token in the reward, or k2 in the loss beside a group baseline.
    "reinforce_pp": dict(advantage="reinforce_pp", loss="clip", kl="k1", kl_in="reward", reduction="token_mean"),
    "reinforce_pp_baseline": dict(advantage="reinforce_pp_baseline", loss="clip", kl="k2", reduction="token_mean"),
    # arXiv:2402.03300.
    "grpo": dict(advantage="group_zscore", loss="clip", kl="k3", reduction="sequence_mean"),
    "grpo_no_std": dict(advantage="group_mean", loss="clip", kl="k3", reduction="sequence_mean"),
    # arXiv:2503.20783: neither the deviation nor an answer's own length divides.
    "dr_grpo": dict(advantage="group_mean", loss="clip", kl_coef=0.0, reduction="constant"),
    # arXiv:2503.14476, all four parts: clip-higher, dynamic sampling, the loss per token, overlong shaping.
    "dapo": dict(
        advantage="group_zscore",
        loss="clip",
        clip_low=0.2,
        clip_high=0.28,
        kl_coef=0.0,
        reduction="token_mean",
        dynamic_sampling=True,
        max_gen_batches=4,
        overlong_shaping=True,
    ),
    # arXiv:2507.18071, section 5.1: the ratio of a whole sequence moves in thousandths.
    "gspo": dict(
        advantage="group_zscore", loss="gspo", clip_low=3e-4, clip_high=4e-4, kl_coef=0.0, reduction="sequence_mean"
    ),
    # arXiv:2506.13585: no lower bound; the upper one is that of arXiv:2510.13786, a weight of at most 5.
    "cispo": dict(
        advantage="group_zscore", loss="cispo", clip_low=1.0, clip_high=4.0, kl_coef=0.0, reduction="token_mean"
    ),
    # arXiv:2308.01825, arXiv:2304.06767: supervised fine-tuning on the best episodes of each group.
    "rft": dict(advantage="best_of_group", loss="reinforce", kl_coef=0.0, reduction="token_mean"),
    # arXiv:1707.06347 with GAE, the KL in the reward and four passes over each batch, as arXiv:1909.08593 has it.
    "ppo": dict(
        advantage="gae",
        loss="clip",
        kl="k1",
        kl_in="reward",
        reduction="token_mean",
        whiten_advantages=True,
        updates_per_batch=4,
    ),
    # arXiv:1602.01783, synchronous: one update on what the critic left unexplained, so there is nothing to clip; its γ:
    # undiscounted, a value that continues itself where a limit cut the episode is never proved wrong.
    "a2c": dict(advantage="gae", gamma=0.99, loss="reinforce", kl_coef=0.0, reduction="token_mean", value_clip=None),
    # arXiv:2306.08543, arXiv:2306.13649: the reverse KL to `teacher`, of the sampled tokens or of whole distributions.
    "distill": dict(advantage="distill", loss="clip", kl_coef=0.0, reduction="token_mean"),
    "distill_full": dict(advantage="nothing", loss="reinforce", kl="full", kl_coef=1.0, reduction="token_mean"),
}
"""Algorithms as data: a preset names its parts, and every part can be overridden one by one."""
