"""The messages of links: their ranks and microbatches, and which send and receive belong together."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Self

import numpy as np

from pipec.ir import Link, Op, Payload, Placement, count_ranks
from pipec.ir.columns import InstructionColumns, Ints, concatenate_instructions


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
class Delivered:
    """The messages between ranks, entry by entry: their ranks, and the instructions that deliver them."""

    links: Ints
    microbatches: Ints
    sources: Ints
    targets: Ints
    sends: Ints
    receives: Ints
    waits: Ints

    @classmethod
    def by(cls, programs: Sequence[InstructionColumns]) -> Self:
        """The messages of programs that send, receive and await each of them once."""
        sent, receives, waits = (Transfers.of(programs, op) for op in (Op.SEND, Op.RECV, Op.WAIT_RECV))
        found = []
        for each in (receives, waits):
            numbers = np.empty_like(each.numbers)
            numbers[sent.sends_of(each)] = each.numbers
            found.append(numbers)
        columns = sent.columns
        return cls(
            columns.link_numbers, columns.microbatches, sent.ranks, columns.peers, sent.numbers, *found
        )


@dataclass(frozen=True)
class Transfers:
    """The instructions of one op in several programs, with the rank and the number of each."""

    ranks: Ints
    numbers: Ints
    columns: InstructionColumns

    @classmethod
    def of(cls, programs: Sequence[InstructionColumns], op: Op) -> Self:
        own = [columns.numbers_of(op) for columns in programs]
        ranks = np.arange(len(own), dtype=np.int32).repeat([numbers.size for numbers in own])
        return cls(
            ranks,
            np.concatenate(own),
            concatenate_instructions([each.taken(at) for each, at in zip(programs, own, strict=True)]),
        )

    def sends_of(self, received: "Transfers") -> Ints:
        """For each receive, or wait for one, the place of its send among these sends; -1 if there is none.

        One rank receives what feeds a compute of a microbatch. Of other links, there is a message to each
        peer.
        """
        links = self.columns.links
        count = max(int(each.columns.microbatches.max(initial=-1)) for each in (self, received)) + 2
        place = np.full((len(links), count), -1, np.int32)
        sent, wanted = (
            each.columns.link_numbers * np.int64(count) + each.columns.microbatches + 1
            for each in (self, received)
        )
        place.reshape(-1)[sent] = np.arange(sent.size, dtype=np.int32)
        found = place.reshape(-1).take(wanted)
        once = np.array([not link.payload.feeds_compute for link in links], bool)
        if once.any():
            own, others = (np.flatnonzero(once[each.columns.link_numbers]) for each in (self, received))
            base = 1 + max(
                int(x.max(initial=-1)) for e in (self, received) for x in (e.ranks, e.columns.peers)
            )
            keys = (sent[own] * base + self.ranks[own]) * base + self.columns.peers[own]
            looked = (wanted[others] * base + received.columns.peers[others]) * base + received.ranks[others]
            order = np.argsort(keys)
            at = np.minimum(np.searchsorted(keys[order], looked), max(own.size - 1, 0))
            found[others] = np.where(keys[order][at] == looked, own[order][at], -1) if own.size else -1
        return found


def once_peers(link: Link, placement: Placement, num_microbatches: int, rank: int) -> tuple[Ints, Ints]:
    """The ranks to which a rank sends a link that moves once per step, and from which it receives it."""
    if link.payload is Payload.RESULT:
        made = np.array(placement[link.source][:num_microbatches], np.int32)
        every = np.arange(count_ranks(placement), dtype=np.int32)
        return every[every != rank] if rank in made else every[:0], made[made != rank]
    pairs = np.array(rank_pairs(link, placement, num_microbatches), np.int32).reshape(-1, 2)
    return pairs[pairs[:, 0] == rank, 1], pairs[pairs[:, 1] == rank, 0]


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
