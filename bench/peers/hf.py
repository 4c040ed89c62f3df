# SPDX-License-Identifier: Apache-2.0
"""transformers as it comes: ``generate`` on a padded batch, and forward and backward of a plain padded batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.peers.serve import Channel, Reply, serve, timed


def prepare(channel: Channel) -> Callable[[dict[str, Any]], Reply]:
    """config: work (``sampling`` or ``update``), model, dtype, threads, and for an update its batch."""
    config = channel.config
    torch.set_num_threads(config["threads"])
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(config["model"], dtype=getattr(torch, config["dtype"]))
    return _sampling(model) if config["work"] == "sampling" else _update(model, config)


def _sampling(model: Any) -> Callable[[dict[str, Any]], Reply]:
    """Every prompt as often as it has samples, all rows in one ``generate``; no token ends a row."""
    model.eval()
    model.generation_config.eos_token_id = None
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}

    def measure(request: dict[str, Any]) -> Reply:
        ids = torch.tensor(request["prompts"]).repeat_interleave(request["samples"], 0)
        mask = torch.ones_like(ids)

        def generate() -> Any:
            with torch.inference_mode():
                return model.generate(
                    input_ids=ids, attention_mask=mask, max_new_tokens=request["lengths"][0], **options
                )

        seconds, out = timed(generate)
        return {"seconds": seconds, "tokens": out[:, ids.shape[1] :].numel()}

    return measure


def _update(model: Any, config: dict[str, Any]) -> Callable[[dict[str, Any]], Reply]:
    """The loop a user would write: the whole batch, logits of the new tokens, log-softmax, clipped surrogate."""
    model.train()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.tensor(config["prompts"]).repeat_interleave(config["samples"], 0)
    drawn = torch.randint(0, model.config.vocab_size, (len(prompts), config["new"]), generator=generator)
    everything = (torch.cat([prompts, drawn], 1), drawn, torch.randn(len(drawn), 1, generator=generator))

    def backward(rows: int) -> None:
        model.zero_grad(set_to_none=True)
        ids, new, advantages = (part[:rows] for part in everything)
        logits = model(input_ids=ids, logits_to_keep=config["new"] + 1, use_cache=False).logits[:, :-1]
        logprobs = logits.float().log_softmax(-1).gather(-1, new[:, :, None])[:, :, 0]
        ratio = (logprobs - logprobs.detach()).exp()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        loss.backward()  # type: ignore[no-untyped-call]

    return lambda request: {"seconds": timed(lambda: backward(request.get("rows", len(drawn))))[0]}


if __name__ == "__main__":
    serve(prepare, ["torch", "transformers"])
