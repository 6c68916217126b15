"""The tensors of a pipeline: which rank holds each, on which device, and how they are gathered."""

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from pipec.console import notice
from pipec.errors import InfeasibleError, InputError, PlanError
from pipec.ir import Plan
from pipec.runtime.absent_tensors import (
    hold,
    is_absent,
    is_unread,
    refuse_unread,
    release_elsewhere,
    release_sharded,
)
from pipec.runtime.memory.host_room import require_host_memory
from pipec.runtime.messages.call_description import format_names, format_ranks
from pipec.runtime.model_tensors import ModelTensors, UninitializedTensors, restore_tensors
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.runtime.step.ranks import Ranks

ReadTensors = Callable[[Ranks, ModelTensors, Mapping[str, torch.device | None]], None]
"""Reads the tensors of this process whose values are in files still, onto their devices."""


class Tensors:
    """The tensors of a model, which ``module`` has under their names there.

    ``owner_ranks`` has the ranks that hold each tensor, by FQN; it is empty until stages are cut. Tensors
    that no stage uses are on rank 0. Under ``torchrun`` a process frees the memory of tensors that only
    others need. ``uninitialized`` has those to which nothing was written yet.
    """

    def __init__(
        self,
        module: nn.Module,
        names: ModelTensors,
        ranks: Ranks,
        updates: OptimizerUpdates | None,
        read: ReadTensors | None = None,
    ) -> None:
        self._module = cast(nn.Module, weakref.proxy(module))  # the module owns this object
        self.names, self.ranks, self.read = names, ranks, read
        self._updates, self._world = updates, ranks.world
        self.owner_ranks: dict[str, tuple[int, ...]] = {}
        self._mutable_buffers: set[str] = set()
        self.needs_placement = self._has_host_memory = False
        self.uninitialized = UninitializedTensors()

    @property
    def canonical(self) -> dict[str, str]:
        """The first name of each tensor, by each of its names."""
        return self.names.canonical

    def source_rank(self, fqn: str) -> int:
        """The first rank that holds a tensor, which sends it to others."""
        return self.owner_ranks.get(fqn, (0,))[0]

    def is_source(self, fqn: str) -> bool:
        """Whether this process sends a tensor to others."""
        return not self._world.is_distributed or self.source_rank(fqn) == self._world.rank

    def is_here(self, fqn: str) -> bool:
        """Whether this process holds a tensor: its stage owns it."""
        return not self._world.is_distributed or self._world.rank in self.owner_ranks.get(fqn, (0,))

    @property
    def are_spread(self) -> bool:
        """Whether some ranks lack some of the tensors. All ranks know."""
        return any(len(ranks) < self._world.size for ranks in self.owner_ranks.values())

    def is_elsewhere(self, fqn: str) -> bool:
        """Whether a stage of another process owns a tensor, and none of this one."""
        return fqn in self.owner_ranks and not self.is_here(fqn)

    def here(self, every_name: bool = False) -> dict[str, Tensor]:
        """The tensors of this process under their first names, or under all names of tied ones."""
        every = self.names.every() if every_name else self.names.unique()
        return {fqn: x for fqn, x in every.items() if not self.is_elsewhere(self.canonical[fqn])}

    def trained_here(self) -> list[Tensor]:
        """The parameters of this process that are trained."""
        parameters, here = self.names.unique_parameters(), self.here()
        return [x for fqn, x in parameters.items() if x.requires_grad and fqn in here]

    def require_values(self) -> None:
        """Raise InputError if values are in files still, which is so on all ranks or on none."""
        refuse_unread(*self.names.unique().values())

    def refuse_unset(self, plan: Plan) -> None:
        """Raise InputError if a tensor of this process has no values."""
        here = self.here()
        if meta := [fqn for fqn, tensor in here.items() if tensor.is_meta]:
            raise InputError(
                f"{meta[0]} and {len(meta) - 1} other tensors are on the meta device and hold no values. "
                "Call to_empty(device=...) and then load_state_dict(...) on the pipeline; or save the "
                "artifact with tensors=True"
            )
        self.uninitialized.refuse(here, plan)

    def copy_to(self, other: "Tensors") -> None:
        """Let ``other``, which owns a copy of the model, know what this one knows of its tensors."""
        marked = self.uninitialized.marked
        other.uninitialized.marked = {
            fqn: (tensor, tensor._version) for fqn, tensor in other.names.unique().items() if fqn in marked
        }
        other.owner_ranks = dict(self.owner_ranks)
        other._mutable_buffers = set(self._mutable_buffers)

    def place(self, plan: Plan) -> None:
        """Move each tensor to the device of the stage that owns it, and release those of other processes."""
        unique = self.names.unique()
        there, first = tensor_devices(plan, self.ranks.devices), not self.owner_ranks
        self._require_host_memory(plan, unique, first)
        if first and self._world.is_distributed:
            self._refuse_tensors_elsewhere(owner_ranks(plan))
        if self._world.is_distributed and (new := there.keys() - self.owner_ranks.keys()):
            converted = self._keep_owners(sorted(new & unique.keys())) if not first else set[str]()
            known = {
                fqn: x for fqn, x in unique.items() if (first or fqn in new - converted) and not is_unread(x)
            }
            for rank, names in self.ranks.exchange.broadcast_from_rank_0(known, owner_ranks(plan)).items():
                differed = f"{len(names)} tensors of rank {rank} differed"
                notice(f"{differed}, and start with rank 0's: {format_names(names)}")
        self._replicate_read_only_buffers(plan)
        self.owner_ranks = owner_ranks(plan) | self.owner_ranks
        for fqn in filter(self.is_elsewhere, unique):
            release_elsewhere(fqn, unique[fqn], f"on {format_ranks(self.owner_ranks[fqn])}")
        if self.read is not None:
            self.read(self.ranks, self.names, there)
        if self._updates is not None:
            if not self.needs_placement:
                self._updates.follow_script()
            for fqn in self._updates.sharded_names:
                release_sharded(fqn, cast(nn.Parameter, unique[fqn]))
        for fqn, home in there.items():
            tensor = unique.get(fqn)
            if tensor is None or is_absent(tensor):
                continue
            if home is not None and tensor.device != home and not tensor.is_meta:
                tensor.data = tensor.data.to(home)
        self.needs_placement = False

    def _require_host_memory(self, plan: Plan, unique: Mapping[str, Tensor], first: bool) -> None:
        """Raise InfeasibleError if weights, and later what training adds, do not fit into this host.

        It is looked at before anything is allocated, and not again. Weights on meta are planned, and do not
        run.
        """
        is_due = not self._has_host_memory and (first or plan.mode.trains)
        if not is_due or any(tensor.is_meta for tensor in unique.values()):
            return
        here = [*self.ranks.devices]
        if self._world.is_distributed:
            hosts = self.ranks.distributed.hosts
            here = [rank for rank, host in enumerate(hosts) if host == hosts[self._world.rank]]
        present = [
            fqn for fqn, x in unique.items() if not is_unread(x) and (is_absent(x) or x.device.type == "cpu")
        ]
        try:
            require_host_memory(plan, here, present)
        except InfeasibleError:
            self.needs_placement = True  # the next call looks again
            raise
        self._has_host_memory = plan.mode.trains

    def _refuse_tensors_elsewhere(self, needed: Mapping[str, Sequence[int]]) -> None:
        """Refuse tensors that another pipeline has left on other ranks than this one needs, on all ranks."""
        unique = {fqn: x for fqn, x in self.names.unique().items() if not is_unread(x)}
        every = self.ranks.all_gather([is_absent(x) for x in unique.values()], "finding tensors", True)
        for fqn, *absent in zip(unique, *every, strict=True):
            if any(absent[rank] for rank in needed.get(fqn, ())):
                held = tuple(rank for rank, gone in enumerate(absent) if not gone)
                raise InputError(
                    f"{fqn} belongs to another pipeline, too, whose stages have it on "
                    f"{format_ranks(held)}, but the stages of this one need it on "
                    f"{format_ranks(needed[fqn])}. Make one pipeline of both: of a module that has the two "
                    "models, and whose forward is told by an argument which one to call; all its calls run "
                    "on the same stages"
                )

    def _keep_owners(self, names: Sequence[str]) -> set[str]:
        """Those of these new tensors that are absent on some ranks: the others own them still.

        The model has converted them itself, as ``model.double()`` does with buffers.
        """
        unique = self.names.unique()
        every = self.ranks.all_gather([is_absent(unique[x]) for x in names], "finding new tensors", True)
        owners = {
            fqn: tuple(rank for rank, gone in enumerate(absent) if not gone)
            for fqn, *absent in zip(names, *every, strict=True)
            if any(absent)
        }
        self.owner_ranks |= owners
        return {*owners}

    def _replicate_read_only_buffers(self, plan: Plan) -> None:
        """Give buffers that no forward changes to ranks that read them in this plan, and did not before.

        Raises:
            PlanError: a forward changes a buffer that other ranks hold, too.
        """
        if not self._world.is_distributed:
            return
        found = owner_ranks(plan)
        self._mutable_buffers.update(*(stage.updated_buffers for stage in plan.stages))
        for fqn in self._mutable_buffers & found.keys() & self.owner_ranks.keys():
            if {*self.owner_ranks[fqn]} != {*found[fqn]}:
                raise PlanError(
                    f"forward() changes buffer {fqn} on {format_ranks(found[fqn])}, and another call "
                    f"reads it on {format_ranks(self.owner_ranks[fqn])}: the stages were cut for a call that "
                    "does not change it. Make the call that does first, or prepare() it."
                )
        unique = self.names.unique()
        fixed = (read_only_buffers(plan) - self._mutable_buffers) & unique.keys() & self.owner_ranks.keys()
        for fqn in sorted(fixed):
            lacking = tuple(rank for rank in found[fqn] if rank not in self.owner_ranks[fqn])
            if lacking:
                values = self._broadcast(f"taking over {fqn}", fqn, unique[fqn], lacking)
                if self._world.rank in lacking:
                    hold(unique[fqn], values)
            self.owner_ranks[fqn] += lacking

    def gathered(self, names: Collection[str], readers: Sequence[int]) -> dict[str, Tensor]:
        """Copies of these tensors on the CPU of the ranks ``readers``; {} on others. All ranks call this."""
        held = {fqn: tensor.detach() for fqn, tensor in self.names.unique().items() if fqn in names}
        if not self._world.is_distributed:
            return {fqn: tensor.to("cpu", copy=True) for fqn, tensor in held.items()}
        whole = {}
        for fqn, tensor in held.items():
            found = self._broadcast(f"gathering {fqn}", fqn, tensor, readers)
            if self._world.rank in readers:
                whole[fqn] = found.to("cpu", copy=True) if found is tensor else found
        return whole

    def _broadcast(self, activity: str, fqn: str, tensor: Tensor, readers: Sequence[int]) -> Tensor:
        """The values of a tensor, on the ranks that hold it and on ``readers``."""
        owner = self.source_rank(fqn)
        given = tensor if self.is_source(fqn) else torch.empty(tensor.shape, dtype=tensor.dtype)
        others = [rank for rank in readers if rank != owner]
        return self.ranks.exchange.broadcast_tensor(owner, activity, given, others)

    def replace(self, model: ModelTensors, names: Sequence[str]) -> None:
        """Own the tensors that the model has under ``names`` now, which were replaced, added or removed."""
        self._require_optimized(model, names)
        notice(f"the model has other tensors than before, which are trained now: {format_names(names)}")
        for fqn in names:
            self.owner_ranks.pop(fqn, None)
        self.names, self.needs_placement = model, True

    def _require_optimized(self, model: ModelTensors, names: Sequence[str]) -> None:
        """Raise InputError for parameters that the optimizer does not have, and would not train."""
        if self._updates is None:
            return
        known, found = self._updates.shapes, model.unique_parameters()
        unknown = [
            *(known.keys() ^ found.keys()),
            *(fqn for fqn in known.keys() & found.keys() & set(names) if found[fqn].shape != known[fqn]),
        ]
        if unknown:
            raise InputError(
                "the model has other parameters than its optimizer was made of: "
                f"{format_names(sorted(unknown))} came, went or changed in shape; call pipec.compile(...) "
                "for the model as it is now"
            )

    def adopt_registered(self) -> None:
        """Own the tensors that replaced others in the module, under all names."""
        registered: dict[str, Tensor] = {
            **dict(self._module.named_parameters(remove_duplicate=False)),
            **dict(self._module.named_buffers(remove_duplicate=False)),
        }
        own = {fqn: registered[first] for fqn, first in self.canonical.items()}
        restore_tensors(self._module, own)
        self.names, self.needs_placement = self.names.with_replaced(own), True


def owner_ranks(plan: Plan) -> dict[str, tuple[int, ...]]:
    """By FQN, the ranks that hold a tensor: those of the first stage that has it and does not borrow it.

    A buffer that no forward changes is held by the ranks of every stage that reads it.
    """
    found: dict[str, tuple[int, ...]] = {}
    fixed = read_only_buffers(plan)
    for stage in plan.stages:
        ranks = plan.placement[stage.index]
        for fqn in stage.parameters + stage.buffers:
            if fqn not in stage.borrowed_parameters:
                before = found.setdefault(fqn, ranks)
                found[fqn] = tuple(dict.fromkeys(before + ranks)) if fqn in fixed else before
    return found


def read_only_buffers(plan: Plan) -> set[str]:
    """The buffers that stages read and that none changes."""
    read = {fqn for stage in plan.stages for fqn in stage.buffers}
    return read.difference(*(stage.updated_buffers for stage in plan.stages))


def tensor_devices(plan: Plan, devices: Mapping[int, torch.device]) -> dict[str, torch.device | None]:
    """By FQN, the device of each tensor of the model: that of its stage, or the host.

    ``devices`` has the ranks of this process; a tensor of another process has no device here.
    """
    on_host = {name for stage in plan.stages for name in plan.sync_spec.host_parameters(stage.index)}
    host = torch.device("cpu")
    return {
        fqn: next((host if fqn in on_host else devices[rank] for rank in ranks if rank in devices), None)
        for fqn, ranks in owner_ranks(plan).items()
    }
