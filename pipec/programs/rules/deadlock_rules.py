"""The rule that no rank waits forever."""

from collections.abc import Iterator

from pipec.programs.collective_waits import collective_waits
from pipec.programs.deadlock import WaitEdges, stalled_ranks, wait_cycle
from pipec.programs.program_index import ProgramIndex, Violation


def finishes(step: ProgramIndex) -> Iterator[Violation]:
    """No rank waits forever, even if every send waits until its receive is posted. Refused::

    rank 0: ... send a to rank 1, recv b from rank 1
    rank 1: ... send b to rank 0, recv a from rank 0
    """
    of_collectives, num_collectives = collective_waits(step)
    each, num_ranks = step.delivered, len(step.columns)
    of_sends = WaitEdges(each.sources, each.sends, each.targets, each.receives)
    of_waits = WaitEdges(each.targets, each.waits, each.sources, each.sends)
    waits = WaitEdges.concatenated([of_sends, of_waits, of_collectives])
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
