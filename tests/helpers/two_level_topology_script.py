"""Started on four ranks by a test: data parallelism on what the topology says are two hosts of two devices.

Each rank prints, by the level of sharding, its losses, the bytes of its buckets, the bytes that its program
sends to each rank, and all that it really sends in one step.
"""

import functools
import json
from collections import Counter
from typing import Any

import torch
from torch import nn, optim

import pipec
from pipec.hardware.topology import Device, Level, Topology, equal_devices
from pipec.ir import Op
from pipec.ir.text_format import value_bytes
from pipec.runtime.messages import shared_memory
from pipec.runtime.messages.cpu import CpuConnections

SGD = functools.partial(optim.SGD, lr=0.1, momentum=0.9)
STEPS, ROWS, RANKS = 3, 8, 4
LEVELS = (None, "optimizer", "gradients", "parameters")
ODD = (31, 5)
"""Widths with which parameters do not divide into four equal parts."""

HOSTS = Topology((Device(),) * RANKS, (Level(2, 1e10), Level(2, 1e8)))
FLAT = equal_devices(RANKS, HOSTS.slowest_link)


def model(widths: tuple[int, int]) -> nn.Module:
    torch.manual_seed(0)
    inner, outer = widths
    return nn.Sequential(
        nn.Linear(inner, 64, bias=False), nn.Tanh(), nn.Linear(64, outer, bias=False)
    ).double()


def batch(number: int, widths: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(ROWS, width, generator=generator).double() for width in widths]


def facts(
    shard: str | None, topology: Topology, widths: tuple[int, int] = (32, 8), stages: int = 1
) -> dict[str, Any]:
    pipe = pipec.compile(
        model(widths),
        RANKS,
        stages=stages,
        replicas=RANKS // stages,
        microbatches=RANKS,
        loss_fn=nn.functional.mse_loss,
        optimizer=SGD,
        shard=shard,
        topology=topology,
    )
    losses = []
    for number in range(STEPS):
        x, target = batch(number, widths)
        SENT.clear()
        losses.append(float(pipe.step(x, target=target)))
    rank = pipe.ranks.world.rank
    own = [bucket for bucket in pipe.plan.sync_spec.buckets if rank in pipe.plan.placement[bucket.stage]]
    sends: Counter[int] = Counter()
    for each in pipe.programs[rank].instructions:
        if each.op is Op.SEND:
            assert each.link is not None
            sends[each.peer] += sum(value_bytes(value, {"b": ROWS // RANKS}) for value in each.link.values)
    return {
        "losses": losses,
        "bytes": sum(value_bytes(value, {}) for bucket in own for value in bucket.parameters),
        "sends": sends,
        "sent": dict(SENT),
    }


SENT: Counter[int] = Counter()

start_send = CpuConnections.start_send


def counting(connections: CpuConnections, tensor: torch.Tensor, peer: int, tag: int) -> Any:
    SENT[peer] += tensor.numel() * tensor.itemsize
    return start_send(connections, tensor, peer, tag)


if __name__ == "__main__":
    CpuConnections.start_send = counting  # type: ignore[method-assign]
    shared_memory._host = lambda: ""  # as on hosts, which share no memory
    found = {f"{shard} on hosts": facts(shard, HOSTS) for shard in LEVELS}
    found |= {f"{shard} flat": facts(shard, FLAT) for shard in LEVELS}
    found |= {"odd on hosts": facts(None, HOSTS, ODD), "two stages": facts("optimizer", FLAT, stages=2)}
    print(json.dumps(found))
