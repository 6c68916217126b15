"""Periodic programs: a period of instructions that is executed again and again.

Round k of a program with period P executes each instruction for the microbatch that is k P further than the
one it names, with the version that is as many updates further. Instructions of microbatches that do not exist
are left out: of those before the first one, while the pipeline fills, and of those behind the last one, while
it drains. So prologue, body and epilogue are the same instructions, however many microbatches come. For
example, the round F2 B0 U0 with period 1 and three microbatches is::

    round   -2   -1   0          1      2
            F0   F1   F2 B0 U0   B1 U1  B2 U2
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipec.ir.program import Instruction, Op, Program
from pipec.ir.values import Link, Payload


def updates_per_period(program: Program) -> Counter[int]:
    """How many updates of each stage a round makes."""
    return Counter(each.stage for each in program.instructions if each.op is Op.UPDATE)


def unrolled_instructions(program: Program, num_microbatches: int) -> Iterator[tuple[int, int, Instruction]]:
    """What a program executes for so many microbatches: the round, the number in it, and the instruction."""
    updates, window = updates_per_period(program), microbatch_window(program)
    named = [each.microbatch for each in program.instructions]
    if not named:
        return
    for number in range(-(max(named) // program.period), (num_microbatches - 1) // program.period + 1):
        for place, each in enumerate(program.instructions):
            microbatch = each.microbatch + number * program.period
            if 0 <= microbatch < num_microbatches:
                version, slot = each.version, each.slot
                if version >= 0:
                    version = max(version + number * updates[each.stage], 0)
                if slot >= 0:
                    slot = microbatch % window
                yield number, place, replace(each, microbatch=microbatch, version=version, slot=slot)


def unroll(program: Program, num_microbatches: int) -> Program:
    """The program for so many microbatches, written out."""
    written = tuple(instruction for _, _, instruction in unrolled_instructions(program, num_microbatches))
    return Program(program.rank, written)


def microbatch_window(program: Program) -> int:
    """The least number such that a rank is through with a microbatch before one so far behind it begins."""
    period, most, latest = program.period, 1, 0
    last = max((each.microbatch for each in program.instructions), default=0)
    for number in range(last // period + 2):
        for each in program.instructions:
            microbatch = each.microbatch + number * period
            latest = max(latest, microbatch)
            most = max(most, latest - microbatch + 1)
    return most


def yields_result(instruction: Instruction, links: Sequence[Link]) -> bool:
    """Whether a rank learns results of a microbatch by an instruction: it makes or receives them."""
    if instruction.link:
        return instruction.op is Op.RECV and instruction.link.payload is Payload.MICROBATCH_RESULT
    makes = (link.source for link in links if link.payload is Payload.MICROBATCH_RESULT)
    return instruction.op is Op.FORWARD and instruction.stage in makes


def max_batches_ahead(program: Program, links: Sequence[Link], per_batch: int) -> int:
    """How many mini-batches behind one a rank may have begun before it is through with it.

    One that has asked for results may have begun as many before it learns those of the next mini-batch.
    """
    learning = [yields_result(each, links) for each in program.instructions]
    most = latest = 0
    for _, place, each in unrolled_instructions(program, 4 * (microbatch_window(program) + program.period)):
        behind = latest // per_batch - each.microbatch // per_batch
        if learning[place] or each.op is Op.FREE:
            most = max(most, behind + learning[place])
        latest = max(latest, each.microbatch)
    return most
