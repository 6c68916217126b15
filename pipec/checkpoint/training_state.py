"""What a checkpoint is of: a model's tensors, its optimizers and schedulers, as one process has them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipec.checkpoint.optimizer_state import Optimizers
from pipec.checkpoint.safetensors_files import TensorSpec
from pipec.checkpoint.shards import TensorShard
from pipec.cost.profile import Profile
from pipec.errors import InputError
from pipec.runtime.step.execution import Ranks
from pipec.runtime.step.loss_scale import LossScale
from pipec.runtime.stream_position import StreamPosition

PROFILE = "profile.json"


@dataclass(frozen=True)
class TrainingState:
    """``specs`` has the tensors of the whole model that its ``state_dict`` has, tied ones once.

    ``parts`` are what this process has of them, in the memory that is trained; ``ties`` has the first name of
    tied ones by their others. ``names`` has, by ``id``, the parameters of the whole model, and ``shapes``
    what they have there: some are empty here. ``position`` is that of the stream; each of ``num_replicas``
    has one. ``profile`` is what its stages were cut by. ``loss_scale`` is that of the next step, if the loss
    is scaled.
    """

    model: nn.Module
    ranks: Ranks
    specs: Mapping[str, TensorSpec]
    parts: Sequence[TensorShard]
    ties: Mapping[str, str]
    frozen: Sequence[str]
    names: Mapping[int, str]
    shapes: Mapping[str, torch.Size]
    optimizers: Optimizers | None
    schedulers: Sequence[Any]
    num_steps: int
    position: StreamPosition | None
    num_replicas: int
    profile: Profile | None
    loss_scale: LossScale | None

    def require_memory(self) -> None:
        """Raise InputError if a tensor has no values to save, nor memory to load to."""
        if meta := [part.name for part in self.parts if part.memory.is_meta]:
            raise InputError(
                f"{meta[0]} and {len(meta) - 1} other tensors are on the meta device and have no memory; "
                "call to_empty(device=...) on the pipeline before"
            )
