"""A data-parallel step whose time is that of its gradients on the link; run by ``benchmarks/link.sh``.

``two_hosts.py RATE`` has the link's bytes a second. Rank 0 prints the seconds of a step, simulated and
measured, for what is fastest and, with several ranks on a host, for a ring of all ranks.
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import pipec
from pipec.hardware.devices import LinkModel
from pipec.hardware.topology import Device, Level, Topology, alike


def seconds(topology: Topology) -> tuple[float, float]:
    """Of a step, simulated and measured."""
    torch.manual_seed(0)
    ranks = len(topology.devices)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
    pipe = pipec.compile(
        model,
        devices=ranks,
        stages=1,
        microbatches=ranks,
        loss_fn=nn.functional.mse_loss,
        topology=topology,
    )
    x, target = torch.randn(8, 1024), torch.randn(8, 1024)
    measured = []
    for _ in range(7):
        pipe.zero_grad()
        dist.barrier() if dist.is_initialized() else None
        start = time.perf_counter()
        pipe.step(x, target=target)
        measured.append(time.perf_counter() - start)
    return pipe.simulate().makespan, statistics.median(measured[2:])


def main() -> None:
    rate, on_each = float(sys.argv[1]), int(os.environ["LOCAL_WORLD_SIZE"])
    hosts = Topology((Device(),) * (2 * on_each), (Level(on_each, 4e9, 1e-5), Level(2, rate, 1e-4)))
    ring = alike(2 * on_each, LinkModel(rate, 1e-4))
    ways = [seconds(topology) for topology in ((hosts, ring) if on_each > 1 else (hosts,))]
    if dist.get_rank() == 0:
        print(*(f"simulated {simulated} measured {measured}" for simulated, measured in ways))


if __name__ == "__main__":
    main()
