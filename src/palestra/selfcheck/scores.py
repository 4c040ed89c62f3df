# SPDX-License-Identifier: Apache-2.0
"""Known answers about numbers as machines hold them: log-probs, entropy, rounding."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from palestra.engine.base import SamplingParams
from palestra.engine.sampling import sample
from palestra.learn.advantage import same
from palestra.learn.batch import Rows, pack
from palestra.learn.kl import bounded_exp
from palestra.learn.policy import Policy
from palestra.model.tiny import calculator_tokenizer, tiny_llama
from palestra.selfcheck.given import Floats, Given, NotData, one_or_all
from palestra.selfcheck.kinds import kind, make_sample


class _Fixed(nn.Module):
    """A model whose logits are always the same."""

    def __init__(self, logits: Floats) -> None:
        super().__init__()
        self.row = torch.tensor(logits, dtype=torch.float32)

    def forward(self, logits_to_keep: Tensor, **_: Any) -> Any:
        return type("Out", (), {"logits": self.row.expand(1, len(logits_to_keep), -1)})


@cache
def _policy() -> Policy:
    return Policy(tiny_llama(calculator_tokenizer(), hidden=8, layers=1, heads=1, intermediate=8, max_context=8))


def scored(logits: Floats, token: int, temperature: float = 1.0) -> tuple[float, float]:
    """Log-prob of a token and entropy in nats, as the trainer computes them from a model's logits."""
    policy = _policy()
    own, policy.model = policy.model, _Fixed(logits)
    try:
        row = make_sample([1])
        row.tokens[-1] = token
        batch = pack(Rows((row,)), [np.zeros(2)], [0])
        logprob, entropy = policy.logprobs(batch, temperature=temperature, entropy="value")
    finally:
        policy.model = own
    assert entropy is not None
    return float(logprob), float(entropy)


@kind("loss", "logits", "token")
@kind("numeric", "logits", "token")
def of_logits(given: Given) -> dict[str, Any]:
    """Logits, a token, and a temperature or several. → logp"""
    logits, token = given.numbers("logits"), given.integer("token")
    temperatures = given.numbers("temperature") if "temperature" in given else np.ones(1)
    return {"logp": one_or_all([scored(logits, token, t)[0] for t in temperatures], given.is_list("temperature"))}


@kind("loss", "probs", "top_p", "sampled_token")
def of_truncated_sampling(given: Given) -> dict[str, Any]:
    """A distribution cut by top_p. → trainer_logp; engine_logp, what an engine that renormalises over the kept tokens
    reports, and naive_ratio against that; correct_ratio, against what this engine reports"""
    probs, token = given.numbers("probs"), given.integer("sampled_token")
    logits = np.log(probs)
    trainer = scored(logits, token)[0]
    given.get("engine_logp"), given.get("trainer_logp")  # in words, how each of the two is meant
    before = float(probs[:token].sum() + probs[token] / 2)  # noise that draws this very token, if it is kept
    params = [SamplingParams(1, top_p=given.number("top_p"))]
    total = float(np.exp(_kept(logits, params)))
    noise = np.array([before / total], np.float32)
    tokens, reported, kept = sample(torch.tensor(logits[None], dtype=torch.float32), params, noise)
    if tokens != [token] or kept is None:
        raise NotData(f"top_p never lets token {token} be sampled")
    return {
        "trainer_logp": trainer,
        "engine_logp": reported[0] - kept[0],
        "naive_ratio": float(np.exp(trainer - (reported[0] - kept[0]))),
        "correct_ratio": float(np.exp(trainer - reported[0])),
    }


def _kept(logits: Floats, params: list[SamplingParams]) -> float:
    kept = sample(torch.tensor(logits[None], dtype=torch.float32), params, np.zeros(1, np.float32))[2]
    return 0.0 if kept is None else kept[0]


@kind("numeric", "log_ratio")
def of_ratio(given: Given) -> dict[str, Any]:
    """Log-ratios of any size. → ratio (of a bounded exponent)"""
    return {"ratio": one_or_all(bounded_exp(torch.tensor(given.numbers("log_ratio"))), given.is_list("log_ratio"))}


@kind("numeric", "probs")
def of_entropy(given: Given) -> dict[str, Any]:
    """A distribution. → entropy (nats)"""
    given.get("quantity")
    with np.errstate(divide="ignore"):
        logits = np.log(given.numbers("probs"))
    return {"entropy": scored(logits, int(np.argmax(logits)))[1]}


@kind("numeric", "values")
def of_variance(given: Given) -> dict[str, Any]:
    """Values in a precision, under a ``mask`` or all. → variance (of the population), mean; values that are all
    the same have no variance, and none at all have neither (0)"""
    given.get("formula")
    dtype = {"float16": np.float16, "float32": np.float32, "float64": np.float64}[given.text("dtype", "float64")]
    values = given.numbers("values").astype(dtype).astype(np.float64)
    values = values[given.mask("mask", len(values))]
    mean = float(values.mean()) if len(values) else 0.0
    return {"variance": 0.0 if same(values.tolist()) else float(values.var()), "mean": mean}


@kind("numeric", "start", "update", "steps")
def of_storage(given: Given) -> dict[str, Any]:
    """The same small update many times. → bf16_only, with_master (float32, shown in bf16)"""
    given.get("storage")
    update, steps = given.number("update"), given.integer("steps")
    low = torch.tensor(given.number("start"), dtype=torch.bfloat16)
    master = low.float()
    for _ in range(steps):
        low = low + torch.tensor(update, dtype=torch.bfloat16)
        master = master + update
    return {"bf16_only": float(low), "with_master": float(master.bfloat16())}


@kind("numeric", "ids", "prompt_len")
def of_alignment(given: Given) -> dict[str, Any]:
    """Tokens of which the first are the prompt. → loss_mask, aligned_fields: which per-token fields, packed for
    training, hold the number of the very token they stand beside"""
    given.get("logprob_convention")
    ids, prompt = given.numbers("ids").astype(int), given.integer("prompt_len")
    row = make_sample(np.arange(1, len(ids)) >= prompt)
    row.tokens[:] = ids
    numbers = tuple(ids.astype(np.float64))
    each = (np.array(numbers),)
    batch = pack(Rows((row,), advantages=each, old=each, ref=each), list(each), [0], dtype=torch.float64)
    fields = {"logprobs": batch.old, "mask": batch.weights, "advantages": batch.advantages}
    aligned = [k for k, v in fields.items() if v is not None and v.tolist() == batch.targets.tolist()]
    return {"loss_mask": row.loss_mask.astype(int).tolist(), "aligned_fields": aligned}
