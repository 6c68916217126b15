"""The rules for model collectives within a phase: once for each microbatch, between the right segments."""

from collections.abc import Iterator

import numpy as np

from pipec.ir import WAIT_OF, Instruction, ModelCollective, Op, rank_of
from pipec.ir.columns import OP_CODE, Ints
from pipec.programs.program_index import ProgramIndex, Violation


def violations(step: ProgramIndex, instruction: Instruction) -> Iterator[str]:
    """Faults in the fields of a model collective, except its stage and its microbatch."""
    stage, number = instruction.stage, instruction.model_collective
    op = instruction.op.traits.awaits or instruction.op
    model_collectives = step.model_collectives.get(stage, ())
    if not 0 <= number < len(model_collectives) or model_collectives[number].op is not op:
        some = ", ".join(f"{each.op}, model_collective {k}" for k, each in enumerate(model_collectives))
        expected = some or "none"
        yield f"{op}, model collective {number} is not in the plan for stage {stage}; expected {expected}"
    if instruction.segment != -1:
        yield f"{op} names segment {instruction.segment}; expected none"


def model_collectives_in_order(step: ProgramIndex) -> Iterator[Violation]:
    """Each runs once per microbatch, between the segments that make its value and read its result. Refused::

    forward mb 0 segment 0, all_reduce mb 0 model collective 0, forward mb 0 segment 1, wait_all_reduce mb 0
    """
    for stage, model_collectives in step.model_collectives.items():
        for number, model_collective in enumerate(model_collectives):
            if (step.counts[OP_CODE[Op(model_collective.phase)], stage] > 0).any():
                yield from _once_between(step, stage, number, model_collective)


def _once_between(
    step: ProgramIndex, stage: int, number: int, model_collective: ModelCollective
) -> Iterator[Violation]:
    phase, segment = model_collective.phase, model_collective.segment
    numbers, counts = _by_microbatch(step, stage, model_collective.op, "model_collectives", number)
    awaited, _ = _by_microbatch(step, stage, WAIT_OF[model_collective.op], "model_collectives", number)
    made, _ = _by_microbatch(step, stage, Op(phase), "segments", segment - 1)
    read, _ = _by_microbatch(step, stage, Op(phase), "segments", segment)
    what = f"{model_collective.op} of stage {stage}, model collective {number}"
    for microbatch in np.flatnonzero(counts != 1).tolist():
        rank = rank_of(step.plan.placement, stage, microbatch)
        found = [int(numbers[microbatch])] if counts[microbatch] else []
        message = f"{what}, microbatch {microbatch} is there {counts[microbatch]} times; expected once"
        yield Violation(step.probable_site(found, rank, stage, microbatch), message)
    for microbatch in np.flatnonzero((made < 0) | (read < 0)).tolist():
        rank = rank_of(step.plan.placement, stage, microbatch)
        message = f"{phase} of stage {stage}, microbatch {microbatch} is no instruction for each segment"
        expected = f"segments, with {what} before segment {segment}"
        site = step.probable_site([], rank, stage, microbatch)
        yield Violation(site, f"{message}; expected {expected}")
    for microbatch in np.flatnonzero((numbers < made) | (awaited > read)).tolist():
        site = rank_of(step.plan.placement, stage, microbatch), int(numbers[microbatch])
        between = f"segment {segment - 1} of the {phase} at {made[microbatch]} and the next at"
        message = f"{what}, microbatch {microbatch} does not run between {between} {read[microbatch]}"
        yield Violation(site, message)


def _by_microbatch(step: ProgramIndex, stage: int, op: Op, column: str, value: int) -> tuple[Ints, Ints]:
    """By microbatch, the number of the last instruction of a stage with this op and this ``value`` in a
    column, or -1, and how many there are.
    """
    numbers = np.full(step.plan.num_microbatches, -1, np.int32)
    counts = np.zeros(step.plan.num_microbatches, np.int32)
    for columns in step.columns:
        own = columns.numbers_of(op)
        own = own[(columns.stages[own] == stage) & (getattr(columns, column)[own] == value)]
        numbers[columns.microbatches[own]] = own
        np.add.at(counts, columns.microbatches[own], 1)
    return numbers, counts
