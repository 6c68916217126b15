"""Train a small network on handwritten digits with Lightning, on two stages.

python examples/lightning_module.py
torchrun --nproc-per-node 2 examples/lightning_module.py
"""

import argparse
import logging

import lightning.pytorch as lightning
import torch
from digits import load_images
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pipec.integrations.lightning import PipecStrategy

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


class Trained(lightning.LightningModule):
    """How the digits are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Digits()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(*batch)["loss"]
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.print(f"epoch {self.current_epoch:2}  loss {self.trainer.callback_metrics['loss']:.6f}")

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        right = self.model(*batch)["logits"].argmax(dim=-1) == batch[1]
        self.log("accuracy", right.float().mean(), batch_size=len(right))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    images, labels = load_images()
    train = DataLoader(TensorDataset(images[:NUM_TRAIN], labels[:NUM_TRAIN]), BATCH, shuffle=True)
    test = DataLoader(TensorDataset(images[NUM_TRAIN:], labels[NUM_TRAIN:]), BATCH)

    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        accelerator="cpu",
        devices=1,
        strategy=PipecStrategy(devices=2, microbatches=4),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Trained()
    trainer.fit(module, train, test)
    module.print(f"test accuracy {trainer.callback_metrics['accuracy']:.1%}")


if __name__ == "__main__":
    main()
