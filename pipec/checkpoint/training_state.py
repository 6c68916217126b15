"""The content of a checkpoint: tensors, optimizers and schedulers, as one process has them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from pipec.checkpoint.optimizer_state import Optimizers
from pipec.checkpoint.shards import TensorShard, TensorSpec
from pipec.errors import InputError
from pipec.runtime.step.loss_scale import LossScale
from pipec.runtime.step.ranks import Ranks
from pipec.runtime.stream_position import StreamPosition


@dataclass(frozen=True)
class TrainingState:
    """``specs`` has the tensors of the whole model's ``state_dict``, tied ones once.

    ``parts`` are this process's shards of them, in the memory that is trained; ``ties`` maps the other names
    of a tied tensor to its first. ``names`` has the names of the whole model's parameters by ``id``, in the
    model's order. ``position`` is the position in the stream; each of ``num_replicas`` has one.
    ``loss_scale`` is for the next step, if the loss is scaled.
    """

    model: nn.Module
    ranks: Ranks
    specs: Mapping[str, TensorSpec]
    parts: Sequence[TensorShard]
    ties: Mapping[str, str]
    frozen: Sequence[str]
    names: Mapping[int, str]
    optimizers: Optimizers | None
    schedulers: Sequence[Any]
    num_steps: int
    position: StreamPosition | None
    num_replicas: int
    loss_scale: LossScale | None

    def require_memory(self) -> None:
        """Raise InputError if a tensor is on the meta device, without values or memory."""
        if meta := [part.name for part in self.parts if part.memory.is_meta]:
            raise InputError(
                f"{meta[0]} and {len(meta) - 1} other tensors are on the meta device and have no memory; "
                "call to_empty(device=...) on the pipeline before"
            )
