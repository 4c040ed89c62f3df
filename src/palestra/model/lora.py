# SPDX-License-Identifier: Apache-2.0
"""Adapters (Hu et al. 2021, arXiv:2106.09685) through peft, and what training may touch.

The base stays as it was loaded: the reference policy is the base with its adapter switched off, and an export
merges into a copy, because merging in place and undoing it does not give the same bits back.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import nn

from palestra.config import Config
from palestra.errors import ModelError


class LoraConfig(Config):
    """How the adapter is shaped.

    r: rank. alpha: the update is scaled by alpha / r; left out = 2r. dropout: on the adapter's input.
    target_modules: ``attention`` (every projection inside the attention blocks), ``all-linear`` (also the MLP,
    never the output head), or a list of module names such as ``[q_proj, v_proj]``.

    >>> LoraConfig(r=8).scaling
    2.0
    """

    r: int = Field(default=16, ge=1)
    alpha: float | None = Field(default=None, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: Literal["attention", "all-linear"] | tuple[str, ...] = "attention"

    @property
    def scaling(self) -> float:
        """alpha / r, the factor in front of B·A."""
        return 2.0 if self.alpha is None else self.alpha / self.r


@dataclass(frozen=True, slots=True)
class TrainableReport:
    """How many numbers learn: ``trainable`` of ``total`` (tied weights counted once)."""

    trainable: int
    total: int

    def __str__(self) -> str:
        return f"{self.trainable:,} of {self.total:,} parameters trainable ({self.trainable / self.total:.2%})"


def add_lora(model: nn.Module, config: LoraConfig, *, seed: int = 0) -> nn.Module:
    """Freeze the model and put a fresh adapter on it: B = 0, so that nothing changes before the first update.

    Works in place and returns peft's wrapper. ``seed`` draws A; the global RNG is left alone.
    Raises ModelError when no module matches or the model already carries an adapter.
    """
    import peft

    if isinstance(model, peft.PeftModel):
        raise ModelError("the model already carries an adapter; train that one, or start from the base model")
    wanted = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.scaling * config.r,  # type: ignore[arg-type]  # peft only multiplies with it
        lora_dropout=config.dropout,
        target_modules=_targets(model, config),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), quiet_peft():
        torch.manual_seed(seed)
        try:
            return peft.get_peft_model(cast(Any, model), wanted)
        except ValueError as error:
            known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name, _ in _projections(model)}))
            raise ModelError(
                f"lora.target_modules: {config.target_modules} fits no module of {type(model).__name__}; "
                f"it has: {known}"
            ) from error


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Keep to itself what peft says about its own workings: nothing there is for the user to act on."""
    with warnings.catch_warnings():
        # GPT-2 stores its projections transposed; peft sets fan_in_fan_out itself and warns that it did.
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")
        # peft still reads an attribute that transformers has renamed.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield


def is_adapter(model: nn.Module) -> bool:
    """True when the model carries a peft adapter."""
    import peft

    return isinstance(model, peft.PeftModel)


def base_model(model: nn.Module) -> nn.Module:
    """The Hugging Face model itself: what is under the adapter, or the model when there is none."""
    import peft

    return model.get_base_model() if isinstance(model, peft.PeftModel) else model


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """What an optimizer gets. Raises ModelError when it would get nothing: metrics would move, weights never."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ModelError(
            f"{type(base_model(model)).__name__} has no trainable parameters; "
            "load the adapter as trainable, or choose full fine-tuning"
        )
    return parameters


def trainable_report(model: nn.Module) -> TrainableReport:
    """Count what learns; no trainable parameters is a ModelError.

    >>> print(trainable_report(nn.Linear(3, 2)))
    8 of 8 parameters trainable (100.00%)
    """
    trainable = sum(p.numel() for p in trainable_parameters(model))
    return TrainableReport(trainable, sum(p.numel() for p in model.parameters()))


class Reference:
    """The frozen policy that KL is measured against.

    With an adapter it is the base under it, and costs no memory; without one it is a copy of the weights as they
    are now. ``with reference.using(model) as frozen:`` gives a module for forward passes; inside the block the
    trained policy must not be used, for it may be the same module with its adapter switched off.
    """

    def __init__(self, model: nn.Module) -> None:
        self._copy = None if is_adapter(model) else copy.deepcopy(model).eval().requires_grad_(False)

    @contextmanager
    def using(self, model: nn.Module) -> Iterator[nn.Module]:
        """The reference for ``model``, in evaluation mode, without gradients; the model's own mode comes back."""
        with torch.no_grad():
            if self._copy is not None:
                yield self._copy
                return
            # peft makes every adapter weight trainable again when it switches the adapter back on.
            flags = [(p, p.requires_grad) for p in model.parameters()]
            modes = [(m, m.training) for m in model.modules()]
            try:
                with cast(Any, model).disable_adapter():
                    yield model.eval()
            finally:
                for parameter, flag in flags:
                    parameter.requires_grad_(flag)
                for module, training in modes:
                    module.training = training


def merged_copy(model: nn.Module) -> nn.Module:
    """A plain model with the adapter's update in its weights, for export. The given model is not touched."""
    import peft

    twin = copy.deepcopy(model)
    if not isinstance(twin, peft.PeftModel):
        return twin
    try:
        return cast(nn.Module, cast(Any, twin).merge_and_unload(safe_merge=True))
    except ValueError as error:
        raise ModelError(f"the adapter cannot be merged: {error}") from error


def _targets(model: nn.Module, config: LoraConfig) -> str | list[str]:
    if config.target_modules == "all-linear":
        return "all-linear"
    if config.target_modules != "attention":
        return list(config.target_modules)
    # Two name parts, because a last part alone is ambiguous: GPT-2 has attn.c_proj and mlp.c_proj.
    found = {".".join(name.split(".")[-2:]) for name, inside in _projections(model) if inside}
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no attention block that we recognise; "
            "set lora.target_modules to all-linear or to a list of module names"
        )
    return sorted(found)


def _projections(model: nn.Module) -> Iterator[tuple[str, bool]]:
    """Every linear map of the model: its name, and whether it sits inside an attention block."""
    from transformers.pytorch_utils import Conv1D

    blocks = tuple(name + "." for name, m in model.named_modules() if type(m).__name__.endswith("Attention"))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            yield name, name.startswith(blocks)


__all__ = [
    "LoraConfig",
    "Reference",
    "TrainableReport",
    "add_lora",
    "base_model",
    "is_adapter",
    "merged_copy",
    "quiet_peft",
    "trainable_parameters",
    "trainable_report",
]
