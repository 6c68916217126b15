"""A training that goes on by itself: after a failure or a preemption, and on more or fewer devices.

python examples/restartable_digits.py
torchrun --nproc-per-node 4 --max-restarts 3 examples/restartable_digits.py --directory run

Kill any of its processes, or the whole of it, and start it again with as many processes as there are then: it
goes on from the last checkpoint. SIGTERM saves first. See docs/reliability.md, and examples/cluster for
Slurm, Kubernetes and Ray.
"""

import argparse
import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from digits import load_images
from torch import Tensor, nn

import pipec

NUM_TRAIN, BATCH = 1536, 128


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 128),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(128, 128),
        nn.GELU(),
        nn.Linear(128, 10),
    )


def rows_of_step(step: int) -> Tensor:
    """The rows of a mini-batch by its number alone, so that a run that goes on has those that come next."""
    epoch, part = divmod(step, NUM_TRAIN // BATCH)
    generator = torch.Generator().manual_seed(epoch)
    return torch.randperm(NUM_TRAIN, generator=generator)[part * BATCH : (part + 1) * BATCH]


def train(directory: Path, steps: int, every: int) -> None:
    """Make the steps that are left; ``every`` so many there is a checkpoint in ``directory``."""
    torch.manual_seed(0)
    images, labels = load_images()
    pipe = pipec.compile(  # no number of devices: as many ranks as were started
        make_model(),
        loss_fn=F.cross_entropy,
        replicas="auto",
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-3),
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(pipe.optimizer, steps)
    checkpoints = pipec.CheckpointManager(directory, every=every, keep=2)
    checkpoints.resume(pipe, scheduler=scheduler)
    if pipe.num_steps >= steps:
        pipec.log(
            f"the run in {directory} has made its {pipe.num_steps} steps: pass another --directory for "
            "a new one, or more --steps"
        )

    while pipe.num_steps < steps:
        rows = rows_of_step(pipe.num_steps)
        loss = pipe.step(images[rows], target=labels[rows])
        scheduler.step()
        checkpoints.step(pipe, scheduler=scheduler)
        if pipe.num_steps % every == 0:
            pipec.log(f"step {pipe.num_steps:4}  loss {loss:.4f}")

    predicted = pipe(images[NUM_TRAIN:]).argmax(dim=-1)
    pipec.log(f"test accuracy {(predicted == labels[NUM_TRAIN:]).float().mean():.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--every", type=int, default=12, help="steps between two checkpoints")
    parser.add_argument("--directory", type=Path, default=Path("build/restartable"))
    args = parser.parse_args()
    train(args.directory, args.steps, args.every)


if __name__ == "__main__":
    main()
