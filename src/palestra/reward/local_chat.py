# SPDX-License-Identifier: Apache-2.0
"""A chat model in this process: messages in, text out, for a judge that needs no server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pydantic import Field

from palestra.config import Config
from palestra.errors import PalestraError
from palestra.types import Message


class TooLongError(PalestraError):
    """What the model is to read and write does not fit into its context."""


class LocalChat(Config):
    """A local model by ``path``, as ``model.path`` names one; it needs a chat template. It answers greedily, one
    request after another, with at most ``max_tokens`` tokens."""

    path: str
    dtype: str = "float32"
    device: str = "auto"
    max_tokens: int = Field(default=1024, ge=1)

    def load(self) -> Callable[[Sequence[Message]], str]:
        """The model as a function of messages; ModelError where there is none, or none that chats. The function raises
        TooLongError for a prompt that leaves no room for ``max_tokens``."""
        import torch

        from palestra.chat import make_renderer
        from palestra.model.loading import load_model, quiet

        loaded = load_model(self.path, dtype=self.dtype, device=self.device)
        renderer = make_renderer("chat", loaded.tokenizer, extra_stop_token_ids=loaded.stop_token_ids)
        ends = renderer.get_stop_token_ids()
        one_at_a_time = threading.Lock()

        @torch.no_grad()
        def complete(messages: Sequence[Message]) -> str:
            prompt = renderer.render(messages, add_generation_prompt=True).token_ids
            if len(prompt) + self.max_tokens > loaded.max_context:
                raise TooLongError(
                    f"{len(prompt)} tokens to read and {self.max_tokens} to write do not fit into the "
                    f"{loaded.max_context} of {self.path}"
                )
            ids = torch.tensor([prompt], device=loaded.device)
            options = {"do_sample": False, "max_new_tokens": self.max_tokens, "eos_token_id": ends}
            with one_at_a_time, quiet():
                written = loaded.model.generate(  # type: ignore[operator]
                    input_ids=ids, attention_mask=torch.ones_like(ids), pad_token_id=ends[0], **options
                )
            return renderer.parse_response(written[0, len(prompt) :].tolist()).content

        return complete
