"""Waits of collectives: no rank passes a collective before all its ranks have reached it.

A collective is modelled as a rank of its own with one instruction. This instruction passes when every member
has reached the collective, and all members wait for it. So there are twice as many waits as instructions of
collectives.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipec.ir import Op, Payload
from pipec.programs.deadlock import InstructionSite, WaitEdges
from pipec.programs.program_index import ProgramIndex
from pipec.programs.rules.collective_rules import (
    CollectiveKey,
    collectives,
    names_of,
    sync_instruction_numbers,
)


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


def tied_gradient_waits(step: ProgramIndex) -> WaitEdges:
    """A rank reaches the first reader of a tied weight's gradients only after another rank has sent them.

    So the instruction before the first reader waits for the send.
    """
    numbers, waits = sync_instruction_numbers(step), []
    for each in step.deliveries:
        link, rank = each.route.link, each.route.target
        if link.payload is Payload.WEIGHT_GRADIENT and each.route.crosses_ranks:
            reading = [
                number
                for key, own in numbers[rank].items()
                for number in own
                if number > each.receives[0] and _reads(step, key, link.target, names_of(link))
            ]
            waits += [(rank, min(reading) - 1, each.route.source, int(each.sends[0]))] if reading else []
    return _waits(waits)


def _reads(step: ProgramIndex, key: CollectiveKey, stage: int, names: set[str]) -> bool:
    """Whether an instruction reads gradients with these names of a stage."""
    if key.op is Op.REDUCE_GRAD:
        return key.stage == stage and not names.isdisjoint(step.plan.sync_spec.buckets[key.bucket].names)
    return key.op is Op.GRAD_NORM or (key.op is Op.UPDATE and key.stage == stage)


def _waits(rows: Sequence[tuple[int, int, int, int]]) -> WaitEdges:
    return WaitEdges(*np.array(rows, np.int32).reshape(-1, 4).T)
