"""Which ranks stand for all, where the replicas of a step are equal and do the same."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RepresentativeRanks:
    """Some ranks of a step, and whom they stand for.

    The k-th of them is rank ``ranks[k]`` of the step, and ``counts[k]`` ranks do as it does, itself included.
    Every stage has ``num_replicas`` replicas.
    """

    ranks: Sequence[int]
    counts: Sequence[int]
    num_replicas: int
