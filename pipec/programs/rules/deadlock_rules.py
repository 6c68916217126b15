"""The rule that no rank waits forever."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from pipec.programs.collective_waits import collective_waits
from pipec.programs.deadlock import WaitEdges, stalled_ranks, wait_cycle
from pipec.programs.program_index import ProgramIndex, Violation
from pipec.programs.routes import DeliveredMessages


def finishes(step: ProgramIndex) -> Iterator[Violation]:
    """No rank waits forever, even if every send waits until its receive is posted. Refused::

    rank 0: ... send a to rank 1, recv b from rank 1
    rank 1: ... send b to rank 0, recv a from rank 0
    """
    of_collectives, num_collectives = collective_waits(step)
    messages, num_ranks = step.deliveries_between_ranks, len(step.columns)
    if not num_collectives and step.computes and step.computes.receives_precede_sends(messages):
        return
    waits = WaitEdges.concatenated([*_waits(messages), of_collectives])
    stalled = stalled_ranks([*map(len, step.columns), *[1] * num_collectives], waits)
    if stalled:  # a rank that waits for a collective waits for a member that has not reached it
        ring = wait_cycle(
            {
                rank: (site, stalled[ahead[0]][1] if ahead[0] >= num_ranks else ahead)
                for rank, (site, ahead) in stalled.items()
                if rank < num_ranks
            }
        )
        lines = [
            f"  rank {site[0]} at '{step.show(site)}' waits for rank {ahead[0]} to reach '{step.show(ahead)}'"
            for site, ahead in ring
        ]
        message = "\n".join(["deadlock if sends wait for their receives:", *lines])
        yield Violation(ring[0][0], message, tuple(site for site, _ in ring[1:]))


def _waits(messages: Sequence[DeliveredMessages]) -> Sequence[WaitEdges]:
    """A send waits for its receive, and a wait for the send of its message; rank by rank."""
    by_rank: dict[int, list[WaitEdges]] = defaultdict(list)
    for each in messages:
        source, target = (np.full_like(each.sends, rank) for rank in (each.route.source, each.route.target))
        by_rank[each.route.source].append(WaitEdges(source, each.sends, target, each.receives))
        by_rank[each.route.target].append(WaitEdges(target, each.waits, source, each.sends))
    return [part for _, of_rank in sorted(by_rank.items()) for part in of_rank]
