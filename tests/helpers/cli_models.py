"""Factories for the command line to be pointed at."""

import torch
import torch.nn.functional as F
from torch import nn

import pipec

NOT_A_FACTORY = 3


def mlp() -> pipec.Example:
    """``f32[8, 16]`` to ``f32[8, 4]``, squared error."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(16, 4))
    return pipec.Example(model, (torch.ones(8, 16),), target=torch.zeros(8, 4), loss_fn=F.mse_loss)


def tagger() -> pipec.Example:
    """Classifies sentences of five of ten words."""
    model = nn.Sequential(nn.Embedding(10, 8), nn.Flatten(), nn.BatchNorm1d(40), nn.Linear(40, 3))
    words = torch.zeros(8, 5, dtype=torch.int64)
    return pipec.Example(model, kwargs={"input": words}, target=words[:, 0], loss_fn=F.cross_entropy)


def number() -> int:
    return 3


def broken() -> float:
    return 1 / 0


def momentum(named: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
    """A factory of an optimizer."""
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)
