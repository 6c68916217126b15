"""Periodic programs: a period of instructions that is executed again and again.

Period k of a program with period P executes each instruction for the microbatch it names plus k P, with its
version increased accordingly. Instructions of microbatches that do not exist are left out: before the first
one, while the pipeline fills, and after the last one, while it drains. So warmup, steady state and cooldown
are the same instructions, for any number of microbatches. For example, F2 B0 U0 with period 1 and three
microbatches is::

    period  -2   -1   0          1      2
            F0   F1   F2 B0 U0   B1 U1  B2 U2
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from pipec.ir.columns import InstructionColumns, Ints
from pipec.ir.program import Instruction, Op, Program
from pipec.ir.values import Link, Payload


def updates_per_period(program: Program) -> Counter[int]:
    """How many updates of each stage a period makes."""
    return Counter(each.stage for each in program.instructions if each.op is Op.UPDATE)


def unroll(program: Program, num_microbatches: int, links: Sequence[Link] = ()) -> Program:
    """The program for this number of microbatches, without a period, as columns with these ``links``."""
    return Program(program.rank, _unrolled(program, num_microbatches, links)[0])


def unrolled_instructions(program: Program, num_microbatches: int) -> Iterator[tuple[int, int, Instruction]]:
    """The instructions executed for these microbatches: each with its period and its number in the period."""
    columns, periods, places = _unrolled(program, num_microbatches, ())
    return zip(periods.tolist(), places.tolist(), columns, strict=True)


def _unrolled(
    program: Program, num_microbatches: int, links: Sequence[Link]
) -> tuple[InstructionColumns, Ints, Ints]:
    columns = InstructionColumns.of(program.instructions, links)
    named, last = int(columns.microbatches.max(initial=0)), (num_microbatches - 1) // program.period
    numbers = np.arange(-(named // program.period), last + 1, dtype=np.int32)
    periods, places = numbers.repeat(len(columns)), np.tile(np.arange(len(columns)), numbers.size)
    matrix = columns.matrix[:, places]
    matrix[2] += periods * program.period
    updates = np.zeros(int(columns.stages.max(initial=0)) + 2, np.int32)
    for stage, count in updates_per_period(program).items():
        updates[stage] = count
    made = np.maximum(matrix[9] + periods * updates[matrix[1]], 0)
    matrix[9] = np.where(matrix[9] >= 0, made, -1)
    matrix[5] = np.where(matrix[5] >= 0, matrix[2] % microbatch_window(program), -1)
    exists = (matrix[2] >= 0) & (matrix[2] < num_microbatches)
    return InstructionColumns(matrix[:, exists], columns.links), periods[exists], places[exists]


def microbatch_window(program: Program) -> int:
    """The smallest w such that a rank finishes each microbatch before it begins the one w later."""
    named = [each.microbatch for each in program.instructions]
    latest = [max(each, max(named) - program.period) for each in accumulate(named, max)]
    return max((begun - each + 1 for begun, each in zip(latest, named, strict=True)), default=1)


def yields_result(instruction: Instruction, links: Sequence[Link]) -> bool:
    """Whether an instruction makes or receives results of a microbatch."""
    if instruction.link:
        return instruction.op is Op.RECV and instruction.link.payload is Payload.MICROBATCH_RESULT
    makes = (link.source for link in links if link.payload is Payload.MICROBATCH_RESULT)
    return instruction.op is Op.FORWARD and instruction.stage in makes


def max_batches_ahead(program: Program, links: Sequence[Link], per_batch: int) -> int:
    """How many later mini-batches a rank may have begun before it finishes one.

    A rank that has requested results may have begun as many before it has those of the next mini-batch.
    """
    learning = [yields_result(each, links) for each in program.instructions]
    most = latest = 0
    for _, place, each in unrolled_instructions(program, 4 * (microbatch_window(program) + program.period)):
        behind = latest // per_batch - each.microbatch // per_batch
        if learning[place] or each.op is Op.FREE:
            most = max(most, behind + learning[place])
        latest = max(latest, each.microbatch)
    return most


def num_frames(program: Program, num_microbatches: int) -> int:
    """The frames of a step of so many microbatches, or those that the microbatches of a stream take in turn.

    After that many, a period names the first again. The results of two mini-batches may be in transit.
    """
    if not program.period:
        return num_microbatches
    most = max(microbatch_window(program), 2 * num_microbatches)
    return -(-most // program.period) * program.period


def num_versions_behind(program: Program, stage: int) -> int:
    """How many versions before the one that an update makes may still be read after it."""
    count = 4 * (microbatch_window(program) + program.period)
    written = [each for _, _, each in unrolled_instructions(program, count)]
    read = [each.version if each.op.phase and each.stage == stage else math.inf for each in written]
    behind, oldest = 0.0, math.inf
    for each, version in zip(reversed(written), reversed(read), strict=True):
        oldest = min(oldest, version)
        if each.op is Op.UPDATE and each.stage == stage:
            behind = max(behind, each.version - oldest)
    return int(behind)


def version_read(program: Program, stage: int, microbatch: int) -> int:
    """The version of the weights that a stage reads for a microbatch."""
    forward = next(
        each
        for each in program.instructions
        if each.op is Op.FORWARD
        and each.stage == stage
        and (microbatch - each.microbatch) % program.period == 0
    )
    number = (microbatch - forward.microbatch) // program.period
    return max(forward.version + number * updates_per_period(program)[stage], 0)
