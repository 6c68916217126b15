"""What is assumed of GPUs of which no topology tells: the memory that plans may use, and the links.

Plans print it, so that it can be corrected by a topology.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from pipec.errors import InputError
from pipec.hardware.devices import NCCL_CHANNEL_BYTES_PER_SECOND, DeviceModel
from pipec.hardware.topology import Device, Level, Topology
from pipec.ir.text_format import format_bytes

_RESERVED_BYTES = 2 * 2**30
"""The context of CUDA with its kernels, half a gigabyte, and channels of NCCL."""

_CUBLAS_BYTES = 33 * 2**20
"""The workspaces of cuBLAS that torch keeps for each thread that multiplies, which is one for each rank:
measured on an H200 under torch 2.11."""

_RESERVED_FRACTION = 0.05
"""Gaps between blocks of the allocator, and blocks of sent values that wait for their stream."""


@dataclass(frozen=True)
class GpuMemory:
    """The bytes of a GPU that ``num_ranks`` share."""

    total: int
    num_ranks: int

    @property
    def reserve(self) -> int:
        """The bytes that plans leave free on the GPU; at most half of them."""
        fixed = _RESERVED_BYTES + self.num_ranks * _CUBLAS_BYTES
        return min(fixed + math.ceil(_RESERVED_FRACTION * self.total), self.total // 2)

    @property
    def plannable(self) -> int:
        """The bytes that a plan may use for a rank."""
        return (self.total - self.reserve) // self.num_ranks

    def __str__(self) -> str:
        shared = f" that {self.num_ranks} ranks share" if self.num_ranks > 1 else ""
        return (
            f"{format_bytes(self.plannable)} of memory for a rank: of the {format_bytes(self.total)} of a GPU"
            f"{shared}, {format_bytes(self.reserve)} are left to CUDA's context, NCCL, cuBLAS and gaps "
            "between blocks"
        )


def gpu_memory(devices: Iterable[torch.device]) -> GpuMemory | None:
    """The memory of the smallest share of a GPU among the devices of ranks. None without GPUs."""
    counts = Counter(device for device in devices if device.type == "cuda")
    found = [
        GpuMemory(torch.cuda.get_device_properties(device).total_memory, num_ranks)
        for device, num_ranks in counts.items()
    ]
    return min(found, key=lambda each: each.plannable, default=None)


def with_gpu_memory(topology: Topology, memory: GpuMemory, limit: float | None) -> Topology:
    """The topology, where devices of which it does not say what they hold have what is plannable.

    With a ``limit``, which the caller applies to all of them, this only checks it.

    Raises:
        InputError: the limit is more than is plannable.
    """
    if all(device.memory_bytes < math.inf for device in topology.devices):
        return topology
    if limit is None:
        assumptions = (*topology.assumptions, str(memory))
        return replace(topology.with_memory_limit(memory.plannable), assumptions=assumptions)
    if limit > memory.plannable:
        raise InputError(
            f"memory_limit is {limit:.0f}, but a plan has {memory}; pass at most "
            f"memory_limit={memory.plannable}, leave it out, or pass a topology that says what devices hold"
        )
    return topology


def gpu_topology(hosts: Sequence[int], model: DeviceModel, num_channels: int | None) -> Topology:
    """The links among GPUs, one for each rank, where rank r is on host ``hosts[r]``.

    Messages go through ``num_channels`` of NCCL, or between GPUs of one process if it is None.
    """
    rate = math.inf if num_channels is None else num_channels * NCCL_CHANNEL_BYTES_PER_SECOND
    sizes = [len(list(group)) for _, group in groupby(hosts)]
    near, far = model.link, model.network_link
    if len({*hosts}) == 1:
        levels: tuple[Level, ...] = (Level(len(hosts), near.bytes_per_second, near.latency_seconds, rate),)
        assumption = f"any two devices are joined by {_rate(levels[0])}"
    elif len({*sizes}) == 1 and len(sizes) == len({*hosts}):
        levels = (
            Level(sizes[0], near.bytes_per_second, near.latency_seconds, rate),
            Level(len(sizes), far.bytes_per_second, far.latency_seconds, rate),
        )
        assumption = (
            f"{len(sizes)} hosts of {sizes[0]} devices, joined by {_rate(levels[0])} within a host and by "
            f"{_rate(levels[1])} between hosts"
        )
    else:
        levels = (Level(len(hosts), far.bytes_per_second, far.latency_seconds, rate),)
        assumption = (
            f"hosts have {', '.join(map(str, sizes))} consecutive devices, not equally many: any two devices "
            f"are joined by {_rate(levels[0])}, as hosts are"
        )
    return Topology((Device(),) * len(hosts), levels, (f"{assumption}, as {model.name} is built",))


def _rate(level: Level) -> str:
    """The rate of a level's links, and of messages if that is less."""
    link, message = level.bytes_per_second, level.message_link.bytes_per_second
    ahead = f"{format_bytes(link)}/s"
    return ahead if message == link else f"{ahead} ({format_bytes(message)}/s for a message)"
