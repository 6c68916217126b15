"""The ranks and microbatches of each link, from which both lowering and verification start."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from pipec.ir import Link, Payload, Placement, count_ranks
from pipec.ir.columns import Ints


@dataclass(frozen=True, slots=True)
class Route:
    """The messages of link ``number`` from rank ``source`` to rank ``target``.

    ``microbatches`` has an entry for each message: -1 alone for a link that moves once per step.
    """

    number: int
    link: Link
    source: int
    target: int
    microbatches: Ints

    @property
    def crosses_ranks(self) -> bool:
        return self.source != self.target


@dataclass(frozen=True)
class DeliveredMessages:
    """The numbers of the instructions that send, receive and await the messages of a route.

    Each column has an entry for each message. A move is its own send, receive and wait.
    """

    route: Route
    sends: Ints
    receives: Ints
    waits: Ints


def routes(links: Sequence[Link], placement: Placement, num_microbatches: int) -> Iterator[Route]:
    """The routes of every link, in the order of ``links``."""

    def every(period: int, first: int) -> Ints:
        return np.arange(first, num_microbatches, period, dtype=np.int32)

    for number, link in enumerate(links):
        sources = placement[link.source]
        if link.payload is Payload.MICROBATCH_RESULT:
            for source, target in rank_pairs(link, placement, num_microbatches):
                yield Route(number, link, source, target, every(len(sources), sources.index(source)))
        elif link.payload.per_microbatch:
            targets = placement[link.target]
            period = math.lcm(len(sources), len(targets))
            pairs = zip(islice(cycle(sources), period), islice(cycle(targets), period), strict=True)
            for (source, target), first in sorted(zip(pairs, range(num_microbatches), strict=False)):
                yield Route(number, link, source, target, every(period, first))
        else:
            for source, target in rank_pairs(link, placement, num_microbatches):
                yield Route(number, link, source, target, np.array([-1], np.int32))


def rank_pairs(link: Link, placement: Placement, num_microbatches: int) -> Sequence[tuple[int, int]]:
    """The pairs of sending and receiving ranks of a link that moves once per step or is a result.

    A result goes from every replica that made a part of it to every other rank. The k-th replica of a stage
    that borrows weights borrows from replica k mod r of the owner's r replicas, and sends gradients back to
    it.
    """
    sources = placement[link.source]
    if link.payload.is_result:
        every = range(count_ranks(placement))
        made = sources[:num_microbatches]
        return [(source, target) for source in made for target in every if target != source]
    targets = placement[link.target]
    if link.payload is Payload.WEIGHT:
        return [(sources[k % len(sources)], target) for k, target in enumerate(targets)]
    return [(source, targets[k % len(targets)]) for k, source in enumerate(sources)]
