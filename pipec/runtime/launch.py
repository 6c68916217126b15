"""Which ranks this process runs, and on which devices.

A process that was started alone runs every rank. Processes that were started together, by ``torchrun`` or
with a process group, run one rank each.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipec.errors import InputError

Devices = int | Sequence[str | torch.device]
"""How many devices, or which: entry r is the device of rank r."""


@dataclass(frozen=True)
class World:
    """This process, the ``rank``-th of ``size`` that were started together."""

    rank: int
    size: int

    @property
    def distributed(self) -> bool:
        return self.size > 1


def world() -> World:
    """Ask the default process group if there is one, else the environment that ``torchrun`` sets."""
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return World(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def resolve_devices(devices: Devices, world: World) -> dict[int, torch.device]:
    """The device of each rank that runs in this process.

    A number of devices means GPUs where CUDA is available, and the CPU elsewhere. If one process runs all
    ranks and has fewer GPUs, the ranks share them round robin. If there are several processes, each takes the
    GPU ``LOCAL_RANK``. Give a list, such as ``["cpu"] * 4``, to choose otherwise.

    Raises:
        InputError: no device is asked for, or not one for each process, or this process has no GPU.
    """
    count = devices if isinstance(devices, int) else len(devices)
    if count < 1:
        raise InputError(f"devices is {devices!r}; expected at least one device")
    if world.distributed and count != world.size:
        raise InputError(
            f"devices asks for {count} ranks, but {world.size} processes were started and each runs one "
            f"rank; start {count} processes (torchrun --nproc-per-node {count}) or pass devices={world.size}"
        )
    if not isinstance(devices, int):
        chosen = {rank: torch.device(device) for rank, device in enumerate(devices)}
        return {world.rank: chosen[world.rank]} if world.distributed else chosen
    if not torch.cuda.is_available():
        return {rank: torch.device("cpu") for rank in _local_ranks(count, world)}
    if world.distributed:
        return {world.rank: torch.device("cuda", _own_gpu(world))}
    return {rank: torch.device("cuda", rank % torch.cuda.device_count()) for rank in range(count)}


def _local_ranks(count: int, world: World) -> Sequence[int]:
    return [world.rank] if world.distributed else range(count)


def _own_gpu(world: World) -> int:
    """The GPU of this process. NCCL needs each process to have a GPU of its own."""
    local_rank = int(os.environ.get("LOCAL_RANK", world.rank))
    if local_rank >= torch.cuda.device_count():
        raise InputError(
            f"process {local_rank} of this machine has no GPU of its own: there are "
            f"{torch.cuda.device_count()}; start fewer processes, or pass devices={['cpu'] * 2} "
            f"with {world.size} entries"
        )
    return local_rank
