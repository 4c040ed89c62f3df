# SPDX-License-Identifier: Apache-2.0
"""Sampling: tokens per second of the engine alone, beside transformers' ``generate`` and vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from bench.lab import Lab, Member, bench
from bench.limits import Limit
from bench.rows import Bar, Row

DTYPES = ("float32", "bfloat16")
SHAPES = ((4, 8), (8, 8), (32, 1))
PROMPT, NEW = 100, 64
TOKEN_RATE = "new tokens/s"


def rate(reply: dict[str, Any]) -> float:
    """Tokens per second of a reply."""
    return float(reply["tokens"] / reply["seconds"])


def _limit(limit: Limit, prompts: int, prompt: int, lengths: Sequence[int]) -> float:
    """New tokens per second at most."""
    return sum(lengths) / limit.sampling_s(prompts, prompt, lengths)


def sampling_bar(samples: int, dtype: str) -> Bar:
    """A group that shares its prompt is to gain by it; without a group there is only the decoding."""
    if samples == 1:
        return Bar({"hf": 1.7, "vllm": 1.0, "vllm shared": 1.0}, stretch={"vllm": 1.2, "vllm shared": 1.2})
    times, share = (2.5, 0.7) if dtype == "float32" else (4.0, 0.55)
    return Bar({"hf": times, "vllm": 1.4, "vllm shared": 1.4}, stretch={"limit": share})


@bench("sampling")
def sampling(lab: Lab) -> Iterator[Row]:
    """New tokens per second at 4×8, 8×8 and 32×1 (prompts × samples), prompt 100, 64 new, float32 and bfloat16."""
    model = lab.model()
    shapes, prompt, new = (((2, 2),), 24, 8) if lab.settings.quick else (SHAPES, PROMPT, NEW)
    for dtype in DTYPES:
        config = {"work": "sampling", "model": model, "dtype": dtype}
        served = config | {"rows": 64, "context": 1024}
        peers = {
            "hf": Member("hf", config),
            "vllm": Member("vllm", served),
            "vllm shared": Member("vllm", served | {"block_size": 32}),
        }
        with lab.crew({"ours": Member("ours", config), **peers}) as crew:
            for prompts, samples in shapes:
                work = f"sampling {prompts}×{samples}"
                if not lab.wants(work, dtype, samples=True):
                    continue
                ids = [p.ids for p in lab.prompts(model, prompts, prompt)]
                request = {"prompts": ids, "samples": samples, "lengths": [new]}
                replies = crew.take_turns(request, warm=request | {"lengths": [4]})
                limit = partial(_limit, prompts=prompts, prompt=prompt, lengths=[new] * prompts * samples)
                yield lab.row(
                    work,
                    dtype,
                    replies.values(rate),
                    unit=TOKEN_RATE,
                    limit=lab.limit(model, dtype, limit),
                    bar=sampling_bar(samples, dtype),
                )


@bench("ragged")
def ragged(lab: Lab) -> Iterator[Row]:
    """Lengths from 8 to 128 on 8×8: rows that leave when they are done, beside a batch that waits for its longest."""
    model, dtype, work = lab.model(), "float32", "ragged 8…128, 8×8"
    if not lab.wants(work, dtype):
        return
    prompts, samples, prompt, longest = (2, 2, 24, 16) if lab.settings.quick else (8, 8, PROMPT, 128)
    lengths = spread_lengths(prompts * samples, 8, longest)
    config = {"work": "sampling", "model": model, "dtype": dtype}
    request = {"prompts": [p.ids for p in lab.prompts(model, prompts, prompt)], "samples": samples, "lengths": lengths}
    lock_step = Member("ours", config, request | {"lengths": [longest] * len(lengths)})
    with lab.crew({"ours": Member("ours", config), "lock-step": lock_step}) as crew:
        replies = crew.take_turns(request, warm=request | {"lengths": [4]})
        yield lab.row(
            work,
            dtype,
            # What lock-step samples beyond a row's length is waste.
            replies.values(lambda reply: sum(lengths) / reply["seconds"]),
            unit=TOKEN_RATE,
            limit=lab.limit(model, dtype, partial(_limit, prompts=prompts, prompt=prompt, lengths=lengths)),
            bar=Bar({"lock-step": 1.25}),
        )


def spread_lengths(count: int, shortest: int, longest: int) -> list[int]:
    """``count`` lengths evenly from shortest to longest, in an order that puts long and short side by side.

    >>> spread_lengths(5, 8, 128)
    [8, 98, 38, 128, 68]
    """
    even = [shortest + round(i * (longest - shortest) / max(1, count - 1)) for i in range(count)]
    stride = next(s for s in range(3 if count > 3 else 1, count + 2) if _coprime(s, count))
    return [even[i * stride % count] for i in range(count)]


def _coprime(a: int, b: int) -> bool:
    while b:
        a, b = b, a % b
    return a == 1
