"""The ranks that represent all ranks of a step with equal replicas."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from pipec.ir.schedule import Placement, count_ranks


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
