"""The content of a checkpoint besides its tensors: ``checkpoint.pt``."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipec.checkpoint.optimizer_state import OptimizerState
from pipec.checkpoint.plain_values import fields_of, plain, read, written
from pipec.console import notice
from pipec.errors import DAMAGED_DATA_ERRORS, CheckpointError, InputError
from pipec.ir.json_form import read_plain
from pipec.runtime.step.loss_scale import LossScale
from pipec.runtime.step.stream_results import BatchResult
from pipec.runtime.stream_position import StreamPosition

FORMAT, METADATA_FILE = "pipec checkpoint 3", "checkpoint.pt"


@dataclass(frozen=True)
class SchedulerState:
    """The class of an LR scheduler, as ``scheduler_class_name``, and its plain state."""

    class_name: str
    state: Any

    @classmethod
    def of(cls, scheduler: Any) -> "SchedulerState":
        kind = scheduler_class_name(scheduler)
        return cls(kind, plain(scheduler.state_dict(), f"the state of the scheduler, {kind},"))


def scheduler_class_name(scheduler: Any) -> str:
    """The class's name; for a scheduler of schedulers, such as SequentialLR, with theirs in brackets."""
    inner = getattr(scheduler, "_schedulers", ())
    name = type(scheduler).__name__
    return f"{name}({', '.join(map(scheduler_class_name, inner))})" if inner else name


def restore_random_state(states: Sequence[Tensor], rank: int, num_ranks: int) -> None:
    """Set the state of torch's generator for a rank, to one of ``states``, that each rank had.

    Ranks that did not exist then get rank 0's state.
    """
    if not states:
        notice("the checkpoint has no random state: torch's generator stays as it is")
        return
    if num_ranks != len(states) and any(not torch.equal(each, states[0]) for each in states):
        notice(
            f"the {len(states)} ranks that wrote the checkpoint each had a random state, "
            f"and there are {num_ranks} now: new ranks get the state of rank 0"
        )
    torch.set_rng_state(states[rank if rank < len(states) else 0])


@dataclass(frozen=True)
class CheckpointMetadata:
    """``ties`` maps the other names of a tied tensor to its first. ``frozen`` parameters had no gradients.
    Both are None if unknown, as in a checkpoint that another library wrote.

    ``random`` has the state of torch's default generator on each rank; it may be empty. ``positions`` in the
    stream are as ``plain_position`` makes them, one for each part of the data. ``loss_scale`` is for the next
    step, if the loss is scaled.
    """

    num_steps: int
    ties: dict[str, str] | None
    frozen: list[str] | None
    random: list[Any]
    optimizer: OptimizerState | None
    schedulers: list[SchedulerState]
    positions: list[Any]
    extra: Any
    loss_scale: LossScale | None = None
    format: str = FORMAT

    def stream_positions(self) -> list[StreamPosition]:
        """The position in each part of the data; none without a stream."""
        try:
            return [
                StreamPosition(**{**each, "undelivered": [BatchResult(*x) for x in each["undelivered"]]})
                for each in self.positions
                if each is not None
            ]
        except (AttributeError, LookupError, TypeError) as error:
            raise CheckpointError(f"the position of a stream is damaged: {error!r}") from error

    def file(self) -> bytes:
        return written(fields_of(self))


def plain_position(position: StreamPosition | None) -> Any:
    """The position as plain values. Raises InputError if the state of its loader is not plain."""
    if position is None:
        return None
    undelivered = [[loss, dict(logs)] for loss, logs in position.undelivered]
    values = fields_of(position) | {"undelivered": undelivered}
    return {name: plain(value, f"{name} of the stream's position") for name, value in values.items()}


def replica_position(positions: Sequence[StreamPosition], replica: int, num_replicas: int) -> StreamPosition:
    """The position of a replica. Raises InputError if the number of replicas has changed."""
    if len(positions) != num_replicas:
        raise InputError(
            f"the checkpoint has the positions of {len(positions)} parts of the data, and pipe.num_replicas "
            f"is {num_replicas}: it is unknown which batches were trained on. Pass batches that "
            "continue where the data should, with resume=False"
        )
    return positions[replica]


def parse_metadata(data: bytes, path: Path) -> CheckpointMetadata:
    """Parse what ``CheckpointMetadata.file`` returned.

    Raises:
        CheckpointError: it is damaged, or of another format.
    """
    try:
        found = read(data)
        if isinstance(found, dict) and found.get("format") != FORMAT:
            raise CheckpointError(
                f"it has format {found.get('format')!r}, and this version of pipec reads {FORMAT!r}; "
                "load it with the version that wrote it, or with a later one"
            )
        metadata = read_plain(CheckpointMetadata, found)
        for state in metadata.random:
            torch.Generator().set_state(state)
        metadata.stream_positions()
        return metadata
    except (*DAMAGED_DATA_ERRORS, RuntimeError, CheckpointError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
