"""Losses of two towers of features that no microbatch can compute by itself; ``batch_cases`` has others."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Towers(nn.Module):
    """Two towers, and what ``combine`` makes of their features, a scale and a buffer."""

    center: Tensor

    def __init__(self, combine: Callable[..., Any]) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.b = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("center", torch.zeros(4))
        self.combine = combine

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.combine(self.a(x), self.b(y), self.scale, self.center)


def info_nce(u: Tensor, v: Tensor, scale: Tensor, *_: Tensor) -> Tensor:
    logits = F.normalize(u, dim=-1) @ F.normalize(v, dim=-1).T * scale.exp()
    labels = torch.arange(len(u))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def vicreg(u: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    loss = 25 * F.mse_loss(u, v)
    for z in (u - u.mean(0), v - v.mean(0)):
        covariance = z.T @ z / (len(z) - 1)
        apart = covariance.pow(2).sum() - covariance.diagonal().pow(2).sum()
        loss = loss + 25 * F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() + apart / z.shape[1]
    return loss


def centered(u: Tensor, v: Tensor, scale: Tensor, center: Tensor) -> Tensor:
    """DINO's: the teacher's features are centred by a running mean, which follows those of the batch."""
    with torch.no_grad():
        target = F.softmax((v - center) / 0.04, dim=-1)
        center.mul_(0.9).add_(v.mean(0), alpha=0.1)
    return -(target * F.log_softmax(u / 0.1, dim=-1)).sum(-1).mean()


def of_both_kinds(u: Tensor, v: Tensor, scale: Tensor, *_: Tensor) -> Tensor:
    """Cross entropy of rows that count, weighted by a parameter that the contrastive term reads, too."""
    labels = torch.where(v[:, 0] > 0.3, -100, (v[:, 1] > 0).long())
    return F.cross_entropy(u, labels) * scale + info_nce(u, v, scale)


def shared_scale(u: Tensor, v: Tensor, scale: Tensor, *_: Tensor) -> Tensor:
    """A parameter that is read row by row and of all rows."""
    return info_nce(torch.tanh(u * scale), v, scale)


def columns(u: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    """Rows are not the first dimension of what the loss reads."""
    u, v = u.movedim(0, -1), v.movedim(0, -1)
    return F.cross_entropy(u.T @ v, torch.arange(u.shape[1]))


LOSSES: Mapping[str, Callable[..., Tensor]] = {
    each.__name__: each for each in (info_nce, vicreg, centered, of_both_kinds, shared_scale, columns)
}
