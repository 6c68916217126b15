"""A schedule: the computes of each rank in order, before communication is added."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from pipec.ir.stream import Stream
from pipec.ir.values import Link, Phase

Placement = tuple[tuple[int, ...], ...]
"""The ranks of each stage, its replicas. They take the microbatches in turn."""

SegmentCounts = Mapping[tuple[int, Phase], int]
"""The number of functions of each phase of a stage that consists of several."""


def one_rank_per_stage(ranks: Iterable[int]) -> Placement:
    """Stage k on the k-th of these ranks alone."""
    return tuple((rank,) for rank in ranks)


def rank_of(placement: Placement, stage: int, microbatch: int = -1) -> int:
    """The rank that runs ``stage`` on ``microbatch``; -1 means work that is done once per step."""
    ranks = placement[stage]
    return ranks[microbatch % len(ranks)] if microbatch >= 0 else ranks[0]


def microbatches_on(placement: Placement, stage: int, rank: int, num_microbatches: int) -> range:
    """The microbatches that one of the ranks of ``stage`` runs."""
    ranks = placement[stage]
    return range(ranks.index(rank), num_microbatches, len(ranks))


def replica_counts(placement: Placement) -> tuple[int, ...]:
    """How many ranks each stage has."""
    return tuple(map(len, placement))


def stages_on(placement: Placement, rank: int) -> list[int]:
    """The stages that ``rank`` runs, ascending."""
    return [stage for stage, ranks in enumerate(placement) if rank in ranks]


def result_ranks(link: Link, placement: Placement) -> Sequence[int]:
    """The ranks that get the results of a link: all, or those of its target."""
    return range(count_ranks(placement)) if link.is_broadcast else placement[link.target]


def count_ranks(placement: Placement) -> int:
    """The number of ranks, which are numbered from 0."""
    return 1 + max(map(max, placement))


@dataclass(frozen=True, slots=True)
class Compute:
    """One compute of a schedule: run ``phase`` of ``stage`` on ``microbatch``."""

    phase: Phase
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The computes of each rank, ``orders[rank]``, in order, before communication is added.

    With a ``stream``, the microbatches are those of several mini-batches that follow each other.
    """

    name: str
    num_microbatches: int
    placement: Placement
    orders: Sequence[Sequence[Compute]]
    stream: Stream | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        return len(self.placement)


@dataclass(frozen=True)
class RepresentativeRanks:
    """Some ranks of a step, and the rank that represents each of all its ranks.

    Rank ``represented_by[rank]`` does the same as ``rank``, on other microbatches, and is one of ``ranks``.
    Every stage has ``num_replicas`` replicas.
    """

    ranks: Sequence[int]
    represented_by: Sequence[int]
    num_replicas: int

    @classmethod
    def of(cls, placement: Placement, ranks: Sequence[int]) -> Self | None:
        """Of the ranks of a stage, each is represented by the last of ``ranks`` up to itself.

        None if all ranks of the placement are named.
        """
        if len(ranks) == count_ranks(placement):
            return None
        found, named = dict[int, int](), set(ranks)
        for of_stage in placement:
            last = of_stage[0]
            for rank in of_stage:
                found[rank] = last = rank if rank in named else last
        return cls(ranks, [found[rank] for rank in range(len(found))], len(placement[0]))

    @cached_property
    def counts(self) -> Sequence[int]:
        """For each of ``ranks``, the number of ranks that it represents, itself included."""
        return [self.represented_by.count(rank) for rank in self.ranks]
