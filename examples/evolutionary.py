"""Train a population of pipelines: the worst copies the best, with other hyperparameters.

python examples/evolutionary.py                        # every pipeline in this process
torchrun --nproc-per-node 2 examples/evolutionary.py   # each pipeline on two processes: the same losses
torchrun --nproc-per-node 4 examples/evolutionary.py   # two pipelines at once, on two each: the same

Population based training (Jaderberg et al. 2017): after each generation the worst half takes the weights of
the best half, and changes their learning rates at random. The first rates are far too small or too large for
most, so that a population without copies learns less.
"""

import argparse

import torch
import torch.nn.functional as F
from collaborative import gather, mesh_of_pipelines, own_part
from digits import load_images
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import pipec

RATES = (1e-5, 1e-4, 1e-1, 1.0)
TRAIN, VALIDATION, BATCH = 1200, 1500, 100


def make_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


class Member:
    """A pipeline with an optimizer, whose learning rate mutates."""

    def __init__(self, number: int, model: nn.Module, group: DeviceMesh | None) -> None:
        self.pipe = pipec.compile(model, devices=2, group=group, loss_fn=F.cross_entropy, microbatches=2)
        self.optimizer = torch.optim.SGD(self.pipe.parameters(), lr=RATES[number])
        self.draws = torch.Generator().manual_seed(number)

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def step(self, images: Tensor, labels: Tensor) -> float:
        loss = self.pipe.step(images, target=labels)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        return float((self.pipe(images).argmax(dim=1) == labels).float().mean())

    def become(self, weights: dict[str, Tensor], rate: float) -> None:
        self.pipe.load_state_dict(weights)
        self.optimizer.param_groups[0]["lr"] = rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generations", type=int, default=8)
    args = parser.parse_args()

    torch.manual_seed(0)
    images, labels = load_images()
    mutations = torch.Generator().manual_seed(0)
    models, mesh = [make_model() for _ in RATES], mesh_of_pipelines()
    group = None if mesh is None else mesh["pp"]
    own = {number: Member(number, models[number], group) for number in own_part(len(RATES), mesh)}

    for generation in range(args.generations):
        found = {}
        for number, member in own.items():
            for batch in torch.randperm(TRAIN, generator=member.draws).split(BATCH):
                loss = member.step(images[batch], labels[batch])
            score = member.accuracy(images[TRAIN:VALIDATION], labels[TRAIN:VALIDATION])
            test = member.accuracy(images[VALIDATION:], labels[VALIDATION:])
            found[number] = score, member.rate, loss, test, member.pipe.full_state_dict(all_ranks=True)
        population = gather(found, mesh)
        ranking = sorted(range(len(RATES)), key=lambda number: -population[number][0])
        score, rate, loss, test, _ = population[ranking[0]]
        pipec.log(f"generation {generation}  best accuracy {score:.1%} at rate {rate:.4f}, loss {loss:.6f}")
        half = len(RATES) // 2
        for winner, loser in zip(ranking[:half], ranking[half:], strict=True):
            exponent = float(torch.empty(1).uniform_(-2, 2, generator=mutations))
            if loser in own:
                _, rate, *_, weights = population[winner]
                own[loser].become(weights, rate * 2**exponent)

    pipec.log(f"test accuracy {test:.1%}")


if __name__ == "__main__":
    main()
