"""The rules for waits and gradients: what was started is awaited once, what was made accumulated once."""

from collections.abc import Iterator

import numpy as np

from pipec.ir import WAIT_OF, Instruction, Op
from pipec.ir.columns import OP_CODE, OPS, InstructionColumns, Ints, one_of
from pipec.programs.awaited_starts import IS_WAIT, STARTED_OP, starts_and_waits
from pipec.programs.program_index import BACKWARDS, ProgramIndex
from pipec.programs.violation import Violation

_MAKES_GRADIENTS = one_of(*BACKWARDS)
_READS_SUMS = one_of(Op.REDUCE_GRAD, Op.GRAD_NORM, Op.UPDATE)


def awaited_once(step: ProgramIndex) -> Iterator[Violation]:
    """Each collective and each copy is awaited once, before the next with the same fields starts. Refused::

    reduce_grad stage 0 bucket 0, update stage 0
    """
    for rank, columns in enumerate(step.columns):
        numbers, fields = starts_and_waits(columns)
        if numbers.size:
            yield from _not_in_turn(rank, columns, numbers, fields)


def _not_in_turn(rank: int, columns: InstructionColumns, numbers: Ints, fields: Ints) -> Iterator[Violation]:
    """Starts and waits with the same fields that do not take turns."""
    is_wait = IS_WAIT[columns.ops[numbers]]
    is_first = np.append(True, np.diff(fields, axis=1).any(axis=0))
    is_last = np.append(is_first[1:], True)
    after_wait = is_first | np.append(True, is_wait[:-1])
    for place in np.flatnonzero((is_wait == after_wait) | (is_last & ~is_wait)).tolist()[:1]:
        number = int(numbers[place])
        found, op = _fields(columns[number]), OPS[STARTED_OP[columns.ops[number]]]
        if is_wait[place]:
            message = f"{WAIT_OF[op]}{found} waits for nothing; expected {op} before it"
        elif after_wait[place]:
            message = f"{op}{found} is never awaited; expected {WAIT_OF[op]} behind it"
        else:
            message = f"{op}{found} starts again before it is awaited; expected {WAIT_OF[op]} between"
        yield Violation((rank, number), message)


def _fields(instruction: Instruction) -> str:
    named = (
        ("of stage", instruction.stage),
        ("microbatch", instruction.microbatch),
        ("bucket", instruction.bucket),
        ("model collective", instruction.model_collective),
    )
    return "".join(f" {word} {number}" for word, number in named if number >= 0)


def accumulated_once(step: ProgramIndex) -> Iterator[Violation]:
    """Gradients are accumulated once, before their rank computes again or reads the sums. Refused::

    backward stage 0 mb 0, forward stage 0 mb 1, accumulate stage 0 mb 0
    """
    for rank, columns in enumerate(step.columns):
        is_accumulate = columns.ops == OP_CODE[Op.ACCUMULATE]
        reads_sums = _READS_SUMS[columns.ops]
        reads_sums |= step.brings_gradients[columns.link_numbers] & ~is_accumulate
        readers = np.flatnonzero(columns.is_compute | reads_sums)
        made = np.flatnonzero(_MAKES_GRADIENTS[columns.ops])
        added = np.flatnonzero(is_accumulate & (columns.link_numbers < 0))
        place = np.searchsorted(readers, added) - 1
        before = np.where(place >= 0, np.append(readers, -1)[place], -1)
        right = (before >= 0) & _MAKES_GRADIENTS[columns.ops[before]]
        for column in (columns.stages, columns.microbatches, columns.segments):
            right &= column[before] == column[added]
        right &= np.append(True, before[1:] != before[:-1])[: added.size]
        for number in added[~right].tolist()[:1]:
            message = "accumulates what the compute before it did not make, or what is accumulated already"
            yield Violation((rank, number), message)
        if added.size < made.size:
            number = int(np.setdiff1d(made, before)[0])
            where = f"stage {columns.stages[number]}, microbatch {columns.microbatches[number]}"
            message = f"the gradients of {where} are not accumulated before the rank goes on"
            yield Violation((rank, number), message)
        yield from _tied_not_accumulated(step, rank, columns)


def _tied_not_accumulated(step: ProgramIndex, rank: int, columns: InstructionColumns) -> Iterator[Violation]:
    """Gradients of tied weights that are not accumulated once, after they have come."""
    waits = np.flatnonzero(
        (columns.ops == OP_CODE[Op.WAIT_RECV]) & step.brings_gradients[columns.link_numbers]
    )
    added = np.flatnonzero((columns.ops == OP_CODE[Op.ACCUMULATE]) & (columns.link_numbers >= 0))
    came = {(columns.link_numbers[k], columns.peers[k]): k for k in waits.tolist()}
    for number in added.tolist():
        before = came.pop((columns.link_numbers[number], columns.peers[number]), len(columns))
        if number < before:
            yield Violation((rank, number), "accumulates gradients that are not awaited before")
    for number in came.values():
        yield Violation((rank, number), "the gradients that came here are never accumulated")
