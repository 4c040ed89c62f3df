# SPDX-License-Identifier: Apache-2.0
"""The model being trained, and the frozen one it is compared with."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from palestra.errors import ModelError
from palestra.learn.batch import Batch
from palestra.learn.entropy import entropy as entropy_of
from palestra.model import attention
from palestra.model.lora import Reference, trainable_parameters

WithEntropy = Literal[False, "value", "gradient"]


class Policy:
    """A causal LM with what training asks of it: log-probs of the trained tokens, now and under the reference.

    model: a Hugging Face causal LM or a PEFT model on one; it is switched to our attention function in place.
    reference: keep a frozen reference. With an adapter that is the base under the disabled adapter (no second
    model); without, a copy; or the model to compare with (:func:`frozen_copy` makes one). compute_dtype: bfloat16
    runs the forward pass under autocast, parameters stay as they are. gradient_checkpointing trades a second forward
    pass for memory.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        reference: bool | nn.Module = False,
        compute_dtype: torch.dtype | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        attention.use(model)
        self.model = model
        self.compute_dtype = compute_dtype
        self.device = next(model.parameters()).device
        self._reference = Reference(model) if reference is True else reference or None
        if isinstance(self._reference, nn.Module):
            attention.use(self._reference)
        trainable_parameters(model)
        if gradient_checkpointing:
            # This also lets gradients through frozen embeddings, on which an adapter's would end otherwise.
            attention.hf_model(model).activation_checkpointing_enable({"use_reentrant": False})
        self._checkpointing = gradient_checkpointing

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that train."""
        return trainable_parameters(self.model)

    def train_mode(self, *, dropout: bool) -> None:
        """Ready the model for a backward pass. Without dropout (RL: the ratio to the sampler must start at 1)
        only gradient checkpointing needs the training flag, and then every dropout rate is held at 0."""
        self.model.train(dropout or self._checkpointing)
        if not dropout:
            for module in self.model.modules():
                if isinstance(module, nn.Dropout):
                    module.eval()

    def logprobs(
        self,
        batch: Batch,
        *,
        temperature: float = 1.0,
        dropout: bool = False,
        entropy: WithEntropy = False,
    ) -> tuple[Tensor, Tensor | None]:
        """log-softmax(logits / T) of the batch's targets, (M,) in float32 at least; with ``entropy`` also the
        full distribution's entropy at each of them in nats, as a plain value or with its gradient."""
        return self._run(self.model, batch, temperature, dropout, entropy)

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch, *, temperature: float = 1.0) -> Tensor:
        """The frozen reference's log-probs of the same targets, (M,)."""
        if self._reference is None:
            raise ModelError("this policy was made without a reference")
        kept = self._reference
        with nullcontext(kept) if isinstance(kept, nn.Module) else kept.using(self.model) as frozen:
            return self._run(frozen, batch, temperature, dropout=False, entropy=False)[0]

    @torch.no_grad()
    def current_logprobs(self, batch: Batch, *, temperature: float = 1.0) -> Tensor:
        """The policy's own log-probs without gradients, (M,)."""
        with _evaluating(self.model):
            return self._run(self.model, batch, temperature, dropout=False, entropy=False)[0]

    def _run(
        self, model: nn.Module, batch: Batch, temperature: float, dropout: bool, entropy: WithEntropy
    ) -> tuple[Tensor, Tensor | None]:
        cast = torch.autocast(self.device.type, self.compute_dtype) if self.compute_dtype is not None else nullcontext()
        batch.dropout = dropout
        with cast:
            out = model(
                input_ids=batch.tokens,
                position_ids=batch.positions,
                use_cache=False,
                logits_to_keep=batch.scored,
                plan=batch,
            )
        logits = out.logits[0]
        scaled = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
        scaled -= scaled.detach().amax(-1, keepdim=True)  # before anything is rounded at the size of the logits
        log_z = scaled.logsumexp(-1)
        at = batch.score_at  # tokens that share a context share its logits
        picked = scaled[at, batch.targets] - log_z[at]
        if not entropy:
            return picked, None
        if entropy == "gradient":
            return picked, entropy_of(logits, temperature)[at]
        with torch.no_grad():
            probs = (scaled - log_z[:, None]).exp()
            # A banned token's logit is -inf, and 0 · -inf would be NaN; its share of the entropy is 0.
            spread = log_z - (probs * scaled).masked_fill_(probs == 0, 0.0).sum(-1)
        return picked, spread[at]


def frozen_copy(model: nn.Module) -> nn.Module:
    """The model as it is now, in evaluation mode; parameters that do not train are shared, the others copied."""
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    return copy.deepcopy(model, memo=dict(shared)).eval().requires_grad_(requires_grad=False)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode for a while, then each as it was."""
    was = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in was.items():
            module.training = training
