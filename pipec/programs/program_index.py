"""The programs of one step, indexed for verification: where each value is computed, moved and read.

Rules read a ``ProgramIndex`` and yield a ``Violation`` for each fault.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipec.ir import Link, ModelCollectives, Op, Payload, Phase, Plan, Program, SegmentCounts
from pipec.ir.columns import (
    OP_CODE,
    InstructionColumns,
    Ints,
    equal_groups,
    ranks_by_microbatch,
    set_entries,
    taken,
)
from pipec.ir.text_format import instruction_lines
from pipec.programs.deadlock import InstructionSite
from pipec.programs.program_computes import ProgramComputes
from pipec.programs.routes import DeliveredMessages, Route, routes

BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
COMPUTES = (Op.FORWARD, Op.RECOMPUTE, *BACKWARDS)
"""In the order in which a microbatch runs them."""

TRANSFERS = (Op.SEND, Op.RECV, Op.WAIT_RECV, Op.MOVE)

_NUM_MICROBATCH_OPS = 1 + max(OP_CODE[op] for op in (*COMPUTES, Op.FREE))


@dataclass(frozen=True, slots=True)
class Violation:
    """What a rule finds: a message, and the faulty instruction; None if the programs are wrong as a whole.

    ``others`` are instructions of other ranks that are part of the fault.
    """

    site: InstructionSite | None
    message: str
    others: tuple[InstructionSite, ...] = ()


@dataclass(frozen=True)
class ProgramIndex:
    """The programs of a plan."""

    plan: Plan
    programs: Sequence[Program]

    @cached_property
    def recompute(self) -> frozenset[int]:
        """The stages that replay their forward."""
        return self.plan.recomputing_stages

    @cached_property
    def offload(self) -> frozenset[int]:
        """The stages that may keep saved values in host memory."""
        return self.plan.offloading_stages

    @cached_property
    def segments(self) -> SegmentCounts:
        """The number of functions of each phase that consists of several."""
        return self.plan.segments

    @cached_property
    def model_collectives(self) -> ModelCollectives:
        """The collectives that run between these functions."""
        return self.plan.model_collectives

    def num_segments(self, op: Op, stage: int) -> int:
        """How many functions a compute of a stage consists of."""
        return self.segments.get((stage, Phase(op)), 1)

    def show(self, site: InstructionSite) -> str:
        """An instruction on one line."""
        return " ".join(instruction_lines(self.programs[site[0]])[site[1]].split())

    @cached_property
    def link_set(self) -> frozenset[Link]:
        return frozenset(self.plan.links)

    def tied_transfers(self, rank: int, *ops: Op) -> Ints:
        """The instructions of a rank that carry gradients of tied weights: of these ops, or of any."""
        columns, brings = self.columns[rank], self._brings_gradients
        numbers = columns.numbers_of(*(ops or TRANSFERS)) if brings.any() else np.empty(0, np.int32)
        return numbers[brings[columns.link_numbers[numbers]]]

    @cached_property
    def _brings_gradients(self) -> NDArray[np.bool_]:
        """For each link, whether it brings gradients of tied weights."""
        return np.array([link.payload is Payload.WEIGHT_GRADIENT for link in self.plan.links], bool)

    @cached_property
    def ranks(self) -> Ints:
        """At [stage, microbatch], the rank that should run them."""
        return ranks_by_microbatch(self.plan.placement, self.plan.num_microbatches)

    @cached_property
    def columns(self) -> Sequence[InstructionColumns]:
        """The instructions of each rank. Link numbers beyond ``links`` are of foreign links."""
        return [InstructionColumns.of(program.instructions, self.plan.links) for program in self.programs]

    @cached_property
    def trains(self) -> bool:
        return any(each.numbers_of(*BACKWARDS).size > 0 for each in self.columns)

    @cached_property
    def numbers(self) -> Ints:
        """At [op, stage, microbatch], the number of the last compute, or of the first free, or -1."""
        return self._table(last=True)

    @cached_property
    def begins(self) -> Ints:
        """At [op, stage, microbatch], the number of the first compute or free, or -1."""
        return self.numbers if self._are_unique else self._table(last=False)

    @cached_property
    def counts(self) -> Ints:
        """At [op, stage, microbatch], the number of computes (of first segments, if split) or frees."""
        if self._are_unique:
            return (self.numbers >= 0).astype(np.int8)
        counts = np.zeros(self._shape, np.int32)
        for each in self.columns:
            own = each.numbers_of(*COMPUTES, Op.FREE)
            own = own[each.segments[own] <= 0]
            np.add.at(counts, (each.ops[own], each.stages[own], each.microbatches[own]), 1)
        return counts

    @cached_property
    def _are_unique(self) -> bool:
        """Whether no compute or free is repeated or in segments, so that ``numbers`` has all of them."""
        own = sum(each.numbers_of(op).size for each in self.columns for op in (*COMPUTES, Op.FREE))
        return own == np.count_nonzero(self.numbers >= 0)

    @property
    def _shape(self) -> tuple[int, int, int]:
        return _NUM_MICROBATCH_OPS, len(self.plan.placement), self.plan.num_microbatches

    def _table(self, *, last: bool) -> Ints:
        """Of equal computes the last or the first; of equal frees the other one."""
        numbers = np.full(self._shape, -1, np.int32)
        for each in self.columns:
            for op in (*COMPUTES, Op.FREE):
                own = each.numbers_of(op)[:: 1 if last == (op is not Op.FREE) else -1]
                at = taken(each.stages, own), taken(each.microbatches, own)
                set_entries(numbers[OP_CODE[op]], *at, own)
        return numbers

    @cached_property
    def groups(self) -> Sequence[Sequence[tuple[Op, Ints]]]:
        """The instructions of each rank: the numbers of those with the same op, link and peer together."""
        return [
            [(op, own) for op, numbers in columns.numbers_by_op.items() for own in _by_peer(columns, numbers)]
            for columns in self.columns
        ]

    @cached_property
    def transfers(self) -> Mapping[tuple[Op, int, int, int], tuple[Ints, Ints]]:
        """The microbatches and instruction numbers of each kind of transfer.

        Keys are the op, the number of the link, the sending rank and the receiving rank.
        """
        found = {}
        for rank, (columns, groups) in enumerate(zip(self.columns, self.groups, strict=True)):
            for op, numbers in groups:
                if op in TRANSFERS:
                    link, peer = int(columns.link_numbers[numbers[0]]), int(columns.peers[numbers[0]])
                    ends = {Op.SEND: (rank, peer), Op.MOVE: (rank, rank)}.get(op, (peer, rank))
                    found[op, link, *ends] = taken(columns.microbatches, numbers), numbers
        return found

    def microbatches(self, link: Link) -> Sequence[int]:
        return range(self.plan.num_microbatches) if link.payload.per_microbatch else (-1,)

    @cached_property
    def routes(self) -> Sequence[Route]:
        return list(routes(self.plan.links, self.plan.placement, self.plan.num_microbatches))

    @cached_property
    def computes(self) -> ProgramComputes | None:
        """The computes as tasks, once deliveries are known; None if they wait for each other."""
        return ProgramComputes.of(self.columns, self.deliveries)

    @cached_property
    def deliveries(self) -> Sequence[DeliveredMessages]:
        """The deliveries of all routes. Valid only if each message is delivered exactly once."""
        return [self._deliveries(route) for route in self.routes]

    @cached_property
    def deliveries_between_ranks(self) -> Sequence[DeliveredMessages]:
        return [each for each in self.deliveries if each.route.crosses_ranks]

    def _deliveries(self, route: Route) -> DeliveredMessages:
        link, found = route.link, []
        for op in transfer_ops(route):
            carried, at = self.transfers[op, route.number, route.source, route.target]
            found.append(at.take(np.argsort(carried, kind="stable")))
        made = _of(self.numbers, link.payload.producers, link.source).max(axis=0, initial=-1)
        unread = np.iinfo(np.int32).max
        reads = _of(self.begins, link.payload.readers, link.target)
        reads = np.where(reads < 0, unread, reads).min(axis=0, initial=unread)
        if link.payload.per_microbatch:
            made, reads = made[route.microbatches], reads[route.microbatches]
        else:
            made = made[self.ranks[link.source] == route.source].max(keepdims=True, initial=-1)
            made = np.maximum(made, self._tail_that_makes(link, route.source))
            reads = reads[self.ranks[link.target] == route.target].min(keepdims=True, initial=unread)
        reads = np.where(reads == unread, -1, reads)
        return DeliveredMessages(route, made, found[0], found[:2][-1], found[-1], reads)

    def _tail_that_makes(self, link: Link, rank: int) -> int:
        """The last tail of a rank whose results the link carries, or -1."""
        tail = self.plan.stages[link.source].tail
        if tail is None or not {value.name for value in link.values}.intersection(tail.results):
            return -1
        columns = self.columns[rank]
        numbers = columns.numbers_of(Op.TAIL)
        return int(numbers[columns.stages[numbers] == link.source].max(initial=-1))

    def probable_site(
        self, found: Sequence[int], rank: int, stage: int = -1, microbatch: int = -1
    ) -> InstructionSite | None:
        """The site to show for an instruction of ``rank`` that is repeated or missing.

        It is the last of the instructions ``found``, else the last compute of the stage and microbatch if
        both are given, else the last instruction of the rank.
        """
        codes = [OP_CODE[op] for op in COMPUTES]
        computed = int(self.numbers[codes, stage, microbatch].max()) if min(stage, microbatch) >= 0 else -1
        last = computed if computed >= 0 else len(self.programs[rank].instructions) - 1
        number = max(found, default=last)
        return (rank, number) if number >= 0 else None


def _of(numbers: Ints, phases: Sequence[Phase], stage: int) -> Ints:
    """The rows of a table at [op, stage, microbatch] for some phases of a stage."""
    return numbers[[OP_CODE[Op(phase)] for phase in phases], stage]


def transfer_ops(route: Route) -> tuple[Op, ...]:
    """The ops that deliver a message along a route: send, receive and wait, or a move within one rank."""
    return (Op.SEND, Op.RECV, Op.WAIT_RECV) if route.crosses_ranks else (Op.MOVE,)


def _by_peer(columns: InstructionColumns, numbers: Ints) -> Sequence[Ints]:
    """These instructions, with a group for each link and peer."""
    links, peers = taken(columns.link_numbers, numbers), taken(columns.peers, numbers)
    if links.min() == links.max() and peers.min() == peers.max():
        return [numbers]
    return [numbers.take(rows) for rows in equal_groups(links, peers)]
