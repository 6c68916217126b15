"""Train a new head on a frozen backbone: one that has seen the digits 0 to 4 learns to tell all ten apart.

python examples/finetune_digits.py                        # both stages in this process
torchrun --nproc-per-node 2 examples/finetune_digits.py   # one stage per process: the same losses

What is frozen has no gradients and keeps nothing for a backward. The plan knows: the first stage is most of
the backbone and runs forward alone. The optimizer is a part of the programs, so that ``step`` updates the
head; the scheduler goes by ``pipe.optimizer``.
"""

import argparse
import functools

import torch
import torch.nn.functional as F
from digits import load_images
from torch import Tensor, nn

import pipec

NUM_TRAIN, BATCH = 1536, 128


def make_backbone() -> nn.Sequential:
    """``f32[n, 1, 8, 8]`` images in, ``f32[n, 1024]`` features out."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.GELU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.GELU(),
        nn.Conv2d(64, 64, 3, stride=2, padding=1),
        nn.BatchNorm2d(64),
        nn.GELU(),
        nn.Flatten(),
    )


def pretrained(images: Tensor, labels: Tensor) -> nn.Sequential:
    """A backbone that tells these digits apart. It stands for one that you would download."""
    model = nn.Sequential(make_backbone(), nn.Linear(1024, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        for batch in torch.randperm(len(images)).split(BATCH):
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(0)
    images, labels = load_images()
    generator = torch.Generator().manual_seed(0)

    first = labels[:NUM_TRAIN] < 5
    backbone = pretrained(images[:NUM_TRAIN][first], labels[:NUM_TRAIN][first])
    backbone.requires_grad_(False).eval()  # BatchNorm goes by the statistics that it has
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}

    model = nn.Sequential(backbone, nn.Linear(1024, 10))
    optimizer = functools.partial(torch.optim.AdamW, lr=3e-3)
    pipe = pipec.compile(model, devices=2, loss_fn=F.cross_entropy, microbatches=4, optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(pipe.optimizer, args.epochs)

    for epoch in range(args.epochs):
        for batch in torch.randperm(NUM_TRAIN, generator=generator).split(BATCH):
            loss = pipe.step(images[batch], target=labels[batch])
        scheduler.step()
        pipec.log(f"epoch {epoch:2}  loss {loss:.6f}")

    pipec.log(pipe.plan)
    predicted = pipe(images[NUM_TRAIN:]).argmax(dim=-1)
    correct, new = predicted == labels[NUM_TRAIN:], labels[NUM_TRAIN:] >= 5
    after = pipe.full_state_dict(all_ranks=True)
    same = all(torch.equal(after[f"0.{name}"], tensor) for name, tensor in before.items())
    pipec.log(
        f"test accuracy {correct[~new].float().mean():.1%} on 0 to 4, {correct[new].float().mean():.1%} "
        f"on 5 to 9, which the backbone has not seen; it is {'unchanged' if same else 'changed'}"
    )


if __name__ == "__main__":
    main()
