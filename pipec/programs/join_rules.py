"""The rules for what replicas join within a phase: once for each microbatch, between the right parts."""

from collections.abc import Iterator

import numpy as np

from pipec.ir import Instruction, Join, Op, Phase, rank_of
from pipec.ir.columns import OP_CODE, Ints
from pipec.programs.faults import Fault
from pipec.programs.step_index import StepIndex


def misfits(step: StepIndex, instruction: Instruction) -> Iterator[str]:
    """What is wrong with the fields of such an instruction, besides its stage and its microbatch."""
    op, stage, number = instruction.op, instruction.stage, instruction.join
    joins = step.joins.get(stage, ())
    if not 0 <= number < len(joins) or joins[number].op is not op:
        some = ", ".join(f"{join.op}, join {k}" for k, join in enumerate(joins)) or "none"
        yield f"{op}, join {number} is no part of the plan for stage {stage}; expected {some}"
    if instruction.part != -1:
        yield f"{op} names part {instruction.part}; expected none"


def join_once_in_order(step: StepIndex) -> Iterator[Fault]:
    """Every value is joined once for each microbatch, between the part before and the one that reads it."""
    for stage, joins in step.joins.items():
        for number, join in enumerate(joins):
            made, read = (_of_part(step, stage, join.phase, part) for part in (join.part - 1, join.part))
            if (step.counts[OP_CODE[Op(join.phase)], stage] > 0).any():
                yield from _once_between(step, stage, number, join, made, read)


def _once_between(
    step: StepIndex, stage: int, number: int, join: Join, made: Ints, read: Ints
) -> Iterator[Fault]:
    numbers, counts = _of_join(step, stage, number)
    what = f"{join.op} of stage {stage}, join {number}"
    for microbatch in np.flatnonzero(counts != 1).tolist()[:1]:
        rank = rank_of(step.placement, stage, microbatch)
        found = [int(numbers[microbatch])] if counts[microbatch] else []
        message = f"{what}, microbatch {microbatch} is there {counts[microbatch]} times; expected once"
        yield Fault(step.suspect(found, rank, stage, microbatch), message)
    for microbatch in np.flatnonzero((made < 0) | (read < 0)).tolist()[:1]:
        rank = rank_of(step.placement, stage, microbatch)
        message = f"{join.phase} of stage {stage}, microbatch {microbatch} is no instruction for each part"
        site = step.suspect([], rank, stage, microbatch)
        yield Fault(site, f"{message}; expected parts, with {what} before part {join.part}")
    for microbatch in np.flatnonzero((numbers < made) | (numbers > read)).tolist()[:1]:
        site = rank_of(step.placement, stage, microbatch), int(numbers[microbatch])
        between = f"part {join.part - 1} of the {join.phase} at {made[microbatch]} and the next at"
        message = f"{what}, microbatch {microbatch} is not between {between} {read[microbatch]}"
        yield Fault(site, message)


def _of_join(step: StepIndex, stage: int, number: int) -> tuple[Ints, Ints]:
    """By microbatch, the number of the last such instruction, or -1, and how many there are."""
    numbers = np.full(step.num_microbatches, -1, np.int32)
    counts = np.zeros(step.num_microbatches, np.int32)
    for columns in step.columns:
        own = np.flatnonzero((columns.joins == number) & (columns.stages == stage))
        numbers[columns.microbatches[own]] = own
        np.add.at(counts, columns.microbatches[own], 1)
    return numbers, counts


def _of_part(step: StepIndex, stage: int, phase: Phase, part: int) -> Ints:
    """By microbatch, the number of the instruction for a part of a phase, or -1."""
    numbers = np.full(step.num_microbatches, -1, np.int32)
    for columns in step.columns:
        of_phase = (columns.ops == OP_CODE[Op(phase)]) & (columns.stages == stage)
        own = np.flatnonzero(of_phase & (columns.parts == part))
        numbers[columns.microbatches[own]] = own
    return numbers
