"""The rule that no rank waits forever."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from pipec.ir.columns import Ints
from pipec.programs.collective_waits import collective_waits
from pipec.programs.deadlock import WaitEdges, stalled_ranks, wait_cycle
from pipec.programs.program_index import ProgramIndex
from pipec.programs.routes import DeliveredMessages
from pipec.programs.rules.message_rules import cross_rank_messages
from pipec.programs.violation import Violation


def finishes(step: ProgramIndex) -> Iterator[Violation]:
    """No rank waits forever, even if every send waits until its receive is posted. Refused::

    rank 0: ... send a to rank 1, recv b from rank 1
    rank 1: ... send b to rank 0, recv a from rank 0
    """
    collectives = collective_waits(step)
    if (
        not collectives.count
        and step.computes
        and step.computes.receives_precede_sends(cross_rank_messages(step))
    ):
        return
    waits = _together([_waits(step.deliveries), collectives.waits])
    stalled = stalled_ranks([*(len(columns) for columns in step.columns), *[1] * collectives.count], waits)
    if stalled:
        ring = wait_cycle(collectives.of_ranks(stalled))
        lines = [
            f"  rank {site[0]} at '{step.show(site)}' waits for rank {ahead[0]} to reach '{step.show(ahead)}'"
            for site, ahead in ring
        ]
        message = "\n".join(["deadlock if sends wait for their receives:", *lines])
        yield Violation(ring[0][0], message, tuple(site for site, _ in ring[1:]))


def _waits(deliveries: Sequence[DeliveredMessages]) -> WaitEdges:
    """A send waits for its receive, and a wait for the send of its message."""
    parts: dict[int, list[tuple[Ints, ...]]] = defaultdict(list)
    for each in deliveries:
        if each.route.crosses_ranks:
            source = np.full_like(each.sends, each.route.source)
            target = np.full_like(each.sends, each.route.target)
            parts[each.route.source].append((source, each.sends, target, each.receives))
            parts[each.route.target].append((target, each.waits, source, each.sends))
    by_rank = [part for _, of_rank in sorted(parts.items()) for part in of_rank]
    return WaitEdges(*map(_concatenated, zip((np.empty(0, np.int32),) * 4, *by_rank, strict=True)))


def _together(parts: Sequence[WaitEdges]) -> WaitEdges:
    columns = [(each.ranks, each.numbers, each.other_ranks, each.other_numbers) for each in parts]
    return WaitEdges(*map(_concatenated, zip(*columns, strict=True)))


def _concatenated(parts: Sequence[Ints]) -> Ints:
    return np.concatenate([np.empty(0, np.int32), *parts])
