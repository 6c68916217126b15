"""A model that returns values of all its stages, and a loss of them."""

from typing import Any

import torch
from torch import Tensor, nn


class EarlyOutputs(nn.Module):
    """Returns values of all stages, whole numbers and its argument."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), last
        self.rest = nn.Sequential(*(x for _ in range(4) for x in (nn.Linear(8, 8), nn.Tanh())))
        self.scale = nn.Parameter(torch.ones(8))
        self.double()

    def forward(self, x: Tensor) -> dict[str, Any]:
        early = self.last(self.first(x))
        h = self.rest(early)
        found = {"early": early, "again": early, "scale": self.scale.view(2, 4), "last": h}
        return found | {"class": early.argmax(-1), "x": x, "tuple": (h.detach(), h[:, 0])}


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def mixed(found: dict[str, Any]) -> Tensor:
    """A loss that reaches all stages, and mixes rows."""
    early, scale = found["early"].pow(3), found["scale"].square().sum()
    return (found["last"] * found["again"]).std(0).sum() + early.logsumexp(0).sum() * scale
