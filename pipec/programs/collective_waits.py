"""Waits of collectives: no rank passes a collective before all its ranks have reached it.

A collective is modelled as a rank of its own with one instruction. This instruction passes when every member
has reached the collective, and all members wait for it. So there are twice as many waits as instructions of
collectives.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipec.programs.deadlock import InstructionSite, WaitEdges
from pipec.programs.program_index import ProgramIndex
from pipec.programs.rules.collective_rules import CollectiveKey, collectives


@dataclass(frozen=True)
class CollectiveWaits:
    """The waits of ``count`` collectives, which are numbered after the ``num_ranks`` ranks."""

    waits: WaitEdges
    num_ranks: int
    count: int

    def of_ranks(
        self, stalled: Mapping[int, tuple[InstructionSite, InstructionSite]]
    ) -> dict[int, tuple[InstructionSite, InstructionSite]]:
        """Stalled ranks without the collectives.

        A rank that waits for a collective waits for a member that has not reached it.
        """
        return {
            rank: (site, stalled[ahead[0]][1] if ahead[0] >= self.num_ranks else ahead)
            for rank, (site, ahead) in stalled.items()
            if rank < self.num_ranks
        }


def collective_waits(step: ProgramIndex) -> CollectiveWaits:
    """Each collective waits for all its ranks. The k-th instructions with equal keys are one collective."""
    num_ranks = len(step.columns)
    sites_of: dict[tuple[CollectiveKey, int], list[InstructionSite]] = defaultdict(list)
    for rank in range(num_ranks):
        seen: dict[CollectiveKey, int] = defaultdict(int)
        for key, number in collectives(step, rank):
            sites_of[key, seen[key]].append((rank, number))
            seen[key] += 1
    waits = []
    for collective, sites in enumerate(sites_of.values(), start=num_ranks):
        for rank, number in sites:
            waits += [(collective, 0, rank, number), (rank, number, collective, 1)]
    return CollectiveWaits(_waits(waits), num_ranks, len(sites_of))


def _waits(rows: Sequence[tuple[int, int, int, int]]) -> WaitEdges:
    return WaitEdges(*np.array(rows, np.int32).reshape(-1, 4).T)
