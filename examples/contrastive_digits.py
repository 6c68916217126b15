"""An encoder learns, without labels, to tell digits apart: a contrastive loss over the whole mini-batch.

python examples/contrastive_digits.py                                               # both in this process
torchrun --nproc-per-node 2 --local-ranks-filter 0 examples/contrastive_digits.py   # one per process

Each image is compared with another view of every image of the mini-batch (Chen et al. 2020, "A Simple
Framework for Contrastive Learning of Visual Representations"). Two replicas encode half of the images each;
``pipec.ops.all_gather`` gives both of them the views of all. Without pipec it is the identity, and
the loss is the same.
"""

import argparse

import torch
import torch.nn.functional as F
from digits import load_images
from torch import Tensor, nn

import pipec

NUM_TRAIN, BATCH, TEMPERATURE = 1536, 256, 0.2


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.SyncBatchNorm(32),
            nn.GELU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(1024, 32),
        )

    def forward(self, images: Tensor, views: Tensor) -> Tensor:
        queries, keys = (F.normalize(self.encoder(x), dim=1) for x in (images, views))
        logits = queries @ pipec.ops.all_gather(keys).T / TEMPERATURE
        positive = (queries * keys).sum(1) / TEMPERATURE
        return (logits.logsumexp(1) - positive).mean()


def view(images: Tensor, generator: torch.Generator) -> Tensor:
    """The images, moved by up to a pixel each way, and noisy."""
    down, right = torch.randint(-1, 2, (2,), generator=generator).tolist()
    noise = 0.1 * torch.randn(images.shape, generator=generator)
    return images.roll((down, right), dims=(2, 3)) + noise


def nearest(features: Tensor, known: Tensor, labels: Tensor) -> Tensor:
    """For each of ``features``, the label of the most similar of those that are ``known``."""
    similarity = F.normalize(features, dim=1) @ F.normalize(known, dim=1).T
    return labels[similarity.argmax(1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()

    torch.manual_seed(0)
    images, labels = load_images()
    generator = torch.Generator().manual_seed(0)

    model = Contrastive()
    pipe = pipec.compile(model, devices=2, stages=1)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)

    for epoch in range(args.epochs):
        for batch in torch.randperm(NUM_TRAIN, generator=generator).split(BATCH):
            views = (view(images[batch], generator) for _ in range(2))
            loss = pipe.step(*views)
            optimizer.step()
            optimizer.zero_grad()
        pipec.log(f"epoch {epoch:2}  loss {loss:.6f}")

    pipe.eval()
    with torch.no_grad():
        features = model.encoder(images)  # with one stage, every rank has all parameters
    found = nearest(features[NUM_TRAIN:], features[:NUM_TRAIN], labels[:NUM_TRAIN])
    accuracy = (found == labels[NUM_TRAIN:]).float().mean()
    pipec.log(f"accuracy of the nearest neighbour {accuracy:.1%}")


if __name__ == "__main__":
    main()
