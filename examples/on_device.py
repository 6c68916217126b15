"""A small model adapts to a stream of images, within a limit on memory.

python examples/on_device.py                        # both stages in this process
torchrun --nproc-per-node 2 examples/on_device.py   # one stage per process: the same losses

The model has learned upright digits. Then the camera is turned by a quarter. Each batch of the stream comes
once: the model guesses it, then learns from it. ``memory_limit`` holds for each device: pipec recomputes what
does not fit, and raises an error before the first step if nothing helps.
"""

import argparse
import functools

import torch
import torch.nn.functional as F
from digits import load_images
from torch import nn

import pipec

BEFORE, BATCH, STEPS = 800, 16, 3
ADAMW = functools.partial(torch.optim.AdamW, lr=3e-3)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory-limit", default="0.3MB")
    args = parser.parse_args()

    torch.manual_seed(0)
    images, labels = load_images()
    options = {"loss_fn": F.cross_entropy, "microbatches": 4, "optimizer": ADAMW}
    pipe = pipec.compile(make_model(), devices=2, memory_limit=args.memory_limit, **options)
    for _ in range(4):
        for batch in torch.arange(BEFORE).split(2 * BATCH):
            pipe.step(images[batch], target=labels[batch])

    correct = []
    for number, batch in enumerate(torch.arange(BEFORE, len(labels) - BATCH).split(BATCH)):
        turned = torch.rot90(images[batch], dims=(2, 3))
        correct.append(float((pipe(turned).argmax(dim=1) == labels[batch]).float().mean()))
        for _ in range(STEPS):
            loss = pipe.step(turned, target=labels[batch])
        if number % 20 == 0:
            pipec.log(f"batch {number:2}  loss {loss:.6f}")

    pipec.log(pipe.plan)
    first, last = (sum(part) / len(part) for part in (correct[:3], correct[-8:]))
    pipec.log(f"accuracy {first:.1%} on the first batches of the stream, {last:.1%} on the last")


if __name__ == "__main__":
    main()
