"""NEFTune's noise on embeddings (https://huggingface.co/papers/2310.05914).

The hook of transformers makes a tensor of the size of the noise, and reads it. This one computes with
numbers, so that each row is proved to have its own noise.
"""

from typing import Any

import torch
from torch import Tensor, nn


def add_noise(alpha: float, embedding: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A forward hook: adds numbers up to ``alpha / sqrt(tokens * width)`` to (rows, tokens, width)."""
    if not embedding.training:
        return output
    size: float = alpha / (output.size(1) * output.size(2)) ** 0.5
    return output + (torch.rand_like(output) * 2 - 1) * size
