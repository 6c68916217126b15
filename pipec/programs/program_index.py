"""The programs of one step, indexed for verification: where each value is computed, moved and read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipec.ir import Link, ModelCollectives, Op, Payload, Phase, Plan, Program, SegmentCounts
from pipec.ir.columns import OP_CODE, InstructionColumns, Ints, one_of, ranks_by_microbatch
from pipec.ir.text_format import instruction_lines
from pipec.programs.deadlock import InstructionSite
from pipec.programs.program_computes import ProgramComputes
from pipec.programs.routes import DeliveredMessages, Route, routes

BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
COMPUTES = (Op.FORWARD, Op.RECOMPUTE, *BACKWARDS)
"""In the order in which a microbatch runs them."""

_NUM_MICROBATCH_OPS = 1 + max(OP_CODE[op] for op in (*COMPUTES, Op.FREE))


@dataclass(frozen=True)
class ProgramIndex:
    """The programs of a plan. ``limits[rank]`` bounds the microbatches in flight, if there is a limit."""

    plan: Plan
    programs: Sequence[Program]
    limits: Sequence[int] | None = None

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

    @cached_property
    def brings_gradients(self) -> NDArray[np.bool_]:
        """For each link, and for none, whether it brings gradients of tied weights."""
        return np.array([*(link.payload is Payload.WEIGHT_GRADIENT for link in self.plan.links), False])

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
        is_backward = one_of(*BACKWARDS)
        return any(bool(is_backward[each.ops].any()) for each in self.columns)

    @cached_property
    def numbers(self) -> Ints:
        """At [op, stage, microbatch], the number of the last compute, or of the first free, or -1."""
        return self._table(lambda each: _computes_and_frees(each, each.is_compute))

    @cached_property
    def begins(self) -> Ints:
        """At [op, stage, microbatch], the number of the first compute or free, or -1."""
        if self._are_unique:
            return self.numbers
        return self._table(lambda each: _computes_and_frees(each, each.is_compute)[::-1])

    @cached_property
    def counts(self) -> Ints:
        """At [op, stage, microbatch], the number of computes (of first segments, if split) or frees."""
        if self._are_unique:
            return (self.numbers >= 0).astype(np.int8)
        counts = np.zeros(self._shape, np.int32)
        for each in self.columns:
            own = _computes_and_frees(each, each.is_compute & (each.segments <= 0))
            np.add.at(counts, (each.ops[own], each.stages[own], each.microbatches[own]), 1)
        return counts

    @cached_property
    def _are_unique(self) -> bool:
        """Whether no compute or free is repeated or in segments, so that ``numbers`` has all of them."""
        own = sum(_computes_and_frees(each, each.is_compute).size for each in self.columns)
        return own == np.count_nonzero(self.numbers >= 0)

    @property
    def _shape(self) -> tuple[int, int, int]:
        return _NUM_MICROBATCH_OPS, len(self.plan.placement), self.plan.num_microbatches

    def _table(self, own_of: Callable[[InstructionColumns], Ints]) -> Ints:
        """The numbers of the instructions that ``own_of`` lists of each rank; of equal ones, the last."""
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
            for op in (Op.SEND, Op.RECV, Op.WAIT_RECV, Op.MOVE):
                own = np.flatnonzero(each.ops == OP_CODE[op])
                links, peers = each.link_numbers[own], each.peers[own]
                for group in _groups(links * (len(self.programs) + 1) + peers):
                    link, peer = int(links[group[0]]), int(peers[group[0]])
                    ends = {Op.SEND: (rank, peer), Op.MOVE: (rank, rank)}.get(op, (peer, rank))
                    found[op, link, *ends] = (each.microbatches[own[group]], own[group].astype(np.int32))
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
        reads = np.where(reads == unread, -1, reads)
        return DeliveredMessages(route, made, found[0], found[:2][-1], found[-1], reads)

    def probable_site(
        self, found: Sequence[int], rank: int, stage: int, microbatch: int
    ) -> InstructionSite | None:
        """The site to show for an instruction of ``rank`` that is repeated or missing.

        It is the last of the instructions ``found``, else the last compute of the stage and microbatch, else
        the last instruction of the rank.
        """
        codes = [OP_CODE[op] for op in COMPUTES]
        computed = int(self.numbers[codes, stage, microbatch].max()) if min(stage, microbatch) >= 0 else -1
        last = computed if computed >= 0 else len(self.programs[rank].instructions) - 1
        number = max(found, default=last)
        return (rank, number) if number >= 0 else None


def _computes_and_frees(columns: InstructionColumns, computes: NDArray[np.bool_]) -> Ints:
    """These computes of a rank from first to last, and its frees from last to first."""
    frees = np.flatnonzero(columns.ops == OP_CODE[Op.FREE])[::-1]
    return np.concatenate([np.flatnonzero(computes), frees])


def _of(numbers: Ints, phases: Sequence[Phase], stage: int) -> Ints:
    """The rows of a table at [op, stage, microbatch] for some phases of a stage."""
    return numbers[[OP_CODE[Op(phase)] for phase in phases], stage]


def transfer_ops(route: Route) -> tuple[Op, ...]:
    """The ops that deliver a message along a route: send, receive and wait, or a move within one rank."""
    return (Op.SEND, Op.RECV, Op.WAIT_RECV) if route.crosses_ranks else (Op.MOVE,)


def _groups(keys: Ints) -> list[Ints]:
    """The places of each distinct key, ascending."""
    order = np.argsort(keys, kind="stable")
    bounds = np.flatnonzero(np.diff(keys[order])) + 1
    return np.split(order, bounds) if order.size else []
