"""Train Hugging Face's ResNet, with its BatchNorms and skips, on scikit-learn's handwritten digits.

python examples/resnet_digits.py                        # every stage in this process
torchrun --nproc-per-node 4 examples/resnet_digits.py   # one stage per process: the same losses
"""

import argparse

import torch
import torch.nn.functional as F
from digits import load_images
from transformers import ResNetConfig, ResNetForImageClassification

import pipec

NUM_TRAIN, BATCH = 1536, 128


def make_model() -> ResNetForImageClassification:
    """For images of 32 by 32 pixels."""
    config = ResNetConfig(
        num_channels=1,
        embedding_size=16,
        hidden_sizes=[16, 32, 64],
        depths=[2, 2, 2],
        layer_type="basic",
        num_labels=10,
    )
    return ResNetForImageClassification(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    torch.manual_seed(0)
    images, labels = load_images()
    images = F.interpolate(images, size=(32, 32))
    generator = torch.Generator().manual_seed(0)

    pipe = pipec.compile(make_model(), devices=4, schedule="1f1b", microbatches=4)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)

    for epoch in range(args.epochs):
        for batch in torch.randperm(NUM_TRAIN, generator=generator).split(BATCH):
            loss = pipe.step(pixel_values=images[batch], labels=labels[batch])
            optimizer.step()
            optimizer.zero_grad()
        pipec.log(f"epoch {epoch:2}  loss {loss:.6f}")

    pipe.eval()
    predicted = pipe(pixel_values=images[NUM_TRAIN:]).logits.argmax(dim=-1)
    accuracy = (predicted == labels[NUM_TRAIN:]).float().mean()
    pipec.log(f"test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
