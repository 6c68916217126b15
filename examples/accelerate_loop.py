"""Train a small network on handwritten digits with Accelerate, on two stages.

python examples/accelerate_loop.py
torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import argparse

import torch
from digits import load_images
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pipec.integrations.accelerate import PipecAccelerator

NUM_TRAIN, BATCH = 1536, 128


class Digits(nn.Module):
    """Ten classes of images. With labels it returns the loss, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(512, 10),
        )

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(images)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    torch.manual_seed(0)
    images, labels = load_images()
    train = DataLoader(TensorDataset(images[:NUM_TRAIN], labels[:NUM_TRAIN]), BATCH, shuffle=True)
    test = DataLoader(TensorDataset(images[NUM_TRAIN:], labels[NUM_TRAIN:]), BATCH)

    accelerator = PipecAccelerator(cpu=True, devices=2, microbatches=4, gradient_accumulation_steps=2)
    model = Digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6 * args.epochs)
    model, optimizer, train, test, schedule = accelerator.prepare(model, optimizer, train, test, schedule)

    for epoch in range(args.epochs):
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(*batch)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch:2}  loss {loss:.6f}")

    model.eval()
    right = total = 0
    for batch in test:
        with torch.no_grad():
            logits = model(*batch)["logits"]
        predicted, expected = accelerator.gather_for_metrics((logits.argmax(dim=-1), batch[1]))
        right, total = right + (predicted == expected).sum().item(), total + len(expected)
    accelerator.print(f"test accuracy {right / total:.1%}")


if __name__ == "__main__":
    main()
