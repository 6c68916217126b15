"""Train a population of pipelines: the worst copies the best, with other hyperparameters.

python examples/evolutionary.py                        # every pipeline in this process
torchrun --nproc-per-node 2 examples/evolutionary.py   # each pipeline on two processes: the same losses

Population based training (Jaderberg et al. 2017): after each generation the worst half takes the weights of
the best half, and changes their learning rates at random. The first rates are far too small or too large for
most, so that a population without copies learns less.
"""

import argparse

import torch
import torch.nn.functional as F
from digits import load_images
from torch import nn

import pipec

RATES = (1e-5, 1e-4, 1e-1, 1.0)
TRAIN, VALIDATION, BATCH = 1200, 1500, 100


def make_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


class Member:
    """A pipeline with an optimizer, whose learning rate mutates."""

    def __init__(self, rate: float) -> None:
        self.pipe = pipec.compile(make_model(), devices=2, loss_fn=F.cross_entropy, microbatches=2)
        self.optimizer = torch.optim.SGD(self.pipe.parameters(), lr=rate)
        self.score = 0.0

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        loss = self.pipe.step(images, target=labels)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def accuracy(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        return float((self.pipe(images).argmax(dim=1) == labels).float().mean())

    def copy_of(self, other: "Member", factor: float) -> None:
        """Take the weights of another member, and its rate times ``factor``."""
        self.pipe.load_state_dict(other.pipe.full_state_dict(all_ranks=True))
        self.optimizer.param_groups[0]["lr"] = other.rate * factor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generations", type=int, default=8)
    args = parser.parse_args()

    torch.manual_seed(0)
    images, labels = load_images()
    generator = torch.Generator().manual_seed(0)
    population = [Member(rate) for rate in RATES]

    for generation in range(args.generations):
        for member in population:
            for batch in torch.randperm(TRAIN, generator=generator).split(BATCH):
                loss = member.step(images[batch], labels[batch])
            member.score = member.accuracy(images[TRAIN:VALIDATION], labels[TRAIN:VALIDATION])
        population.sort(key=lambda member: -member.score)
        best = population[0]
        pipec.log(f"generation {generation}  best accuracy {best.score:.1%} at rate {best.rate:.4f}")
        half = len(population) // 2
        for winner, loser in zip(population[:half], population[half:], strict=True):
            exponent = float(torch.empty(1).uniform_(-2, 2, generator=generator))
            loser.copy_of(winner, 2**exponent)

    pipec.log(f"last loss {loss:.6f}")
    pipec.log(f"test accuracy {best.accuracy(images[VALIDATION:], labels[VALIDATION:]):.1%}")


if __name__ == "__main__":
    main()
