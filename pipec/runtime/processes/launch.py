"""The processes of a pipeline, the ranks that this one runs, and their devices.

A process that was started alone runs every rank. Processes that were started together, by ``torchrun`` or
with a process group, run one rank each. A pipeline has all of them, or those of a group.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipec.errors import InputError
from pipec.ir.argument_checks import short_repr

Devices = int | Sequence[str | torch.device]
"""The number of devices, or a list whose entry r is the device of rank r."""


@dataclass(frozen=True)
class World:
    """The number of this process among those of a pipeline, and how many these are.

    In a group that is not all processes in order, rank k is the process ``global_ranks[k]``. ``replicas`` is
    how many the axes of a mesh ask for: the ranks of a stage follow each other.
    """

    rank: int
    size: int
    global_ranks: tuple[int, ...] = ()
    replicas: int | None = None

    @property
    def is_distributed(self) -> bool:
        return self.size > 1

    @property
    def is_one_of_several(self) -> bool:
        """Whether other processes were started with this one, although a pipeline may have it alone."""
        return self.is_distributed or bool(self.global_ranks)

    @property
    def name(self) -> str:
        """A text that differs between groups of other processes."""
        return hashlib.sha256(repr(self.global_ranks).encode()).hexdigest()[:16] if self.global_ranks else ""

    @property
    def note(self) -> str:
        """What an error says about its numbers of ranks, if they are those of a group."""
        processes = short_repr(self.global_ranks)
        return f"\n(rank k is the k-th of the processes {processes})" if self.global_ranks else ""


SINGLE_PROCESS = World(0, 1)


def world(group: object = None) -> World:
    """This process in a group; in the default one, else in the environment that ``torchrun`` sets.

    ``group`` is a process group, or a DeviceMesh with one axis, or with two: ``"pp"`` for stages, and any
    other name for replicas.

    Raises:
        InputError: this process is not a member, or a mesh has other axes.
    """
    if group is None:
        if dist.is_available() and dist.is_initialized():
            return World(dist.get_rank(), dist.get_world_size())
        return World(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    own = dist.get_rank()
    global_ranks, replicas = _members(group)
    if own not in global_ranks:
        raise InputError(
            f"this process, rank {own} of the job, is no member of the group; only its members make the "
            "pipeline: leave out the call on the other ranks"
        )
    is_all = global_ranks == (*range(dist.get_world_size()),)
    return World(global_ranks.index(own), len(global_ranks), () if is_all else global_ranks, replicas)


def is_group(value: object) -> bool:
    """Whether a value is a process group of torch, or what processes outside get for it, or a mesh."""
    if not dist.is_available():
        return False
    is_outside = value is dist.GroupMember.NON_GROUP_MEMBER
    return is_outside or isinstance(value, dist.ProcessGroup | dist.DeviceMesh)


def _members(group: object) -> tuple[tuple[int, ...], int | None]:
    """The processes of a group in the order of the ranks, and the replicas that a mesh of two axes has."""
    if isinstance(group, dist.ProcessGroup):
        return (*dist.get_process_group_ranks(group),), None
    if not isinstance(group, dist.DeviceMesh):
        return (), None
    if group.ndim == 1:
        return (*group.mesh.tolist(),), None
    names = group.mesh_dim_names or ()
    if group.ndim != 2 or "pp" not in names:
        raise InputError(
            f"group is a mesh with the axes {names or tuple(group.shape)}; expected one, or two, of which "
            'that of stages is named "pp": pass mesh["pp"] or mesh["dp", "pp"] of a larger mesh'
        )
    by_stage = group.mesh.movedim(names.index("pp"), 0)
    return (*by_stage.flatten().tolist(),), by_stage.shape[1]


def default_num_ranks(world: World) -> int:
    """The number of processes; for a single process, the number of its GPUs, at least 1."""
    return world.size if world.is_one_of_several else max(1, torch.cuda.device_count())


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
            f"devices asks for {count} ranks, but {world.size} processes "
            f"{'are in the group' if world.global_ranks else 'were started'} and each runs one "
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
    own = world.global_ranks[world.rank] if world.global_ranks else rank
    local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or own)
    if world.is_one_of_several and num_gpus == 1:
        return 0  # ranks that have found the same one are refused when they meet
    if world.is_one_of_several and local_rank >= num_gpus:
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
    return local_rank if world.is_one_of_several else rank % num_gpus
