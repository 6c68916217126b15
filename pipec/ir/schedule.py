"""A schedule: which rank computes what, in which order, before communication is added."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipec.ir.values import Phase


@dataclass(frozen=True, slots=True)
class Compute:
    """One cell of a schedule: run ``phase`` of ``stage`` on ``microbatch``."""

    phase: Phase
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """What each rank computes, in order, before communication is added. ``orders[rank]`` are its cells."""

    name: str
    num_microbatches: int
    placement: tuple[int, ...]
    orders: tuple[Sequence[Compute], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        return len(self.placement)
