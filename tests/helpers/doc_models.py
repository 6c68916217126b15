"""What blocks of docs/ take for granted: imports, a small model, batches, an optimizer's factory."""

import functools
from pathlib import Path  # noqa: F401

import torch
import torch.nn.functional as F
from torch import nn

import pipec  # noqa: F401

adam = functools.partial(torch.optim.AdamW, lr=1e-3)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


model = make_model()
loss_fn = F.cross_entropy
x, target = torch.randn(16, 32), torch.randint(10, (16,))
batches = loader = [(torch.randn(16, 32), torch.randint(10, (16,))) for _ in range(4)]
