"""Train a GAN, two models that take turns, on handwritten digits: one pipeline, with two replicas.

python examples/gan_digits.py                        # both replicas in this process
torchrun --nproc-per-node 2 examples/gan_digits.py   # one per process: the same losses

The generator's gradients come through the discriminator. A pipeline gives gradients with respect to
parameters and not to its inputs, so the two cannot be two pipelines: one module holds both and returns the
loss of whoever's turn it is, while the other one is frozen.
"""

import argparse

import torch
import torch.nn.functional as F
from digits import load_images
from torch import Tensor, nn

import pipec

BATCH, NOISE = 128, 32


class GAN(nn.Module):
    """The losses of Goodfellow et al. (2014), the generator's being the one that does not saturate."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 64),
            nn.Sigmoid(),
        )
        self.discriminator = nn.Sequential(
            nn.Linear(64, width),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Linear(width, 1),
        )

    def forward(self, images: Tensor, noise: Tensor, turn: str) -> Tensor:
        made = self.generator(noise)
        if turn == "generator":
            return F.softplus(-self.discriminator(made)).mean()
        return F.softplus(-self.discriminator(images)).mean() + F.softplus(self.discriminator(made)).mean()

    def let(self, turn: str) -> None:
        """Train one of the two models and freeze the other."""
        self.generator.requires_grad_(turn == "generator")
        self.discriminator.requires_grad_(turn == "discriminator")


def distance(points: Tensor, others: Tensor) -> Tensor:
    """The mean distance from each point to the nearest of the others."""
    return torch.cdist(points, others).amin(dim=1).mean()


def drawing(images: Tensor) -> str:
    """``f32[n, 64]`` images side by side, a line of text for each row of pixels."""
    lines = images.unflatten(1, (8, 8)).transpose(0, 1).flatten(1)
    return "\n".join("".join(2 * " .:+#"[round(4 * pixel)] for pixel in line) for line in lines.tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=60)
    args = parser.parse_args()

    torch.manual_seed(0)
    images = load_images()[0].flatten(1)
    generator = torch.Generator().manual_seed(0)

    model = GAN()
    pipe = pipec.compile(model, devices=2, stages=1, batched={"noise": 0})
    optimizers = {
        "discriminator": torch.optim.Adam(model.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
        "generator": torch.optim.Adam(model.generator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
    }

    for epoch in range(args.epochs):
        losses = {}
        for batch in torch.randperm(len(images), generator=generator).split(BATCH):
            noise = torch.randn(len(batch), NOISE, generator=generator)
            for turn, optimizer in optimizers.items():
                model.let(turn)
                losses[turn] = pipe.step(images[batch], noise, turn)
                optimizer.step()
                optimizer.zero_grad()
        if epoch % 10 == 0 or epoch == args.epochs - 1:
            of_both = ", ".join(f"of the {turn} {loss:.6f}" for turn, loss in losses.items())
            pipec.log(f"epoch {epoch:3}  loss {of_both}")

    with torch.no_grad():
        made = model.generator(torch.randn(len(images) // 2, NOISE, generator=generator))
    pipec.log(drawing(made[:8]))
    real, others = images.chunk(2)
    pipec.log(
        f"distance to the nearest of {len(others)} digits: {distance(made, others):.4f}, "
        f"and {distance(real, others):.4f} from other digits"
    )


if __name__ == "__main__":
    main()
