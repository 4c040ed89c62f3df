# SPDX-License-Identifier: Apache-2.0
"""A reward model: a causal LM's backbone, adapter included, with one number per reply in place of a next token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from palestra.config import FORMAT
from palestra.errors import ModelError
from palestra.model import attention
from palestra.model.attention import AttentionPlan
from palestra.model.loading import LoadedModel, load_model, one_line, quiet
from palestra.model.lora import is_adapter, quiet_peft
from palestra.run.files import read_json

WEIGHTS = "reward_head.safetensors"
ABOUT = "reward_head.json"


class RewardModel(nn.Module):
    """r = w·h, h the backbone's last hidden state at a reply's last token; no bias, for pairs could not teach one.

    model: a Hugging Face causal LM or a PEFT model on one; its output head stays and does not train. renderer: how
    messages become tokens for this model, kept beside the head. seed: draws w ~ N(0, 1/(d+1)); the global RNG is left
    alone. compute_dtype, gradient_checkpointing: as in ``learn/policy.py``; the head computes in float32 at least.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        renderer: Mapping[str, Any],
        seed: int = 0,
        compute_dtype: torch.dtype | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        attention.use(model)
        self.model, self.renderer, self.compute_dtype = model, dict(renderer), compute_dtype
        base = attention.hf_model(model)
        weight = next(model.parameters())
        size = int(base.config.get_text_config().hidden_size)
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        drawn = torch.randn(1, size, generator=torch.Generator().manual_seed(seed), dtype=wide) / (size + 1) ** 0.5
        self.head = nn.Linear(size, 1, bias=False, dtype=wide, device="meta")  # a real device would draw weights
        self.head.weight = nn.Parameter(drawn.to(weight.device))
        output, embeddings = base.get_output_embeddings(), base.get_input_embeddings()
        if output is not None and output.weight is not embeddings.weight:
            output.requires_grad_(False)
        if gradient_checkpointing:
            base.activation_checkpointing_enable({"use_reentrant": False})

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def forward(self, tokens: Tensor, positions: Tensor, rows: Tensor, plan: AttentionPlan) -> Tensor:
        """tokens, positions (1, N) of a flat batch; rows (S,): the last token of each reply → rewards (S,)."""
        dtype = self.compute_dtype
        with nullcontext() if dtype is None else torch.autocast(self.device.type, dtype):
            backbone = attention.hf_model(self.model).base_model
            out = backbone(input_ids=tokens, position_ids=positions, use_cache=False, plan=plan)
        hidden = out.last_hidden_state[0, rows]
        return cast(Tensor, self.head(hidden.to(self.head.weight.dtype))[:, 0])

    def save_pretrained(self, folder: Path | str) -> None:
        """The backbone as a Hugging Face (or peft adapter) directory, the head beside it."""
        folder = Path(folder)
        # Left to itself, peft asks the Hub whether the base's vocabulary has grown; ours never does.
        options = {"save_embedding_layers": False} if is_adapter(self.model) else {}
        with quiet(), quiet_peft():
            cast(Any, self.model).save_pretrained(folder, **options)
        save_file({"weight": self.head.weight.detach().cpu().contiguous()}, folder / WEIGHTS)
        about = {"format": FORMAT, "renderer": self.renderer}
        (folder / ABOUT).write_text(json.dumps(about), encoding="utf-8")

    def load_head(self, folder: Path | str) -> None:
        """Take the head's weights from a directory that :meth:`save_pretrained` wrote; ModelError where they do not
        fit."""
        try:
            weight = load_file(Path(folder) / WEIGHTS)["weight"]
            self.head.weight.data.copy_(weight)
        except (OSError, KeyError, RuntimeError, SafetensorError) as error:
            raise ModelError(f"{folder}: the reward head cannot be loaded: {one_line(error)}") from error


def load_reward_model(
    path: Path | str, *, dtype: str = "float32", device: str = "auto"
) -> tuple[RewardModel, LoadedModel]:
    """A trained reward model, in evaluation mode, and the causal LM (with its tokenizer) that it is made of.

    path: a checkpoint of ``palestra reward-model``. Raises ModelError, one line that says what to do.
    """
    folder = Path(path).expanduser()
    if not (folder / WEIGHTS).is_file():
        found = sorted(folder.glob(f"checkpoints/*/{WEIGHTS}"))
        hint = f"; did you mean {found[-1].parent}?" if found else ", which `palestra reward-model` writes"
        raise ModelError(f"reward model {str(path)!r} is no directory with a {WEIGHTS}{hint}")
    about = read_json(folder / ABOUT, "train the reward model again", error=ModelError)
    if about.get("format") != FORMAT:
        raise ModelError(f"{folder / ABOUT} has format {about.get('format')!r}; this version reads format {FORMAT}")
    loaded = load_model(str(folder), dtype=dtype, device=device)
    model = RewardModel(loaded.model, renderer=about["renderer"])
    model.load_head(folder)
    model.eval().requires_grad_(False)
    return model, loaded


__all__ = ["RewardModel", "load_reward_model"]
