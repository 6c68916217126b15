"""The ranks that represent all ranks of a step with equal replicas."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RepresentativeRanks:
    """Some ranks of a step, and the number of ranks that each represents.

    The k-th of them is rank ``ranks[k]`` of the step, and represents ``counts[k]`` ranks, itself included.
    Every stage has ``num_replicas`` replicas.
    """

    ranks: Sequence[int]
    counts: Sequence[int]
    num_replicas: int
