"""Data parallelism on two ranks. The second fails as each argument says; both print what they saw."""

import functools
import os
import sys

import torch
from torch import nn

import pipec
from pipec.runtime.stages.gradients import GradientAccumulator

TIMEOUT = 240.0


def broken(self: GradientAccumulator, index: int) -> None:
    raise ValueError("broken")


def main(how: str, rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.ReLU())))
    x, target = torch.randn(24, 16), torch.randn(24, 16)
    learning_rate = 2.0 if how == "optimizer" and rank else 1.0
    pipe = pipec.compile(
        model,
        devices=2,
        stages=1,
        microbatches=4 if how != "plan" or rank else 2,
        loss_fn=nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=learning_rate),
        timeout=TIMEOUT,
    )
    pipe.step(x, target=target)
    if rank and how == "learning rate":
        pipe.optimizer.param_groups[0]["lr"] = 3.0
    if rank and how == "rows":
        x, target = x[:12], target[:12]
    if rank and how == "collective":  # while messages of the other rank are on their way
        GradientAccumulator.pop = broken  # type: ignore[method-assign, assignment]
    pipe.step(x, target=target)


if __name__ == "__main__":
    for how in sys.argv[1:]:
        try:
            main(how, int(os.environ["RANK"]))
        except pipec.PipecError as error:
            print(f"{type(error).__name__}: {error}")
