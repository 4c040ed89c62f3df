# SPDX-License-Identifier: Apache-2.0
"""Training: forward and backward of an update, whole GRPO steps, supervised and preference training, beside TRL."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from bench.benches.sampling import NEW, PROMPT
from bench.lab import Crew, Lab, Member, bench
from bench.limits import Limit
from bench.rows import Bar, Check, Row

GRADIENT_ERROR = 1e-5
BATCH, LENGTH = 8, 256


def _seconds(reply: dict[str, Any]) -> float:
    return float(reply["seconds"])


def _passes(reply: dict[str, Any]) -> float:
    """Forward and backward: all of an update's reply, these two parts of a step's."""
    split = reply.get("split")
    return float(split["forward_s"] + split["backward_s"] if split else reply["seconds"])


def _sizes(lab: Lab) -> tuple[int, int, int, int]:
    """(prompts, samples, prompt tokens, new tokens)."""
    return (2, 2, 32, 8) if lab.settings.quick else (4, 8, PROMPT, NEW)


def step_config(lab: Lab, model: str, dtype: str = "float32") -> dict[str, Any]:
    """A whole step of 4×8 on this model."""
    prompts, samples, prompt, new = _sizes(lab)
    texts = [p.text for p in lab.prompts(model, prompts, prompt)]
    return {"work": "step", "model": model, "texts": texts, "samples": samples, "new": new, "dtype": dtype}


def _update_limit_s(limit: Limit, tokens: int, scored: int) -> float:
    return limit.update_s(tokens, scored)


def step_limit_s(limit: Limit, sizes: tuple[int, int, int, int], *, rescored: bool) -> float:
    """Sampling, the update (with ``rescored``: and a forward pass before it) and the optimiser."""
    prompts, samples, prompt, new = sizes
    rows = prompts * samples
    tokens, scored = prompts * prompt + rows * new, rows * new
    seconds = limit.sampling_s(prompts, prompt, [new] * rows) + limit.update_s(tokens, scored) + limit.optimiser_s()
    return seconds + (limit.forward_s(tokens, scored) if rescored else 0.0)


@bench("grpo")
def grpo(lab: Lab) -> Iterator[Row]:
    """Seconds of a GRPO step, 4×8, prompt 100, 64 new: its forward and backward (and that of 32×1), and all of it."""
    model, dtype = lab.model(), "float32"
    prompts, samples, prompt, new = _sizes(lab)
    rows = prompts * samples
    whole, shared, alone = f"GRPO step {prompts}×{samples}", f"update {prompts}×{samples}", f"update {rows}×1"
    if not any(lab.wants(work, dtype) for work in (whole, shared, alone)):
        return
    step = step_config(lab, model)
    updates = {shared: _update_config(lab, model, prompts, samples), alone: _update_config(lab, model, rows, 1)}
    few = {"rows": samples}
    members = {work: Member("ours", config, warm=few) for work, config in updates.items()}
    members["hf"] = Member("hf", updates[shared], warm=few)
    members |= {"ours": Member("ours", step), "trl": Member("trl", step)}
    bars = {shared: Bar({"trl": 3.5}, stretch={"limit": 0.85}), alone: Bar({"trl": 1.5})}
    with lab.crew(members, together=False) as crew:
        replies = crew.take_turns({})
        yield lab.row(
            whole,
            dtype,
            replies.values(_seconds, {"ours": "ours", "trl": "trl"}),
            unit="s",
            better="lower",
            limit=lab.limit(model, dtype, partial(step_limit_s, sizes=_sizes(lab), rescored=False)),
            bar=Bar({"trl": 3.0}, stretch={"trl": 4.0}),
            facts={"split": replies.last("split")},
        )
        for work, count in ((shared, prompts), (alone, rows)):
            # Neither peer shares a prompt, so their 4×8 is as much work as 32×1 would be (TRL takes no groups of one).
            tokens, scored = count * prompt + rows * new, rows * new
            yield lab.row(
                work,
                dtype,
                replies.values(_passes, {"ours": work, "hf": "hf", "trl": "trl"}),
                unit="s",
                better="lower",
                limit=lab.limit(model, dtype, partial(_update_limit_s, tokens=tokens, scored=scored)),
                bar=bars[work],
                checks=_gradient_check(crew, work) if replies.by[work] else {},
            )


def _gradient_check(crew: Crew, name: str) -> dict[str, Check]:
    """How far the timed update's gradient is from that of plain forward passes."""
    found = crew.once(name, {"check": True})
    crew.members[name].end()
    return {"gradient error": Check(found["gradient_error"], at_most=GRADIENT_ERROR)}


def _update_config(lab: Lab, model: str, prompts: int, samples: int) -> dict[str, Any]:
    _, _, prompt, new = _sizes(lab)
    ids = [p.ids for p in lab.prompts(model, prompts, prompt)]
    return {"work": "update", "model": model, "prompts": ids, "samples": samples, "new": new, "dtype": "float32"}


@bench("grpo-bf16")
def grpo_bf16(lab: Lab) -> Iterator[Row]:
    """Seconds of a GRPO step in bfloat16 over float32 weights, corrected for the sampler, beside TRL's best dtype."""
    model, dtype = lab.model(), "bfloat16"
    prompts, samples, _, _ = _sizes(lab)
    work = f"GRPO step {prompts}×{samples}"
    if not lab.wants(work, dtype):
        return
    config = step_config(lab, model, dtype)
    with lab.crew({"ours": Member("ours", config), "trl": Member("trl", config)}, together=False) as crew:
        replies = crew.take_turns({})
    measured = replies.values(_seconds)
    full = lab.results.find(work, "float32")
    wide = {"trl float32": full["runs"]["trl"]} if full is not None and full["runs"].get("trl") else {}
    least = {"trl": 5.0} | dict.fromkeys(wide, 5.0)
    yield lab.row(
        work,
        dtype,
        replace(measured, runs=dict(measured.runs) | wide),
        unit="s",
        better="lower",
        limit=lab.limit(model, dtype, partial(step_limit_s, sizes=_sizes(lab), rescored=True)),
        bar=Bar(least, stretch=dict.fromkeys(least, 7.0)),
        facts={"split": replies.last("split")},
    )


@bench("tiny")
def tiny(lab: Lab) -> Iterator[Row]:
    """Seconds of a whole GRPO step of the tiny model, 4×8×64, where everything but arithmetic shows."""
    work, dtype = "GRPO step, tiny model", "float32"
    if not lab.wants(work, dtype):
        return
    config = step_config(lab, lab.model("tiny"))
    with lab.crew({"ours": Member("ours", config), "trl": Member("trl", config)}) as crew:
        replies = crew.take_turns({})
    yield lab.row(
        work,
        dtype,
        replies.values(_seconds),
        unit="s",
        better="lower",
        bar=Bar({"trl": 5.0}, stretch={"trl": 10.0}),
        facts={"split": replies.last("split")},
    )


@bench("sft")
def sft(lab: Lab) -> Iterator[Row]:
    """Tokens per second and peak memory of supervised training, 8 sequences of 256 tokens a step."""
    yield from _supervised(lab, "SFT", "sft", forwards=0)


@bench("dpo", suite="full")
def dpo(lab: Lab) -> Iterator[Row]:
    """Tokens per second and peak memory of DPO, 8 pairs of 256 tokens a side, half of them the prompt."""
    if importlib.util.find_spec("palestra.train.prefer") is None:
        lab.tell("  skipped: palestra.train.prefer, the verb `prefer`, does not exist")
        return
    yield from _supervised(lab, "DPO", "dpo", forwards=1)


def _supervised(lab: Lab, name: str, work: str, *, forwards: int) -> Iterator[Row]:
    """Two rows of one comparison: speed and memory. forwards: passes without gradients beside the update."""
    dtype, memory = "float32", f"{name} peak memory"
    if not (lab.wants(name, dtype) or lab.wants(memory, dtype)):
        return
    model = lab.model()
    batch, length = (2, 32) if lab.settings.quick else (BATCH, LENGTH)
    config = {"work": work, "model": model, "batch": batch, "length": length}
    with lab.crew({"ours": Member("ours", config), "trl": Member("trl", config)}, together=False) as crew:
        replies = crew.take_turns({})
    yield lab.row(
        name,
        dtype,
        replies.values(lambda reply: float(reply["tokens"] / reply["seconds"])),
        unit="tokens/s",
        limit=lab.limit(model, dtype, partial(_supervised_limit, batch=batch, length=length, forwards=forwards)),
        bar=Bar({"trl": 1.6}, stretch={"limit": 0.75}),
    )
    yield lab.row(
        memory,
        dtype,
        replies.values(lambda reply: float(reply["peak_gib"])),
        unit="GiB",
        better="lower",
        bar=Bar({"trl": 1 / 0.7}, said="≤ 0.7 × trl"),
    )


def _supervised_limit(limit: Limit, batch: int, length: int, forwards: int) -> float:
    """Tokens per second; the two sides of a pair share their prompt, and only replies are scored."""
    if not forwards:
        return batch * length / (limit.update_s(batch * length, batch * length) + limit.optimiser_s())
    prompt, reply = length // 2, length - length // 2
    computed, scored = batch * (prompt + 2 * reply), batch * 2 * reply
    seconds = limit.update_s(computed, scored) + forwards * limit.forward_s(computed, scored) + limit.optimiser_s()
    return 2 * batch * length / seconds
