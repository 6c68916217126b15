"""Messages of links, and the instructions of several ranks that belong to one message or collective."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from pipec.ir import Link, Op, Payload, Placement, result_ranks
from pipec.ir.columns import InstructionColumns, Ints, concatenate_instructions, ranks_by_microbatch


@dataclass(frozen=True)
class Messages:
    """Messages, entry by entry: the number of the link, the microbatch or -1, and the ranks at both ends."""

    links: Ints
    microbatches: Ints
    sources: Ints
    targets: Ints


def messages(links: Sequence[Link], placement: Placement, num_microbatches: int) -> Messages:
    """The messages of every link, in the order of ``links``, microbatches and targets.

    A message from a rank to itself is a move.
    """
    ranks = ranks_by_microbatch(placement, num_microbatches)
    every = np.arange(num_microbatches, dtype=np.int32)
    parts = [(np.empty(0, np.int32),) * 4]
    for number, link in enumerate(links):
        if link.payload.feeds_compute:
            sent, sources, targets = every, ranks[link.source], ranks[link.target]
        elif link.payload is Payload.MICROBATCH_RESULT:
            sent, sources, targets = _to_others(every, ranks[link.source], link, placement)
        elif link.payload is Payload.RESULT:
            made = np.array(placement[link.source][:num_microbatches], np.int32)
            sent, sources, targets = _to_others(np.full_like(made, -1), made, link, placement)
        else:
            sources, targets = np.array(_lent_to(link, placement), np.int32).reshape(-1, 2).T
            sent = np.full_like(sources, -1)
        parts.append((np.full_like(sent, number), sent, sources, targets))
    return Messages(*map(np.concatenate, zip(*parts, strict=True)))


def _to_others(sent: Ints, sources: Ints, link: Link, placement: Placement) -> tuple[Ints, Ints, Ints]:
    """Results, each from the rank that made it to the other ones that get it."""
    readers = result_ranks(link, placement)
    targets = np.tile(np.array(readers, np.int32), sources.size)
    sent, sources = sent.repeat(len(readers)), sources.repeat(len(readers))
    others = sources != targets
    return sent[others], sources[others], targets[others]


def _lent_to(link: Link, placement: Placement) -> Sequence[tuple[int, int]]:
    """The sending and receiving ranks of tied weights, or of their gradients.

    The k-th replica of a stage that borrows weights borrows from replica k mod r of the owner's r replicas,
    and sends gradients back to it.
    """
    sources, targets = placement[link.source], placement[link.target]
    if link.payload is Payload.WEIGHT:
        return [(sources[k % len(sources)], target) for k, target in enumerate(targets)]
    return [(source, targets[k % len(targets)]) for k, source in enumerate(sources)]


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
    """The instructions of some ops in several programs, with the rank and the number of each."""

    ranks: Ints
    numbers: Ints
    columns: InstructionColumns

    @classmethod
    def of(cls, programs: Sequence[InstructionColumns], *ops: Op) -> Self:
        own = [columns.numbers_of(*ops) for columns in programs]
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
        readers = np.array(result_ranks(link, placement), np.int32)
        targets = readers[readers != rank] if rank in made else readers[:0]
        return targets, made[made != rank] if rank in readers else made[:0]
    pairs = np.array(_lent_to(link, placement), np.int32).reshape(-1, 2)
    return pairs[pairs[:, 0] == rank, 1], pairs[pairs[:, 1] == rank, 0]


def collective_numbers(started: InstructionColumns, ranks: Ints) -> Ints:
    """For each of these instructions, by rank in order, the number of its collective.

    Of several equal ones on a rank, the k-th belongs to the k-th on every other rank.
    """
    keys = np.stack([started.ops, started.stages, started.buckets, started.model_collectives])
    kinds = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
    order = np.lexsort((kinds, ranks))
    is_first = np.append(True, (np.diff(kinds[order]) != 0) | (np.diff(ranks[order]) != 0))[: kinds.size]
    places = np.arange(kinds.size)
    occurrences = np.empty_like(places)
    occurrences[order] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    found: Ints = np.unique(np.stack([kinds, occurrences]), axis=1, return_inverse=True)[1].reshape(-1)
    return found
