"""A schedule: which rank computes what, in which order, before communication is added."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipec.ir.values import Phase

Placement = tuple[int, ...]
"""The rank of each stage. Only the functions below read it, so that a stage may get more ranks than one."""


def rank_of(placement: Placement, stage: int, microbatch: int = -1) -> int:
    """The rank that runs ``stage`` on ``microbatch``; -1 asks for what is done once per step."""
    ranks = ranks_of(placement, stage)
    return ranks[microbatch % len(ranks)] if microbatch >= 0 else ranks[0]


def ranks_of(placement: Placement, stage: int) -> tuple[int, ...]:
    """Every rank that runs ``stage``: microbatch i is run by the i-th of them, in turn."""
    return (placement[stage],)


def stages_on(placement: Placement, rank: int) -> list[int]:
    """The stages that ``rank`` runs, ascending."""
    return [stage for stage in range(len(placement)) if rank in ranks_of(placement, stage)]


def count_ranks(placement: Placement) -> int:
    """How many ranks there are: they are numbered from 0."""
    return 1 + max(max(ranks_of(placement, stage)) for stage in range(len(placement)))


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
    placement: Placement
    orders: tuple[Sequence[Compute], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        return len(self.placement)
