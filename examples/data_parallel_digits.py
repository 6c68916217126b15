"""Train a small network on handwritten digits on two replicas: data parallelism.

python examples/data_parallel_digits.py                                               # both in this process
torchrun --nproc-per-node 2 --local-ranks-filter 0 examples/data_parallel_digits.py   # one per process

Every rank passes the whole mini-batch to ``step`` and works on its half. The losses equal those of
one device up to the order of summation.
"""

import argparse

import torch
import torch.nn.functional as F
from digits import load_images
from torch import nn

import pipec

NUM_TRAIN, BATCH = 1536, 128


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()

    torch.manual_seed(0)
    images, labels = load_images()
    generator = torch.Generator().manual_seed(0)

    model = pipec.compile(make_model(), devices=2, stages=1, loss_fn=F.cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for epoch in range(args.epochs):
        for batch in torch.randperm(NUM_TRAIN, generator=generator).split(BATCH):
            loss = model.step(images[batch], target=labels[batch])
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch:2}  loss {loss:.6f}")

    predicted = model(images[NUM_TRAIN:]).argmax(dim=-1)
    accuracy = (predicted == labels[NUM_TRAIN:]).float().mean()
    print(f"test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
