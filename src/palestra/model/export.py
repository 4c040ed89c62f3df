# SPDX-License-Identifier: Apache-2.0
"""A model to hand out: its adapter merged into the weights, in safetensors, with its tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

from palestra.errors import RunError
from palestra.model.loading import load_model, quiet
from palestra.model.lora import is_adapter, merged_copy
from palestra.run.files import writing


def export_merged(ref: str, out: str | Path, *, dtype: str = "float32") -> dict[str, Any]:
    """Write the model that ``ref`` names (as :func:`~palestra.model.loading.load_model` takes it) to the directory
    ``out``: ``config.json``, ``model.safetensors`` (several files above transformers' shard size), the tokenizer.

    An adapter is added into a copy of its base, W + (α/r)·B·A (arXiv:2106.09685), so the result needs no peft. The
    directory is whole or absent. Returns ``path``, ``parameters``, ``bytes`` and whether something was ``merged``.
    Raises ModelError for what cannot be loaded or merged, RunError when ``out`` exists or cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     made = export_merged("builtin:calculator", Path(parent) / "merged")
    ...     load_model(made["path"], device="cpu").max_context, made["parameters"], made["merged"]
    (256, 339360, False)
    """
    out = Path(out)
    if out.exists():
        raise RunError(f"{out} exists already; choose another place for the exported model")
    loaded = load_model(ref, dtype=dtype, device="cpu")
    model = merged_copy(loaded.model)
    aside = out.with_name(f".{out.name}.part")
    with writing(out):
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        with quiet():
            cast(Any, model).save_pretrained(aside)
        loaded.tokenizer.save_pretrained(aside)
        aside.rename(out)
    return {
        "path": str(out),
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": sum(file.stat().st_size for file in out.glob("*.safetensors")),
        "merged": is_adapter(loaded.model),
    }


__all__ = ["export_merged"]
