"""Factories for the command line to be pointed at."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipec

NOT_A_FACTORY = 3


def mlp() -> pipec.Example:
    """``f32[8, 16]`` to ``f32[8, 4]``, squared error."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(16, 4))
    return pipec.Example(model, (torch.ones(8, 16),), target=torch.zeros(8, 4), loss_fn=F.mse_loss)


class Tagger(nn.Module):
    """Mean embedding of the tokens that a mask lets through, classified; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor, *, mask: Tensor, labels: Tensor) -> Tensor:
        mean = torch.where(mask[..., None], self.embedding(tokens), 0.0).mean(1)
        return F.cross_entropy(self.head(self.norm(mean)), labels)


def tagger() -> pipec.Example:
    tokens = torch.zeros(8, 5, dtype=torch.int64)
    return pipec.Example(Tagger(), (tokens,), {"mask": tokens == 0, "labels": tokens[:, 0]})


class Undecided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if h.std() > 0:
            return h.mean()
        return h.sum()


def undecided() -> pipec.Example:
    return pipec.Example(Undecided(), (torch.ones(8, 2),))


def number() -> int:
    return 3


def broken() -> pipec.Example:
    raise ZeroDivisionError("the factory's own fault")


def momentum(named: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
    """A factory of an optimizer."""
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)
