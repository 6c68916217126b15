"""The content of a checkpoint besides its tensors: ``checkpoint.json``."""

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipec.checkpoint.json_values import decode_value, encode_value
from pipec.checkpoint.optimizer_state import OptimizerState
from pipec.checkpoint.stream_positions import decode_position
from pipec.console import notice
from pipec.errors import DAMAGED_DATA_ERRORS, CheckpointError
from pipec.ir.json_form import read_plain
from pipec.runtime.step.loss_scale import LossScale
from pipec.runtime.stream_position import StreamPosition

FORMAT, METADATA_FILE = "pipec checkpoint 2", "checkpoint.json"


@dataclass(frozen=True)
class SchedulerState:
    """The class of an LR scheduler, as ``scheduler_class_name``, and its state, as ``encode_value``."""

    class_name: str
    state: Any

    @classmethod
    def of(cls, scheduler: Any) -> "SchedulerState":
        kind = scheduler_class_name(scheduler)
        return cls(kind, encode_value(scheduler.state_dict(), f"the state of the scheduler, {kind},"))


def scheduler_class_name(scheduler: Any) -> str:
    """The class's name; for a scheduler of schedulers, such as SequentialLR, with theirs in brackets."""
    inner = getattr(scheduler, "_schedulers", ())
    name = type(scheduler).__name__
    return f"{name}({', '.join(map(scheduler_class_name, inner))})" if inner else name


@dataclass(frozen=True)
class RandomStates:
    """The distinct states of torch's default generator, and which of them each rank had. May be empty."""

    states: list[str]
    of_rank: list[int]

    @classmethod
    def of(cls, every: Sequence[str]) -> "RandomStates":
        states = list(dict.fromkeys(every))
        return cls(states, [states.index(each) for each in every])

    def check(self) -> None:
        """Raise ValueError or RuntimeError for invalid states, or ranks without one."""
        for state in self.states:
            torch.Generator().set_state(_state(state))
        if (self.states and not self.of_rank) or not {*self.of_rank} <= {*range(len(self.states))}:
            raise ValueError(f"ranks have the random states {self.of_rank}, of {len(self.states)}")

    def restore(self, rank: int, num_ranks: int) -> None:
        """Set the state of torch's generator for a rank. Ranks that did not exist then get rank 0's state."""
        if not self.states:
            notice("the checkpoint has no random state: torch's generator stays as it is")
            return
        if len(self.states) > 1 and num_ranks != len(self.of_rank):
            notice(
                f"the {len(self.of_rank)} ranks that wrote the checkpoint each had a random state, "
                f"and there are {num_ranks} now: new ranks get the state of rank 0"
            )
        torch.set_rng_state(_state(self.states[self.of_rank[rank if rank < len(self.of_rank) else 0]]))


def random_state() -> str:
    """The state of torch's default generator in this process."""
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


def _state(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


@dataclass(frozen=True)
class CheckpointMetadata:
    """``ties`` maps the other names of a tied tensor to its first. ``frozen`` parameters had no gradients.
    Both are None if unknown, as in a checkpoint that another library wrote.

    ``positions`` in the stream, as ``encode_position``: one for each part of the data. ``loss_scale`` is for
    the next step, if the loss is scaled.
    """

    num_steps: int
    ties: dict[str, str] | None
    frozen: list[str] | None
    random: RandomStates
    optimizer: OptimizerState | None
    schedulers: list[SchedulerState]
    positions: list[Any]
    extra: Any
    loss_scale: LossScale | None = None
    format: str = FORMAT

    def value_of_extra(self) -> Any:
        """The value that the script passed as ``extra``."""
        return decode_value(self.extra)

    def stream_positions(self) -> list[StreamPosition]:
        """The position in each part of the data; none without a stream."""
        return [each for each in map(decode_position, self.positions) if each is not None]

    def text(self) -> bytes:
        return json.dumps(asdict(self), indent=1, allow_nan=False).encode()


def read_metadata(path: Path) -> CheckpointMetadata:
    """Raises CheckpointError for a file that is damaged, or of another format."""
    try:
        return parse_metadata(path.read_bytes(), path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def parse_metadata(text: bytes, path: Path) -> CheckpointMetadata:
    """Parse the text of ``CheckpointMetadata.text``. Raises CheckpointError as ``read_metadata`` does."""
    try:
        found = json.loads(text)
        if isinstance(found, dict) and found.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} has format {found.get('format')!r}, and this version of pipec reads {FORMAT!r}; "
                "load it with the version that wrote it, or with a later one"
            )
        metadata = read_plain(CheckpointMetadata, found)
        decode_value([metadata.extra, [each.state for each in metadata.schedulers]])
        metadata.random.check()
        metadata.stream_positions()
        return metadata
    except (*DAMAGED_DATA_ERRORS, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
