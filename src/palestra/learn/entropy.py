# SPDX-License-Identifier: Apache-2.0
"""The entropy of whole distributions with a gradient, for the entropy bonus.

The log-probs of the sampled tokens are not enough: their mean estimates the entropy's value, but its derivative is zero
on average.
"""

from __future__ import annotations

import torch
from torch import Tensor


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """−Σ p·log p of softmax(logits / T) in nats: (U, V) → (U,), in float32 at least. What cannot happen adds nothing.

    >>> entropy(torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]).log())
    tensor([1.0397, 0.0000])
    """
    scaled = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    logp = scaled.log_softmax(-1)
    probs = logp.exp()
    return (probs * -logp.masked_fill(probs == 0, 0.0)).sum(-1)
