"""A data-parallel step whose time is that of its gradients on the link; run by ``benchmarks/link.sh``.

``two_hosts_script.py RATE`` has the link's bytes a second. Rank 0 prints the seconds of a step, simulated for
what is fastest and for a ring of all ranks, and measured for what is fastest.
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipec
from pipec.hardware.devices import LinkModel
from pipec.hardware.topology import Device, Level, Topology, equal_devices


def compiled(topology: Topology, x: Tensor, target: Tensor) -> pipec.Pipeline:
    """A replica on each rank."""
    torch.manual_seed(0)
    ranks = len(topology.devices)
    return pipec.compile(
        nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)),
        devices=ranks,
        stages=1,
        microbatches=ranks,
        loss_fn=nn.functional.mse_loss,
        topology=topology,
    ).prepare(x, target=target)


def measured(pipe: pipec.Pipeline, x: Tensor, target: Tensor) -> float:
    """Seconds of a step."""
    seconds = []
    for _ in range(7):
        pipe.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        pipe.step(x, target=target)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def main() -> None:
    rate, on_each = float(sys.argv[1]), int(os.environ["LOCAL_WORLD_SIZE"])
    torch.manual_seed(0)
    x, target = torch.randn(8, 1024), torch.randn(8, 1024)
    hosts = Topology((Device(),) * (2 * on_each), (Level(on_each, 4e9, 1e-5), Level(2, rate, 1e-4)))
    fastest, ring = (
        compiled(topology, x, target)
        for topology in (hosts, equal_devices(2 * on_each, LinkModel(rate, 1e-4)))
    )
    seconds = measured(fastest, x, target)
    found = fastest.ranks.exchange.hosts()
    if dist.get_rank() == 0:
        print(f"simulated {fastest.simulate().makespan} measured {seconds}")
        print(f"simulated {ring.simulate().makespan}")
        print(f"hosts {found}")


if __name__ == "__main__":
    main()
