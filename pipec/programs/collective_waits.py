"""Waits of collectives: no rank passes a collective before all its ranks have reached it.

A collective is modelled as a rank of its own with one instruction. This instruction passes when every member
has reached the collective, and all members wait for it. So there are twice as many waits as instructions of
collectives.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipec.ir.columns import COLLECTIVES, InstructionColumns, Ints, concatenate_instructions
from pipec.programs.deadlock import InstructionSite, WaitEdges
from pipec.programs.program_index import ProgramIndex


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
    """Each collective waits for all its ranks, and all of them wait for it."""
    own = [columns.numbers_of(*COLLECTIVES) for columns in step.columns]
    started = concatenate_instructions(
        [columns.taken(numbers) for columns, numbers in zip(step.columns, own, strict=True)]
    )
    ranks = np.repeat(np.arange(len(own)), [numbers.size for numbers in own])
    sites, found = np.concatenate(own), collective_numbers(started, ranks)
    first = np.zeros_like(sites)
    reached, passed = (len(own) + found, first, ranks, sites), (ranks, sites, len(own) + found, first + 1)
    waits = WaitEdges(*(np.concatenate(pair).astype(np.int32) for pair in zip(reached, passed, strict=True)))
    return CollectiveWaits(waits, len(own), int(found.max(initial=-1)) + 1)


def collective_numbers(started: InstructionColumns, ranks: Ints) -> Ints:
    """For each of these instructions, by rank in order, the number of its collective.

    Of several equal ones on a rank, the k-th belongs to the k-th on every other rank.
    """
    keys = np.stack([started.ops, started.stages, started.buckets, started.model_collectives])
    kinds = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
    order = np.lexsort((kinds, ranks))
    is_first = np.append(True, (np.diff(kinds[order]) != 0) | (np.diff(ranks[order]) != 0))[: kinds.size]
    places = np.arange(kinds.size)
    turns = np.empty_like(places)
    turns[order] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    found: Ints = np.unique(np.stack([kinds, turns]), axis=1, return_inverse=True)[1].reshape(-1)
    return found
