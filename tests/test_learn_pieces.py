# SPDX-License-Identifier: Apache-2.0
"""Log-probs from a piece of the logits at a time: numbers and gradients of all logits at once, never all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import double_norms, eight_samples, make_model
from test_learn_critic import with_critic

from palestra.learn import pieces
from palestra.learn.batch import Batch, Rows, pack, token_weights
from palestra.learn.policy import Outputs, Policy
from palestra.learn.scores import WithEntropy
from palestra.model.lora import LoraConfig, add_lora


def batch_of(dtype: torch.dtype = torch.float64) -> Batch:
    rows = Rows(tuple(eight_samples()))
    return pack(rows, token_weights(rows.samples, "token_mean"), range(len(rows)), dtype=dtype)


def seen_and_gradients(policy: Policy, batch: Batch, entropy: WithEntropy) -> tuple[Outputs, list[torch.Tensor]]:
    policy.train_mode(dropout=False)
    for p in policy.parameters():
        p.grad = None
    seen = policy.outputs(batch, temperature=0.7, entropy=entropy)
    loss = (seen.logprobs * torch.linspace(-1, 1, len(seen.logprobs), dtype=seen.logprobs.dtype)).sum()
    if entropy == "gradient" and seen.entropy is not None:
        loss = loss + seen.entropy.sum()
    if seen.values is not None:
        loss = loss + seen.values.square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return seen, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in policy.parameters()]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Any:
    """From now on four rows' logits are a piece."""

    def begin(model: Any) -> None:
        monkeypatch.setattr(pieces, "KEPT", 0)
        monkeypatch.setattr(pieces, "PIECE", 4 * model.config.vocab_size)

    return begin


@pytest.mark.parametrize("entropy", [False, "value", "gradient"])
@pytest.mark.parametrize("critic", [None, "shared", "separate"])
def test_pieces_have_the_numbers_and_gradients_of_the_whole(few: Any, critic: str | None, entropy: WithEntropy) -> None:
    model = double_norms(make_model(dtype=torch.float64))
    policy = with_critic(model, separate=critic == "separate") if critic else Policy(model)
    want, gradients = seen_and_gradients(policy, batch := batch_of(), entropy)
    few(model)
    seen, got = seen_and_gradients(policy, batch, entropy)
    for name in ("logprobs", "entropy", "values", "after"):
        one, other = getattr(want, name), getattr(seen, name)
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
    for one, other in zip(gradients, got, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)


def test_an_adapter_learns_the_same_and_its_reference_says_the_same(few: Any) -> None:
    config = LoraConfig(r=4, target_modules="all-linear")
    model = add_lora(make_model(), config, seed=0)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(generator=torch.Generator().manual_seed(1), std=0.1)
    policy, batch = Policy(model, reference=True), batch_of(torch.float32)
    _, gradients = seen_and_gradients(policy, batch, False)
    reference = policy.reference_logprobs(batch)
    few(model)
    _, got = seen_and_gradients(policy, batch, False)
    for one, other in zip(gradients, got, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(policy.reference_logprobs(batch), reference, rtol=1e-5, atol=1e-5)


def test_the_last_layer_never_sees_more_rows_than_a_piece(few: Any) -> None:
    model = make_model()
    policy, batch, rows = Policy(model), batch_of(torch.float32), list[int]()
    model.lm_head.register_forward_hook(lambda module, given, out: rows.append(out.shape[0] * out.shape[1]))
    few(model)
    seen_and_gradients(policy, batch, False)
    made = -(-len(batch.scored) // 4)
    assert len(rows) == 2 * made, "each piece once forward and once again on the way back"
    assert max(rows) == 4 * model.config.vocab_size, "logits at a time"
    rows.clear()
    policy.current_logprobs(batch)
    assert len(rows) == made, "without a gradient nothing is computed twice"


@pytest.mark.parametrize(("family", "plain"), [("llama", True), ("gemma2", False)])
def test_a_model_that_changes_its_logits_is_left_whole(family: str, plain: bool) -> None:
    """Gemma 2 caps them behind the last layer."""
    assert (pieces.head_of(make_model(family)) is not None) == plain
