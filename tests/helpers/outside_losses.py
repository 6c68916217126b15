"""Losses that a script computes of outputs, and a training with each of them beside plain PyTorch.

``outside_losses.py OUTPUTS SCHEDULE REPLICAS STEPS [LOSS ...]`` prints how far losses and weights are off.
"""

import copy
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipec
from pipec.pipeline.pipeline_module import OutputsOption

Model = Callable[[Tensor], Any]
Data = tuple[Tensor, Tensor, Tensor]
"""Two views of a batch of eight rows, and their classes."""

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class EarlyOutputs(nn.Module):
    """Returns values of all its stages, a view, a mean over rows, whole numbers and its argument."""

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
        found |= {"turned": self.last(h).t(), "activity": h.square().mean()}
        return found | {"class": early.argmax(-1), "x": x, "tuple": (h.detach(), h[:, 0])}


def mixed(found: dict[str, Any]) -> Tensor:
    """A loss that reaches all stages, and mixes rows."""
    early, scale = found["early"].pow(3), found["scale"].square().sum()
    both = (found["last"] * found["again"]).std(0).sum() + found["turned"].pow(3).sum()
    return both + early.logsumexp(0).sum() * scale


def contrastive(model: Model, data: Data) -> Tensor:
    """Rows of both views against all others, with a learned temperature."""
    x, other, _ = data
    first, second = model(x), model(other)
    one, two = F.normalize(first["last"], dim=1), F.normalize(second["last"], dim=1)
    return F.cross_entropy(one @ two.t() * first["scale"].mean().exp(), torch.arange(len(x)))


def one_output(model: Model, data: Data) -> Tensor:
    """The scale gets no gradient, and so no update."""
    x, other, _ = data
    return F.huber_loss(model(x)["last"][:, 0], other[:, 0]) + model(x)["last"].quantile(0.25).square()


def consistency(model: Model, data: Data) -> Tensor:
    """The symmetric divergence between views, and a term of the batch's mean activity."""
    x, other, y = data
    one, two = model(x), model(other)
    first, second = one["turned"].t().log_softmax(-1), two["last"].log_softmax(-1)
    both = (first.exp() - second.exp()) * (first - second)
    return F.nll_loss(first, y) + both.mean() + (one["activity"] * two["activity"]).sqrt()


LOSSES: Mapping[str, Callable[[Model, Data], Tensor]] = {
    each.__name__: each for each in (contrastive, one_output, consistency)
}
"""They differ in the outputs that get gradients, and in the number of forwards before a backward."""


def train(
    name: str, num_steps: int, num_ranks: int, outputs: OutputsOption = "differentiable", **options: Any
) -> float:
    """Train with a loss, beside plain PyTorch: the largest difference of losses, norms and weights.

    Each second step accumulates, and updates are clipped. All ranks call this.
    """
    plain = EarlyOutputs(nn.Tanh())
    pipe = pipec.compile(copy.deepcopy(plain), devices=num_ranks, microbatches=4, timeout=240.0, **options)
    loss_of, off = LOSSES[name], list[float]()
    both = [
        (each, torch.optim.AdamW(each.parameters(), lr=0.02)) for each in (pipe.as_module(outputs), plain)
    ]
    generator = torch.Generator().manual_seed(1)
    for step in range(num_steps):
        x, other = torch.randn(2, 8, 6, generator=generator, dtype=torch.float64)
        data = x, other, torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
        losses = [loss_of(model, data) for model, _ in both]
        for loss in losses:
            loss.backward(torch.tensor(0.5, dtype=torch.float64))
        off.append(abs(losses[0].item() - losses[1].item()))
        if step % 2:
            norms = pipe.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            off.append(abs(float(norms[0]) - float(norms[1])))
            for _, optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
    state, expected = pipe.full_state_dict(all_ranks=True), plain.state_dict()
    return max(*off, *(float((state[fqn] - value).abs().max()) for fqn, value in expected.items()))


if __name__ == "__main__":
    outputs, schedule, replicas, steps, *names = sys.argv[1:]
    ranks = int(os.environ.get("WORLD_SIZE", 2 * int(replicas)))
    for each in names or LOSSES:
        options = {"outputs": outputs, "schedule": schedule, "replicas": int(replicas)}
        print(each, train(each, int(steps), ranks, **options))
