"""The ranks that this process runs, and their devices.

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
"""The number of devices, or a list whose entry r is the device of rank r."""


@dataclass(frozen=True)
class World:
    """The number of this process, and how many processes were started together."""

    rank: int
    size: int

    @property
    def is_distributed(self) -> bool:
        return self.size > 1


SINGLE_PROCESS = World(0, 1)


def world() -> World:
    """This process in the default process group, else in the environment that ``torchrun`` sets."""
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return World(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def default_num_ranks(world: World) -> int:
    """The number of processes; for a single process, the number of its GPUs, at least 1."""
    return world.size if world.is_distributed else max(1, torch.cuda.device_count())


def resolve_devices(devices: Devices, world: World) -> dict[int, torch.device]:
    """The device of each rank that runs in this process.

    A number of devices means GPUs where CUDA is available, and the CPU elsewhere. If one process runs all
    ranks and has fewer GPUs, the ranks share them round robin. If there are several processes, each takes the
    GPU ``LOCAL_RANK`` (of Slurm, ``SLURM_LOCALID``), or the only one that it sees. A list, such as
    ``["cpu"] * 4``, sets each device; in it, ``"cuda"`` without an index is the GPU that the rank would have
    with a number of devices.

    Raises:
        InputError: the count differs from the number of processes, a device is meta, or this process has no
            GPU.
    """
    count = devices if isinstance(devices, int) else len(devices)
    if world.is_distributed and count != world.size:
        raise InputError(
            f"devices asks for {count} ranks, but {world.size} processes were started and each runs one "
            f"rank; start {count} processes (torchrun --nproc-per-node {count}), pass devices={world.size}, "
            "or leave devices out, for one rank per process"
        )
    if isinstance(devices, int):
        devices = ["cuda" if torch.cuda.is_available() else "cpu"] * count
    chosen = [torch.device(device) for device in devices]
    for rank, device in enumerate(chosen):
        if device.type == "meta":
            raise InputError(
                f"entry {rank} of devices is 'meta', which computes nothing; pass 'cpu' or a GPU. A model "
                "on meta gets its memory on the devices by pipe.to_empty(device=...)"
            )
    local_ranks = [world.rank] if world.is_distributed else range(count)
    return {rank: _indexed(chosen[rank], rank, world) for rank in local_ranks}


def _indexed(device: torch.device, rank: int, world: World) -> torch.device:
    """The device; ``cuda`` without an index gets the index of the rank's GPU."""
    return torch.device("cuda", _gpu(rank, world)) if str(device) == "cuda" else device


def _gpu(rank: int, world: World) -> int:
    """The GPU index of a rank of this process. NCCL needs one GPU for each process."""
    num_gpus = torch.cuda.device_count()
    local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or rank)
    if world.is_distributed and num_gpus == 1:
        return 0  # ranks that have found the same one are refused when they meet
    if world.is_distributed and local_rank >= num_gpus:
        raise InputError(
            f"process {local_rank} of this machine has no GPU of its own: there are "
            f"{num_gpus}; start fewer processes, or pass devices={['cpu'] * 2} "
            f"with {world.size} entries"
        )
    if num_gpus == 0:
        raise InputError(
            f"rank {rank} asks for a GPU, but torch finds none on this machine; run it on a machine "
            f"with a GPU, or set entry {rank} of devices to 'cpu'"
        )
    return local_rank if world.is_distributed else rank % num_gpus
