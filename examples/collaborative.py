"""Three sites train one model on data that they keep, and average their weights now and then.

python examples/collaborative.py                        # every pipeline in this process
torchrun --nproc-per-node 2 examples/collaborative.py   # each pipeline on two processes: the same losses

Each site has a pipeline of its own, and images of some of the ten digits. It makes many steps alone; then an
outer optimizer takes the mean change of the weights for a gradient (Douillard et al. 2023, "DiLoCo:
Distributed Low-Communication Training of Language Models"). Weights travel once in a round, gradients never.
"""

import argparse
import functools

import torch
import torch.nn.functional as F
from digits import load_images
from torch import Tensor, nn

import pipec

SITES, STEPS, TRAIN, BATCH = 3, 8, 1440, 64
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def accuracy(pipe: pipec.Pipeline, images: Tensor, labels: Tensor) -> float:
    return float((pipe(images).argmax(dim=1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()

    images, labels = load_images()
    generator = torch.Generator().manual_seed(0)
    sites = [(labels[:TRAIN] % SITES != site).nonzero()[:, 0] for site in range(SITES)]

    torch.manual_seed(0)
    shared = make_model()
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    pipes = [
        pipec.compile(make_model(), devices=2, loss_fn=F.cross_entropy, microbatches=4, optimizer=ADAMW)
        for _ in range(SITES)
    ]

    for number in range(args.rounds):
        losses, changed = [], []
        for pipe, rows in zip(pipes, sites, strict=True):
            pipe.load_state_dict(shared.state_dict())
            for _ in range(STEPS):
                batch = rows[torch.randint(len(rows), (BATCH,), generator=generator)]
                loss = pipe.step(images[batch], target=labels[batch])
            losses.append(float(loss))
            changed.append(pipe.full_state_dict(all_ranks=True))
        for name, parameter in shared.named_parameters():
            mean = torch.stack([state[name] for state in changed]).mean(dim=0)
            parameter.grad = parameter.detach() - mean
        outer.step()
        pipec.log(f"round {number}  losses of the sites {' '.join(f'{loss:.6f}' for loss in losses)}")

    alone = accuracy(pipes[0], images[TRAIN:], labels[TRAIN:])
    pipes[0].load_state_dict(shared.state_dict())
    together = accuracy(pipes[0], images[TRAIN:], labels[TRAIN:])
    pipec.log(f"test accuracy {together:.1%} of the shared model, {alone:.1%} of a site after its own steps")


if __name__ == "__main__":
    main()
