"""The programs of one step, indexed for verification: where each value is computed, moved and read.

Rules read a ``ProgramIndex`` and yield a ``Violation`` for each fault.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipec.ir import (
    Instruction,
    ModelCollective,
    Op,
    Phase,
    Plan,
    Program,
    SegmentCounts,
)
from pipec.ir.columns import (
    OP_CODE,
    InstructionColumns,
    Ints,
    ranks_by_microbatch,
    read_versions,
    set_entries,
    taken,
)
from pipec.ir.text_format import format_link, instruction_lines
from pipec.programs.messages import Delivered
from pipec.programs.program_computes import ProgramComputes
from pipec.programs.shared_receives import holding_stages

BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
COMPUTES = (Op.FORWARD, Op.RECOMPUTE, *BACKWARDS)
"""In the order in which a microbatch runs them."""

_NUM_MICROBATCH_OPS = 1 + max(OP_CODE[op] for op in (*COMPUTES, Op.FREE))


InstructionSite = tuple[int, int]
"""A rank and the number of an instruction in its program."""


@dataclass(frozen=True, slots=True)
class Violation:
    """What a rule finds: a message, and the faulty instruction; None if the programs are wrong as a whole.

    ``others`` are instructions of other ranks that are part of the fault.
    """

    site: InstructionSite | None
    message: str
    others: tuple[InstructionSite, ...] = ()


def describe(instruction: Instruction) -> str:
    """``reduce_grad of stage 0, bucket 1``"""
    numbers = {
        "stage": -1 if instruction.link else instruction.stage,
        "microbatch": instruction.microbatch,
        "segment": instruction.segment,
        "bucket": instruction.bucket,
        "model collective": instruction.model_collective,
    }
    named = [format_link(instruction.link)] if instruction.link else []
    named += [f"{word} {number}" for word, number in numbers.items() if number >= 0]
    return f"{instruction.op} of {', '.join(named)}" if named else str(instruction.op)


@dataclass(frozen=True)
class ProgramIndex:
    """The programs of a plan."""

    plan: Plan
    programs: Sequence[Program]

    @cached_property
    def segments(self) -> SegmentCounts:
        """The number of functions of each phase that consists of several."""
        return self.plan.segments

    def num_segments(self, op: Op, stage: int) -> int:
        """How many functions a compute of a stage consists of."""
        return self.segments.get((stage, Phase(op)), 1)

    def model_collectives(self, stage: int) -> Sequence[ModelCollective]:
        """The collectives that run between the functions of a stage."""
        return self.plan.stages[stage].model_collectives

    @cached_property
    def sources(self) -> Ints:
        """The source stage of each link; the last entry is for no link."""
        return np.array([*(link.source for link in self.plan.links), -1], np.int32)

    @cached_property
    def targets(self) -> Ints:
        """The target stage of each link; the last entry is for no link."""
        return np.array([*(link.target for link in self.plan.links), -1], np.int32)

    def links_at(self, stages: Sequence[int], *, results: bool = False) -> Sequence[int]:
        """The numbers of the links from and to stages, and on demand of those that go to every rank."""
        found = [self._links_at.get(stage, ()) for stage in (*stages, *[-1] * results)]
        return sorted({number for numbers in found for number in numbers})

    @cached_property
    def _links_at(self) -> Mapping[int, Sequence[int]]:
        found = defaultdict[int, list[int]](list)
        for number, link in enumerate(self.plan.links):
            for stage in {link.source, link.target}:
                found[stage].append(number)
        return found

    def links_with(self, kind: str) -> NDArray[np.bool_]:
        """For each link, whether its payload is one of a ``kind`` such as ``result/activation``.

        The last entry is for no link: whether the kind is ``none``.
        """
        if kind not in self._links_with:
            payloads = kind.split("/")
            chosen = [link.payload in payloads for link in self.plan.links]
            self._links_with[kind] = np.array([*chosen, kind == "none"], bool)
        return self._links_with[kind]

    @cached_property
    def _links_with(self) -> dict[str, NDArray[np.bool_]]:
        return {}

    @cached_property
    def holding_stages(self) -> Mapping[int, Sequence[int]]:
        """By the number of a link, the stages that keep its values, if its target moves them on."""
        return holding_stages(self.plan.links)

    def show(self, site: InstructionSite) -> str:
        """An instruction on one line."""
        return " ".join(instruction_lines(self.programs[site[0]])[site[1]].split())

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
        shape = _NUM_MICROBATCH_OPS, len(self.plan.placement), self.plan.num_microbatches
        numbers = np.full(shape, -1, np.int32)
        for each in self.columns:
            for op in (*COMPUTES, Op.FREE):
                own = each.numbers_of(op)[:: -1 if op is Op.FREE else 1]
                at = taken(each.stages, own), taken(each.microbatches, own)
                set_entries(numbers[OP_CODE[op]], *at, own)
        return numbers

    @cached_property
    def read_versions(self) -> Ints:
        """At [stage, microbatch], the version of the weights that the stream of the plan specifies."""
        plan = self.plan
        return read_versions(plan.sync_spec.stream, plan.placement, plan.num_microbatches)

    @cached_property
    def delivered(self) -> Delivered:
        """The messages between ranks. Valid only if each is sent, received and awaited once."""
        return Delivered.by(self.columns)

    @cached_property
    def computes(self) -> ProgramComputes | None:
        """The computes as tasks, once messages are known; None if they wait for each other."""
        return ProgramComputes.of(self.columns, self.delivered)

    def probable_site(self, rank: int, stage: int = -1, microbatch: int = -1) -> InstructionSite | None:
        """The site to show for an instruction of ``rank`` that is missing or repeated.

        It is the last compute of the stage and microbatch if both are given, else the last instruction of the
        rank.
        """
        codes = [OP_CODE[op] for op in COMPUTES]
        computed = int(self.numbers[codes, stage, microbatch].max()) if min(stage, microbatch) >= 0 else -1
        number = computed if computed >= 0 else len(self.programs[rank].instructions) - 1
        return (rank, number) if number >= 0 else None
