"""A training on two hosts, of which the second loses its link; run by ``benchmarks/link.sh``.

Rank 0 prints with which error it ended.
"""

import functools
import os
import subprocess

import torch
from torch import nn

import pipec

TIMEOUT = 60.0


def main() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    pipe = pipec.compile(
        model, microbatches=2, loss_fn=nn.functional.mse_loss, optimizer=sgd, timeout=TIMEOUT
    )
    x, target = torch.ones(4, 16), torch.ones(4, 16)
    pipe.step(x, target=target)
    if os.environ["RANK"] == "1":
        subprocess.run(["ip", "link", "set", "link1", "down"], check=True)
    try:
        while True:
            pipe.step(x, target=target)
    except pipec.TransportError as error:
        if os.environ["RANK"] == "0":
            print(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
