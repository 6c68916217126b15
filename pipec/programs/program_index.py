"""The programs of one step, indexed for verification: where everything is computed, moved and read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipec.ir import Link, ModelCollectives, Op, Phase, Placement, Program, SegmentCounts, SyncSpec
from pipec.ir.columns import OP_CODE, InstructionColumns, Ints, ranks_by_microbatch
from pipec.ir.text_format import instruction_lines
from pipec.programs.deadlock import InstructionSite
from pipec.programs.program_computes import ProgramComputes
from pipec.programs.routes import Route, routes

BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
COMPUTES = (Op.FORWARD, Op.RECOMPUTE, *BACKWARDS)
"""In the order in which a microbatch runs them."""

_NUM_MICROBATCH_OPS = 1 + max(OP_CODE[op] for op in (*COMPUTES, Op.FREE))


@dataclass(frozen=True)
class DeliveredMessages:
    """How the messages of a route travel: the number of each instruction involved, an entry for each message.

    ``made`` and ``reads`` are -1 where nothing in the programs makes or reads a message. A move is its own
    send and receive.
    """

    route: Route
    made: Ints
    sends: Ints
    receives: Ints
    reads: Ints


@dataclass(frozen=True)
class ProgramIndex:
    """Programs and what they should carry out: the placement of stages, links, microbatches and limits.

    The stages in ``recompute`` replay their forward, and those in ``offload`` may let what it saved wait in
    host memory. ``limits[rank]`` bounds what is in flight. ``sync_spec`` is what the programs do after their
    microbatches. ``segments`` are the phases that consist of several functions, and ``model_collectives`` the
    collectives between these.
    """

    programs: Sequence[Program]
    placement: Placement
    links: tuple[Link, ...]
    num_microbatches: int
    recompute: frozenset[int]
    limits: Sequence[int] | None
    sync_spec: SyncSpec
    segments: SegmentCounts
    model_collectives: ModelCollectives
    offload: frozenset[int] = frozenset()

    def num_segments(self, op: Op, stage: int) -> int:
        """How many functions a compute of a stage consists of."""
        return self.segments.get((stage, Phase(op)), 1)

    def show(self, site: InstructionSite) -> str:
        """An instruction on one line."""
        return " ".join(instruction_lines(self.programs[site[0]])[site[1]].split())

    @cached_property
    def link_set(self) -> frozenset[Link]:
        return frozenset(self.links)

    @cached_property
    def ranks(self) -> Ints:
        """At [stage, microbatch], the rank that should run it."""
        return ranks_by_microbatch(self.placement, self.num_microbatches)

    @cached_property
    def columns(self) -> Sequence[InstructionColumns]:
        """The instructions of each rank. Link numbers beyond ``links`` are of foreign links."""
        return [InstructionColumns.of(program.instructions, self.links) for program in self.programs]

    @cached_property
    def trains(self) -> bool:
        codes = [OP_CODE[op] for op in BACKWARDS]
        return any(bool(np.isin(each.ops, codes).any()) for each in self.columns)

    @cached_property
    def numbers(self) -> Ints:
        """At [op, stage, microbatch], the number of the last such compute or the first free, or -1."""
        return self._found(lambda each: _in_turn(each, each.is_compute))

    @cached_property
    def begins(self) -> Ints:
        """At [op, stage, microbatch], the number of the first such compute or free, or -1."""
        if self._are_unique:
            return self.numbers
        return self._found(lambda each: _in_turn(each, each.is_compute)[::-1])

    @cached_property
    def counts(self) -> Ints:
        """At [op, stage, microbatch], how many such computes (of segments: the first) or frees there are."""
        if self._are_unique:
            return (self.numbers >= 0).astype(np.int8)
        counts = np.zeros(self._shape, np.int32)
        for each in self.columns:
            own = _in_turn(each, each.is_compute & (each.segments <= 0))
            np.add.at(counts, (each.ops[own], each.stages[own], each.microbatches[own]), 1)
        return counts

    @cached_property
    def _are_unique(self) -> bool:
        """Whether no compute or free stands twice or in segments, so that ``numbers`` has all of them."""
        own = sum(_in_turn(each, each.is_compute).size for each in self.columns)
        return own == np.count_nonzero(self.numbers >= 0)

    @property
    def _shape(self) -> tuple[int, int, int]:
        return _NUM_MICROBATCH_OPS, len(self.placement), self.num_microbatches

    def _found(self, own_of: Callable[[InstructionColumns], Ints]) -> Ints:
        """The numbers of the instructions that ``own_of`` lists of each rank; of several alike, the last."""
        numbers = np.full(self._shape, -1, np.int32)
        for each in self.columns:
            own = own_of(each)
            numbers[each.ops[own], each.stages[own], each.microbatches[own]] = own
        return numbers

    @cached_property
    def transfers(self) -> Mapping[tuple[Op, int, int, int], tuple[Ints, Ints]]:
        """The microbatches and instruction numbers of each kind of transfer.

        Keys are the op, the number of the link, the sending rank and the receiving rank.
        """
        found = {}
        for rank, each in enumerate(self.columns):
            for op in (Op.SEND, Op.RECV, Op.MOVE):
                own = np.flatnonzero(each.ops == OP_CODE[op])
                links, peers = each.link_numbers[own], each.peers[own]
                for group in _groups(links * (len(self.programs) + 1) + peers):
                    link, peer = int(links[group[0]]), int(peers[group[0]])
                    ends = {Op.SEND: (rank, peer), Op.RECV: (peer, rank), Op.MOVE: (rank, rank)}[op]
                    found[op, link, *ends] = (each.microbatches[own[group]], own[group].astype(np.int32))
        return found

    def microbatches(self, link: Link) -> Sequence[int]:
        return range(self.num_microbatches) if link.payload.per_microbatch else (-1,)

    @cached_property
    def routes(self) -> Sequence[Route]:
        return list(routes(self.links, self.placement, self.num_microbatches))

    @cached_property
    def cells(self) -> ProgramComputes | None:
        """The computes as cells that run, once deliveries are known; None if they wait for each other."""
        return ProgramComputes.of(self)

    @cached_property
    def deliveries(self) -> Sequence[DeliveredMessages]:
        """How every message travels, once it is known that each is delivered exactly once."""
        return [self._deliveries(route) for route in self.routes]

    def _deliveries(self, route: Route) -> DeliveredMessages:
        link, found = route.link, []
        for op in transfer_ops(route):
            carried, at = self.transfers[op, route.number, route.source, route.target]
            found.append(at[np.argsort(carried)])
        made = _of(self.numbers, link.payload.producers, link.source).max(axis=0, initial=-1)
        unread = np.iinfo(np.int32).max
        reads = _of(self.begins, link.payload.readers, link.target)
        reads = np.where(reads < 0, unread, reads).min(axis=0, initial=unread)
        if link.payload.per_microbatch:
            made, reads = made[route.microbatches], reads[route.microbatches]
        else:
            made = made[self.ranks[link.source] == route.source].max(keepdims=True, initial=-1)
            reads = reads[self.ranks[link.target] == route.target].min(keepdims=True, initial=unread)
        return DeliveredMessages(route, made, found[0], found[-1], np.where(reads == unread, -1, reads))

    def probable_site(
        self, found: Sequence[int], rank: int, stage: int, microbatch: int
    ) -> InstructionSite | None:
        """Where to look on ``rank`` when something was ``found`` too often or not at all.

        It is the last instruction that was found, else the last compute of the stage and microbatch, else the
        last instruction of the rank.
        """
        codes = [OP_CODE[op] for op in COMPUTES]
        computed = int(self.numbers[codes, stage, microbatch].max()) if min(stage, microbatch) >= 0 else -1
        last = computed if computed >= 0 else len(self.programs[rank].instructions) - 1
        number = max(found, default=last)
        return (rank, number) if number >= 0 else None


def _in_turn(columns: InstructionColumns, computes: NDArray[np.bool_]) -> Ints:
    """These computes of a rank from first to last, and its frees from last to first."""
    frees = np.flatnonzero(columns.ops == OP_CODE[Op.FREE])[::-1]
    return np.concatenate([np.flatnonzero(computes), frees])


def _of(numbers: Ints, phases: Sequence[Phase], stage: int) -> Ints:
    """The lines of such a table that belong to some phases of a stage."""
    return numbers[[OP_CODE[Op(phase)] for phase in phases], stage]


def transfer_ops(route: Route) -> tuple[Op, ...]:
    """What brings a message along a route: a send and a receive, or a move within one rank."""
    return (Op.SEND, Op.RECV) if route.crosses_ranks else (Op.MOVE,)


def _groups(keys: Ints) -> list[Ints]:
    """The places of each different key, ascending."""
    order = np.argsort(keys, kind="stable")
    bounds = np.flatnonzero(np.diff(keys[order])) + 1
    return np.split(order, bounds) if order.size else []
