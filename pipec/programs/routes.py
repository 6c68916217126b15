"""Between which ranks links carry what: the one answer that lowering and verification start from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipec.ir import Link, Payload, Placement, count_ranks
from pipec.ir.columns import Ints, ranks_by_microbatch


@dataclass(frozen=True, slots=True)
class Route:
    """What link ``number`` carries from rank ``source`` to rank ``target``: an entry for each message.

    ``microbatches`` holds -1 alone for a link that moves once per step.
    """

    number: int
    link: Link
    source: int
    target: int
    microbatches: Ints

    @property
    def crosses_ranks(self) -> bool:
        return self.source != self.target


def routes(links: Sequence[Link], placement: Placement, num_microbatches: int) -> Iterator[Route]:
    """The routes of every link, in the order of ``links``."""
    ranks = ranks_by_microbatch(placement, num_microbatches)
    for number, link in enumerate(links):
        if link.payload.per_microbatch:
            pairs = np.stack([ranks[link.source], ranks[link.target]])
            for source, target in np.unique(pairs, axis=1).T.tolist():
                carried = (pairs[0] == source) & (pairs[1] == target)
                yield Route(number, link, source, target, np.flatnonzero(carried).astype(np.int32))
        else:
            source = placement[link.source][0]
            for target in targets(link, placement):
                yield Route(number, link, source, target, np.array([-1], np.int32))


def targets(link: Link, placement: Placement) -> Sequence[int]:
    """The ranks that a link goes to. A result goes from its stage's first rank to every other."""
    if link.payload is not Payload.RESULT:
        return placement[link.target]
    first = placement[link.source][0]
    return [rank for rank in range(count_ranks(placement)) if rank != first]
