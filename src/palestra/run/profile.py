# SPDX-License-Identifier: Apache-2.0
"""``palestra profile RUN``: where the seconds of a step went, beside what is typical elsewhere, and what to change."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra import config as configuration
from palestra.errors import RunError
from palestra.run.directory import read_run
from palestra.run.trackers import read_metrics

FORMAT = 1
_WIDTH = 110

PARTS: tuple[tuple[str, str, int, str | None], ...] = (
    # (metric, what it is, depth, metric of the tokens it went through)
    ("time/rollout_s", "rollout", 0, "rollout/sampled_tokens"),
    ("time/prefill_s", "prefill", 1, "speed/prefill_tokens"),
    ("time/decode_s", "decode", 1, "rollout/sampled_tokens"),
    ("time/sampling_s", "sampling", 1, "rollout/sampled_tokens"),
    ("time/tools_s", "tools waiting", 1, None),
    ("time/python_s", "Python", 1, None),
    ("time/reward_s", "reward", 0, None),
    ("time/reference_s", "reference, values", 0, "train/row_tokens"),
    ("time/update_s", "update", 0, "train/row_tokens"),
    ("time/forward_s", "forward", 1, "train/row_tokens"),
    ("time/backward_s", "backward", 1, "train/row_tokens"),
    ("time/optimizer_s", "optimiser", 1, None),
    ("time/sync_s", "sync", 0, None),
    ("time/wait_s", "waiting for episodes", 0, None),  # with train.max_staleness; episodes run beside the rest
)

TYPICAL = {"rollout": 0.35, "reward": 0.35, "policy update": 0.20, "value update": 0.10}
"""What a system with a neural reward model and a separate critic spends, by the systems notes."""


@dataclass(frozen=True, slots=True)
class Part:
    """One line: seconds a step, share of the step, and tokens per second where tokens went through it."""

    name: str
    depth: int
    seconds: float
    share: float
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Profile:
    """Means over ``steps`` steps of reinforcement learning. step_s: seconds of one. advice: what would change most."""

    run: str
    steps: int
    step_s: float
    parts: tuple[Part, ...]
    advice: tuple[str, ...]

    def share(self, name: str) -> float:
        """Share of the step that a part took; 0 where it was not logged."""
        return next((p.share for p in self.parts if p.name == name), 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        parts = [
            {"name": p.name, "depth": p.depth, "seconds": p.seconds, "share": p.share, "tokens_per_s": p.tokens_per_s}
            for p in self.parts
        ]
        return {
            "format": FORMAT, "run": self.run, "steps": self.steps, "step_s": self.step_s, "parts": parts,
            "typical": TYPICAL, "advice": list(self.advice),
        }  # fmt: skip

    def text(self) -> str:
        """For people: one line a part, the typical profile, the advice."""
        lines = [f"{self.run}: {self.steps} steps of {self.step_s:.2f} s", ""]
        lines.append(f"  {'part':<24}{'s a step':>10}{'share':>8}{'tokens/s':>12}")
        for p in self.parts:
            rate = f"{p.tokens_per_s:,.0f}" if p.tokens_per_s is not None else ""
            lines.append(f"  {'  ' * p.depth + p.name:<24}{p.seconds:>10.2f}{p.share:>8.0%}{rate:>12}")
        typical = ", ".join(f"{name} {share:.0%}" for name, share in TYPICAL.items())
        lines += ["", *textwrap.wrap(f"typical with a neural reward model and a critic: {typical}", _WIDTH)]
        for text in self.advice:
            lines.append(textwrap.fill(text, _WIDTH, initial_indent="- ", subsequent_indent="  "))
        return "\n".join(lines)


def profile(run: str | Path) -> Profile:
    """Read ``config.yaml`` and ``metrics.jsonl`` of a run directory; writes nothing.

    Raises RunError where there is no run, or no step of reinforcement learning in it yet.
    """
    run = Path(run)
    read_run(run)
    logged = run / "metrics.jsonl"
    rows = read_metrics(logged) if logged.is_file() else []
    rows = [row for row in rows if row["phase"] == "rl" and "time/step_s" in row]
    if not rows:
        raise RunError(f"{run} has logged no step of reinforcement learning, so there is nothing to profile yet")
    step_s = _mean(rows, "time/step_s")
    parts = tuple(_part(rows, step_s, *spec) for spec in PARTS if any(spec[0] in row for row in rows))
    found = Profile(str(run), len(rows), step_s, parts, ())
    advice = tuple(_advice(found, configuration.read_yaml(run / "config.yaml")))
    return Profile(str(run), len(rows), step_s, parts, advice)


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(float(row.get(name, 0.0)) for row in rows) / len(rows)


def _part(
    rows: Sequence[Mapping[str, Any]], step_s: float, metric: str, name: str, depth: int, tokens: str | None
) -> Part:
    seconds = _mean(rows, metric)
    count = _mean(rows, tokens) if tokens is not None else 0.0
    return Part(
        name, depth, seconds, seconds / step_s if step_s else 0.0, count / seconds if count and seconds else None
    )


def _advice(found: Profile, config: Mapping[str, Any]) -> list[str]:
    """What would change the largest parts, with the exact keys; nothing about a part that hardly counts."""
    said: list[str] = []
    if found.share("tools waiting") > 0.25:
        said.append(
            "Tools keep the engine waiting. More episodes at once hide it: raise train.concurrency and "
            "train.tasks_per_step; calls of one turn may run together (env.parallel), and a tool that waits for a "
            "network should be async. train.max_staleness=1 learns meanwhile."
        )
    if found.share("prefill") > 0.25:
        said.append(
            "Much of the rollout fills prompts. A larger algorithm.group_size shares each prompt among more episodes; "
            "a shorter system message or tool description helps every one of them."
        )
    if found.share("decode") > 0.45:
        said.append(
            "Decoding dominates. More rows a pass cost little: raise algorithm.group_size or train.tasks_per_step; "
            "lower sampling.max_new_tokens if episodes ramble; on a machine with bfloat16 units set "
            "engine.dtype=bfloat16 with algorithm.old_logprobs=recompute and algorithm.importance=token_truncate."
        )
    if found.share("Python") > 0.2:
        said.append(
            "Python between the passes weighs as much as it does because the model is small: more episodes at once "
            "(train.tasks_per_step, train.concurrency) share it."
        )
    if found.share("reward") > 0.2:
        said.append(
            "Scoring takes a fifth of the step or more. Batch it: a reward over a whole group sees all its episodes at "
            "once; a judge behind an endpoint takes several requests at a time."
        )
    if found.share("reference, values") > 0.15:
        said.append(
            "The reference's log-probs are a forward pass over everything. algorithm.kl_coef=0 (as dapo, dr_grpo and "
            "gspo have it) needs none."
        )
    if found.share("update") > 0.5:
        lora = config.get("lora") is None and not config.get("model", {}).get("from_scratch", False)
        said.append(
            "The update dominates, which is usual on a CPU: its arithmetic is three times that of one pass. Fewer "
            "algorithm.updates_per_batch, train.gradient_checkpointing=false where memory allows"
            + (", and a LoRA adapter (lora: {r: 16}) whose optimiser is small" if lora else "")
            + "; train.compute_dtype=bfloat16 on machines that have the units."
        )
    if found.share("sync") > 0.05:
        said.append(
            "Handing weights over takes long: engine.pack_weights=false saves the packing where passes are few."
        )
    return said
