"""The programs of one step, indexed for verification: where everything is computed, moved and read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipec.ir import Link, Op, Payload, Phase, Program
from pipec.ir.columns import OP_CODE, OPS, Instructions, Ints
from pipec.ir.text import instruction_lines
from pipec.programs.rendezvous import Site

BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
COMPUTES = (Op.FORWARD, Op.RECOMPUTE, *BACKWARDS)
"""In the order in which a microbatch runs them."""


@dataclass(frozen=True)
class Deliveries:
    """What one link brings to one rank, a column entry for each message: where on its rank each step is.

    ``made`` and ``reads`` are -1 where nothing in the programs makes or reads it. A move is its own send
    and receive.
    """

    link: Link
    source: int
    target: int
    microbatches: Ints
    made: Ints
    sends: Ints
    receives: Ints
    reads: Ints

    @property
    def crosses_ranks(self) -> bool:
        return self.source != self.target


@dataclass(frozen=True)
class StepIndex:
    """Programs and what they should carry out: stages placed on ranks, links, microbatches and limits.

    ``recompute`` are the stages that replay their forward; ``limits[rank]`` bounds what is in flight.
    """

    programs: Sequence[Program]
    placement: tuple[int, ...]
    links: tuple[Link, ...]
    num_microbatches: int
    recompute: frozenset[int]
    limits: Sequence[int] | None

    def show(self, site: Site) -> str:
        """An instruction on one line."""
        return " ".join(instruction_lines(self.programs[site[0]])[site[1]].split())

    @cached_property
    def link_set(self) -> frozenset[Link]:
        return frozenset(self.links)

    @cached_property
    def columns(self) -> Sequence[Instructions]:
        """The instructions of each rank; a link number beyond ``links`` is of a foreign one."""
        return [Instructions.of(program.instructions, self.links) for program in self.programs]

    @cached_property
    def trains(self) -> bool:
        codes = [OP_CODE[op] for op in BACKWARDS]
        return any(bool(np.isin(each.ops, codes).any()) for each in self.columns)

    @cached_property
    def numbers(self) -> Ints:
        """``[op, stage, microbatch]``: the number of the last such compute, or first free, or -1."""
        return self._found[0]

    @cached_property
    def counts(self) -> Ints:
        """``[op, stage, microbatch]``: how many such computes and frees there are."""
        return self._found[1]

    @cached_property
    def _found(self) -> tuple[Ints, Ints]:
        shape = (len(OPS), len(self.placement), self.num_microbatches)
        numbers, counts = np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
        for each in self.columns:
            at = np.flatnonzero(each.link_numbers < 0)
            for own in (at[each.ops[at] != OP_CODE[Op.FREE]], at[each.ops[at] == OP_CODE[Op.FREE]][::-1]):
                where = (each.ops[own], each.stages[own], each.microbatches[own])
                numbers[where] = own
                np.add.at(counts, where, 1)
        return numbers, counts

    @cached_property
    def transfers(self) -> Mapping[tuple[Op, int, int], tuple[Ints, Ints]]:
        """By op, number of the link and receiving rank: the microbatches, and the instructions' numbers."""
        found = {}
        for rank, each in enumerate(self.columns):
            for op in (Op.SEND, Op.RECV, Op.MOVE):
                own = np.flatnonzero(each.ops == OP_CODE[op])
                links = each.link_numbers[own]
                targets = each.peers[own] if op is Op.SEND else np.full_like(links, rank)
                for group in _groups(links * len(self.programs) + targets):
                    key = (op, int(links[group[0]]), int(targets[group[0]]))
                    found[key] = (each.microbatches[own[group]], own[group].astype(np.int32))
        return found

    def receivers(self, link: Link) -> list[int]:
        """The ranks a link goes to."""
        if link.payload is Payload.RESULT:
            return [rank for rank in range(len(self.programs)) if rank != self.placement[link.source]]
        return [self.placement[link.target]]

    def microbatches(self, link: Link) -> Sequence[int]:
        return range(self.num_microbatches) if link.payload.per_microbatch else (-1,)

    def transfer_ops(self, link: Link, target: int) -> tuple[Op, ...]:
        """What brings a link to a rank: a send and a receive, or a move if it is there already."""
        return (Op.MOVE,) if self.placement[link.source] == target else (Op.SEND, Op.RECV)

    def routes(self) -> Iterator[tuple[int, Link, int]]:
        """Every link by number, with each rank that it goes to."""
        for number, link in enumerate(self.links):
            for target in self.receivers(link):
                yield number, link, target

    @cached_property
    def deliveries(self) -> Sequence[Deliveries]:
        """How every message travels, once it is known that each is delivered exactly once."""
        return [self._deliveries(*route) for route in self.routes()]

    def _deliveries(self, number: int, link: Link, target: int) -> Deliveries:
        microbatches = np.array(self.microbatches(link), np.int32)
        found = []
        for op in self.transfer_ops(link, target):
            carried, at = self.transfers[op, number, target]
            found.append(at[np.argsort(carried)])
        made = self._numbers_of(link.payload.producers, link.source).max(axis=0, initial=-1)
        unread = np.iinfo(np.int32).max
        reads = self._numbers_of(link.payload.readers, link.target)
        reads = np.where(reads < 0, unread, reads).min(axis=0, initial=unread)
        if not link.payload.per_microbatch:
            made, reads = made.max(keepdims=True), reads.min(keepdims=True)
        reads = np.where(reads == unread, -1, reads)
        return Deliveries(
            link, self.placement[link.source], target, microbatches, made, found[0], found[-1], reads
        )

    def _numbers_of(self, phases: Sequence[Phase], stage: int) -> Ints:
        return self.numbers[[OP_CODE[Op(phase)] for phase in phases], stage]

    def suspect(self, found: Sequence[int], rank: int, stage: int, microbatch: int) -> Site | None:
        """Where to look on ``rank`` when something was ``found`` too often, or not at all.

        That is the last of what was found, the last compute of the cell, or the last line of the rank.
        """
        codes = [OP_CODE[op] for op in COMPUTES]
        computed = int(self.numbers[codes, stage, microbatch].max()) if min(stage, microbatch) >= 0 else -1
        last = computed if computed >= 0 else len(self.programs[rank].instructions) - 1
        number = max(found, default=last)
        return (rank, number) if number >= 0 else None


def _groups(keys: Ints) -> list[Ints]:
    """The places of each different key, ascending."""
    order = np.argsort(keys, kind="stable")
    bounds = np.flatnonzero(np.diff(keys[order])) + 1
    return np.split(order, bounds) if order.size else []
