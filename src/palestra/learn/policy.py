# SPDX-License-Identifier: Apache-2.0
"""The model being trained, and the frozen one it is compared with."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from palestra.errors import ModelError
from palestra.learn.batch import Batch
from palestra.learn.distill import reverse_kl
from palestra.learn.pieces import head_of, log_probs_in_pieces, too_many
from palestra.learn.scores import WithEntropy, log_probs
from palestra.model import attention
from palestra.model.fused import fuse, recomputed
from palestra.model.lora import Reference, trainable_parameters
from palestra.model.value_head import Critic, backbone_of, hidden_states, run_backbone


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """What one forward pass says about a batch. logprobs (M,) of the targets; where they were asked for, entropy (M,)
    and kl (M,), those of whole distributions; with a critic values (M,), V of the state before each target, and after
    (S,), V of the state behind each sample."""

    logprobs: Tensor
    entropy: Tensor | None = None
    kl: Tensor | None = None
    values: Tensor | None = None
    after: Tensor | None = None


class Policy:
    """A causal LM with what training asks of it: log-probs of the trained tokens, now and under the reference.

    model: a Hugging Face causal LM or a PEFT model on one; it is switched to our attention function in place.
    reference: keep a frozen reference. With an adapter that is the base under the disabled adapter (no second
    model); without, a copy; or the model to compare with (:func:`frozen_copy` makes one). compute_dtype: bfloat16
    runs the forward pass under autocast, parameters stay as they are. gradient_checkpointing trades a second forward
    pass for memory. critic: gives values from the same forward pass, or from its own backbone, and trains with the
    policy.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        reference: bool | nn.Module = False,
        compute_dtype: torch.dtype | None = None,
        gradient_checkpointing: bool = False,
        critic: Critic | None = None,
    ) -> None:
        attention.use(model)
        fuse(model)
        self.model = model
        self.critic = critic
        self.compute_dtype = compute_dtype
        self.device = next(model.parameters()).device
        self._reference = Reference(model) if reference is True else reference or None
        if isinstance(self._reference, nn.Module):
            attention.use(self._reference)
            fuse(self._reference)
        trainable_parameters(model)
        if gradient_checkpointing:
            # This also lets gradients through frozen embeddings, on which an adapter's would end otherwise.
            attention.hf_model(model).activation_checkpointing_enable({"use_reentrant": False})
            if critic is not None and critic.backbone is not None:
                critic.backbone.activation_checkpointing_enable({"use_reentrant": False})
        self._checkpointing = gradient_checkpointing

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that train, the critic's last."""
        return trainable_parameters(self.model) + self.critic_parameters()

    def critic_parameters(self) -> list[nn.Parameter]:
        """Those of them that are the critic's own."""
        return [] if self.critic is None else list(self.critic.trainable().values())

    def train_mode(self, *, dropout: bool) -> None:
        """Ready the model for a backward pass. Without dropout (RL: the ratio to the sampler must start at 1)
        only gradient checkpointing needs the training flag, and then every dropout rate is held at 0."""
        for part in self._parts():
            part.train(dropout or self._checkpointing)
            for module in () if dropout else part.modules():
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
        return self._scored(self.model, batch, temperature, entropy, dropout=dropout)[:2]

    def outputs(
        self, batch: Batch, *, temperature: float = 1.0, entropy: WithEntropy = False, kl: bool = False
    ) -> Outputs:
        """As :meth:`logprobs`, with the critic's values of the same states and, with ``kl``, KL(π‖π_ref) of the full
        distributions at each target with its gradient."""
        if kl:
            logits, hidden = self._forward(self.model, batch, dropout=False, critic=self.critic)
            logprobs, spread = log_probs(logits, batch.score_at, batch.targets, temperature, entropy)
            out = Outputs(logprobs, spread, self._exact_kl(logits, batch, temperature))
        else:
            logprobs, spread, hidden = self._scored(self.model, batch, temperature, entropy, critic=self.critic)
            out = Outputs(logprobs, spread)
        if self.critic is None or hidden is None:
            return out
        values, after = _values(self.critic, hidden, batch)
        return replace(out, values=values, after=after)

    def _exact_kl(self, logits: Tensor, batch: Batch, temperature: float) -> Tensor:
        with torch.no_grad(), self._frozen() as frozen:
            ref_logits = self._forward(frozen, batch, dropout=False)[0]
        return reverse_kl(logits, ref_logits, temperature)[batch.score_at]

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch, *, temperature: float = 1.0) -> Tensor:
        """The frozen reference's log-probs of the same targets, (M,)."""
        with self._frozen() as frozen:
            return self._scored(frozen, batch, temperature, entropy=False)[0]

    @torch.no_grad()
    def current_logprobs(self, batch: Batch, *, temperature: float = 1.0) -> Tensor:
        """The policy's own log-probs without gradients, (M,)."""
        with _evaluating(self.model):
            return self.logprobs(batch, temperature=temperature)[0]

    @torch.no_grad()
    def current_outputs(self, batch: Batch, *, temperature: float = 1.0) -> Outputs:
        """The policy's own log-probs and the critic's values, without gradients."""
        with self._all_evaluating():
            return self.outputs(batch, temperature=temperature)

    @torch.no_grad()
    def current_values(self, batch: Batch) -> Outputs:
        """As :meth:`current_outputs`, from a forward pass without logits: the log-probs are empty."""
        if self.critic is None:
            raise ModelError("this policy was made without a critic")
        backbone = backbone_of(self.model) if self.critic.backbone is None else self.critic.backbone
        batch.dropout = False
        with self._all_evaluating():
            with self._autocast():
                hidden = run_backbone(backbone, batch.tokens, batch.positions, batch)[0]
            values, after = _values(self.critic, hidden, batch)
        return Outputs(values.new_zeros(0), values=values, after=after)

    @contextmanager
    def _all_evaluating(self) -> Iterator[None]:
        with ExitStack() as modes:
            for part in self._parts():
                modes.enter_context(_evaluating(part))
            yield

    def _autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self.compute_dtype is None else torch.autocast(self.device.type, self.compute_dtype)

    def _parts(self) -> list[nn.Module]:
        return [self.model] if self.critic is None else [self.model, self.critic]

    def _frozen(self) -> AbstractContextManager[nn.Module]:
        """The reference, for a while."""
        kept = self._reference
        if kept is None:
            raise ModelError("this policy was made without a reference")
        return nullcontext(kept) if isinstance(kept, nn.Module) else kept.using(self.model)

    def _scored(
        self,
        model: nn.Module,
        batch: Batch,
        temperature: float,
        entropy: WithEntropy,
        *,
        dropout: bool = False,
        critic: Critic | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probs of the targets and, where asked for, the entropy, (M,) each: tokens that share a context share its
        logits. With a critic also the hidden states that it reads, (N, d)."""
        head = head_of(model)
        if head is None or not too_many(model, len(batch.scored)):
            logits, hidden = self._forward(model, batch, dropout, critic)
            return (*log_probs(logits, batch.score_at, batch.targets, temperature, entropy), hidden)
        batch.dropout = dropout
        with self._autocast():
            with recomputed():
                seen = run_backbone(backbone_of(model), batch.tokens, batch.positions, batch)[0]
            found = log_probs_in_pieces(head, seen[batch.scored], batch.score_at, batch.targets, temperature, entropy)
            return (*found, self._read_by(critic, batch, seen))

    def _read_by(self, critic: Critic | None, batch: Batch, seen: Tensor) -> Tensor | None:
        """The hidden states (N, d) that the critic reads: the model's, unless it has a backbone of its own."""
        if critic is None:
            return None
        if critic.backbone is None:
            return seen
        return run_backbone(critic.backbone, batch.tokens, batch.positions, batch)[0]

    def _forward(
        self, model: nn.Module, batch: Batch, dropout: bool, critic: Critic | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(U, V): the logits at ``batch.scored``; with a critic also the hidden states that it reads, (N, d)."""
        batch.dropout = dropout
        watch: AbstractContextManager[list[Tensor]] = nullcontext([])
        if critic is not None and critic.backbone is None:
            watch = hidden_states(model)
        with self._autocast(), watch as seen, recomputed():
            out = model(
                input_ids=batch.tokens,
                position_ids=batch.positions,
                use_cache=False,
                logits_to_keep=batch.scored,
                plan=batch,
            )
            if critic is not None and critic.backbone is not None:
                seen = [run_backbone(critic.backbone, batch.tokens, batch.positions, batch)]
        logits: Tensor = out.logits.squeeze(0)  # as [0] it would be copied into zeros on the way back
        return logits, seen[0][0] if seen else None


def _values(critic: Critic, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """(N, hidden size) → V before each target, (M,), and behind each sample, (S,)."""
    return critic(hidden[batch.scored])[batch.score_at], critic(hidden[batch.last])


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
