"""A data-parallel step whose time is that of its gradients on the link; run by ``benchmarks/link.sh``.

Rank 0 prints the seconds of a step, simulated and measured.
"""

import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import pipec
from pipec.hardware.devices import LinkModel
from pipec.hardware.topology import alike


def main() -> None:
    bytes_per_second = float(sys.argv[1])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
    pipe = pipec.compile(
        model,
        devices=2,
        stages=1,
        microbatches=2,
        loss_fn=nn.functional.mse_loss,
        topology=alike(2, LinkModel(bytes_per_second, 1e-4)),
    )
    x, target = torch.randn(8, 1024), torch.randn(8, 1024)
    seconds = []
    for _ in range(7):
        pipe.zero_grad()
        dist.barrier() if dist.is_initialized() else None
        start = time.perf_counter()
        pipe.step(x, target=target)
        seconds.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(f"simulated {pipe.simulate().makespan} measured {statistics.median(seconds[2:])}")


if __name__ == "__main__":
    main()
