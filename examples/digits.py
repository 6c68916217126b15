"""The images the examples learn: scikit-learn's 1,797 handwritten digits, 8 by 8 pixels each."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor


def load_images() -> tuple[Tensor, Tensor]:
    """All digits in a random order: ``f32[n, 1, 8, 8]`` images from 0 to 1, ``int64[n]`` labels."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(digits.images).float()[order, None] / 16, torch.from_numpy(digits.target)[order]
