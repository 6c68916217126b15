"""The rules for model collectives within a phase: once for each microbatch, between the right segments."""

from collections.abc import Iterator

import numpy as np

from pipec.ir import WAIT_OF, Instruction, ModelCollective, Op, Phase, rank_of
from pipec.ir.columns import OP_CODE, Ints
from pipec.programs.program_index import ProgramIndex
from pipec.programs.violation import Violation


def violations(step: ProgramIndex, instruction: Instruction) -> Iterator[str]:
    """Faults in the fields of a model collective, except its stage and its microbatch."""
    stage, number = instruction.stage, instruction.model_collective
    op = instruction.op.traits.awaits or instruction.op
    model_collectives = step.model_collectives.get(stage, ())
    if not 0 <= number < len(model_collectives) or model_collectives[number].op is not op:
        some = (
            ", ".join(
                f"{model_collective.op}, model_collective {k}"
                for k, model_collective in enumerate(model_collectives)
            )
            or "none"
        )
        yield f"{op}, model collective {number} is not in the plan for stage {stage}; expected {some}"
    if instruction.segment != -1:
        yield f"{op} names segment {instruction.segment}; expected none"


def model_collectives_in_order(step: ProgramIndex) -> Iterator[Violation]:
    """Each runs once per microbatch, between the segments that make its value and read its result. Refused::

    forward mb 0 segment 0, all_reduce mb 0 model collective 0, forward mb 0 segment 1, wait_all_reduce mb 0
    """
    for stage, model_collectives in step.model_collectives.items():
        for number, model_collective in enumerate(model_collectives):
            made, read = (
                _of_segment(step, stage, model_collective.phase, segment)
                for segment in (model_collective.segment - 1, model_collective.segment)
            )
            if (step.counts[OP_CODE[Op(model_collective.phase)], stage] > 0).any():
                yield from _once_between(step, stage, number, model_collective, made, read)


def _once_between(
    step: ProgramIndex, stage: int, number: int, model_collective: ModelCollective, made: Ints, read: Ints
) -> Iterator[Violation]:
    numbers, counts = _of_collective(step, stage, number, model_collective.op)
    awaited, _ = _of_collective(step, stage, number, WAIT_OF[model_collective.op])
    what = f"{model_collective.op} of stage {stage}, model collective {number}"
    for microbatch in np.flatnonzero(counts != 1).tolist()[:1]:
        rank = rank_of(step.plan.placement, stage, microbatch)
        found = [int(numbers[microbatch])] if counts[microbatch] else []
        message = f"{what}, microbatch {microbatch} is there {counts[microbatch]} times; expected once"
        yield Violation(step.probable_site(found, rank, stage, microbatch), message)
    for microbatch in np.flatnonzero((made < 0) | (read < 0)).tolist()[:1]:
        rank = rank_of(step.plan.placement, stage, microbatch)
        whole = f"{model_collective.phase} of stage {stage}, microbatch {microbatch}"
        message = f"{whole} is no instruction for each segment"
        site = step.probable_site([], rank, stage, microbatch)
        yield Violation(
            site, f"{message}; expected segments, with {what} before segment {model_collective.segment}"
        )
    for microbatch in np.flatnonzero((numbers < made) | (awaited > read)).tolist()[:1]:
        site = rank_of(step.plan.placement, stage, microbatch), int(numbers[microbatch])
        before = f"segment {model_collective.segment - 1} of the {model_collective.phase}"
        between = f"{before} at {made[microbatch]} and the next at"
        message = f"{what}, microbatch {microbatch} does not run between {between} {read[microbatch]}"
        yield Violation(site, message)


def _of_collective(step: ProgramIndex, stage: int, number: int, op: Op) -> tuple[Ints, Ints]:
    """By microbatch, the number of the last instruction of a model collective, or -1, and their count."""
    numbers = np.full(step.plan.num_microbatches, -1, np.int32)
    counts = np.zeros(step.plan.num_microbatches, np.int32)
    for columns in step.columns:
        own = columns.numbers_of(op)
        own = own[(columns.stages[own] == stage) & (columns.model_collectives[own] == number)]
        numbers[columns.microbatches[own]] = own
        np.add.at(counts, columns.microbatches[own], 1)
    return numbers, counts


def _of_segment(step: ProgramIndex, stage: int, phase: Phase, segment: int) -> Ints:
    """By microbatch, the number of the instruction for a segment of a phase, or -1."""
    numbers = np.full(step.plan.num_microbatches, -1, np.int32)
    for columns in step.columns:
        own = columns.numbers_of(Op(phase))
        own = own[(columns.stages[own] == stage) & (columns.segments[own] == segment)]
        numbers[columns.microbatches[own]] = own
    return numbers
