"""Learn digits from a hundred labels and 1,340 images without labels, on two pipeline stages.

python examples/semi_supervised.py                        # both stages in this process
torchrun --nproc-per-node 2 examples/semi_supervised.py   # one stage per process: the same losses

After a few epochs the model labels the other images, and learns those labels of which it is sure, for noisy
images (Sohn et al. 2020, "FixMatch"). A label of -100 does not count: the mean is over the labels that count
in the whole mini-batch, however many of them are in each microbatch.
"""

import argparse

import torch
import torch.nn.functional as F
from digits import load_images
from torch import Tensor, nn

import pipec

LABELLED, TRAIN, BATCH = 100, 1440, 140
SURE, WARMUP, NOISE = 0.95, 5, 0.3


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def pseudo_labels(logits: Tensor) -> Tensor:
    """The most likely class where the model is sure, else -100."""
    chances, labels = F.softmax(logits, dim=1).max(dim=1)
    return labels.where(chances > SURE, -100)


def train(images: Tensor, labels: Tensor, epochs: int, uses_unlabelled: bool) -> float:
    """The accuracy on images that were not trained on."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    pipe = pipec.compile(make_model(), devices=2, loss_fn=F.cross_entropy, microbatches=4)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)
    for epoch in range(epochs):
        for batch in (LABELLED + torch.randperm(TRAIN - LABELLED, generator=generator)).split(BATCH):
            inputs, target = images[:LABELLED], labels[:LABELLED]
            if uses_unlabelled and epoch >= WARMUP:
                inputs = torch.cat([inputs, images[batch]])
                target = torch.cat([target, pseudo_labels(pipe(images[batch]))])
            noise = NOISE * torch.randn(inputs.shape, generator=generator)
            loss = pipe.step(inputs + noise, target=target)
            optimizer.step()
            optimizer.zero_grad()
        if epoch % 10 == 9:
            pipec.log(f"epoch {epoch:2}  loss {loss:.6f}")
    return float((pipe(images[TRAIN:]).argmax(dim=1) == labels[TRAIN:]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args()

    images, labels = load_images()
    few = train(images, labels, args.epochs, uses_unlabelled=False)
    every = train(images, labels, args.epochs, uses_unlabelled=True)
    pipec.log(f"test accuracy {few:.1%} with {LABELLED} labels, {every:.1%} with unlabelled images, too")


if __name__ == "__main__":
    main()
