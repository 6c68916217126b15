"""Train a small network on handwritten digits in plain PyTorch: what data_parallel_digits.py starts from.

python examples/digits_plain.py
"""

import argparse

import torch
import torch.nn.functional as F
from digits import load_images
from torch import nn

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

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for epoch in range(args.epochs):
        for batch in torch.randperm(NUM_TRAIN, generator=generator).split(BATCH):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch:2}  loss {loss:.6f}")

    predicted = model(images[NUM_TRAIN:]).argmax(dim=-1)
    accuracy = (predicted == labels[NUM_TRAIN:]).float().mean()
    print(f"test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
