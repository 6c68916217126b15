"""Which ranks hold each tensor of a model, and on which device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipec.ir import Plan
from pipec.runtime.messages.agreement import Agreement
from pipec.runtime.processes.launch import World


@dataclass
class TensorOwners:
    """``ranks`` has the ranks that hold each tensor, by FQN. Tensors that no stage uses are on rank 0."""

    world: World
    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def source_rank(self, fqn: str) -> int:
        """The first rank that holds a tensor, which sends it to others."""
        return self.ranks.get(fqn, (0,))[0]

    def is_source(self, fqn: str) -> bool:
        """Whether this process sends a tensor to others."""
        return not self.world.is_distributed or self.source_rank(fqn) == self.world.rank

    def is_here(self, fqn: str) -> bool:
        """Whether this process holds a tensor: its stage owns it."""
        return not self.world.is_distributed or self.world.rank in self.ranks.get(fqn, (0,))

    @property
    def are_spread(self) -> bool:
        """Whether some ranks lack some of the tensors. All ranks know."""
        return any(len(ranks) < self.world.size for ranks in self.ranks.values())

    def is_elsewhere(self, fqn: str) -> bool:
        """Whether a stage of another process owns a tensor, and none of this one."""
        return fqn in self.ranks and not self.is_here(fqn)

    def broadcast(
        self, activity: str, fqn: str, tensor: Tensor, agreement: Agreement, ranks: Sequence[int]
    ) -> Tensor:
        """The values of a tensor, on the ranks that hold it and on ``ranks``. Every rank calls this."""
        owner = self.source_rank(fqn)
        given = tensor if self.is_source(fqn) else torch.empty(tensor.shape, dtype=tensor.dtype)
        others = [rank for rank in ranks if rank != owner]
        return agreement.broadcast_tensor(owner, activity, given, others)


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
    """By FQN, the device of each tensor of the model.

    ``devices`` has the ranks of this process; a tensor of another process has no device here.
    """
    return {
        fqn: next((devices[rank] for rank in ranks if rank in devices), None)
        for fqn, ranks in owner_ranks(plan).items()
    }
