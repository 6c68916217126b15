"""Data parallelism on two ranks. The second fails as each argument says; both print what they saw."""

import functools
import os
import sys

import torch
from torch import nn

import pipec

TIMEOUT = 240.0


def main(how: str) -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.ReLU())))
    x, target = torch.randn(24, 16), torch.randn(24, 16)
    learning_rate = 2.0 if how == "optimizer" and rank else 1.0
    try:
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
        if rank:
            x, target = fail(how, pipe, x, target)
        pipe.step(x, target=target)
    except pipec.PipecError as error:
        print(f"{type(error).__name__}: {error}")


def fail(
    how: str, pipe: pipec.Pipeline, x: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what goes wrong on the second rank; returns its next batch."""
    if how == "learning rate":
        pipe.optimizer.param_groups[0]["lr"] = 3.0
    elif how == "rows":
        return x[:12], target[:12]
    elif how == "collective":
        break_reductions()
    return x, target


def break_reductions() -> None:
    """Let the next reduction of this rank fail, with the message of the others on their way."""
    from pipec.runtime.stages.gradients import GradientAccumulator

    def take(self: GradientAccumulator, index: int) -> None:
        raise ValueError("broken")

    GradientAccumulator.pop = take  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    for how in sys.argv[1:]:
        main(how)
