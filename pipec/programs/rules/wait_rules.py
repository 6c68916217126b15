"""The rules for waits and gradients: what was started is awaited once, what was made accumulated once."""

from collections.abc import Iterator

import numpy as np

from pipec.ir import WAIT_OF, Instruction, Op
from pipec.ir.columns import OPS, InstructionColumns, Ints, one_of, taken
from pipec.programs.awaited_starts import IS_WAIT, STARTED_OP, starts_and_waits
from pipec.programs.program_index import BACKWARDS, ProgramIndex, Violation

_MAKES_GRADIENTS = one_of(*BACKWARDS)
_READ_SUMS = (Op.REDUCE_GRAD, Op.GRAD_NORM, Op.UPDATE)


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
    for place in np.flatnonzero((is_wait == after_wait) | (is_last & ~is_wait)).tolist():
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
        made, added = columns.numbers_of(*BACKWARDS), columns.numbers_of(Op.ACCUMULATE)
        added = added[taken(columns.link_numbers, added) < 0]
        sums_read = columns.numbers_of(*_READ_SUMS), step.tied_transfers(rank)
        readers = np.sort(np.concatenate([columns.compute_numbers, *sums_read]), kind="stable")
        place = np.searchsorted(readers, added) - 1
        before = np.where(place >= 0, np.append(readers, -1)[place], -1)
        right = (before >= 0) & _MAKES_GRADIENTS[taken(columns.ops, before)]
        for column in (columns.stages, columns.microbatches, columns.segments):
            right &= taken(column, before) == taken(column, added)
        right &= np.append(True, before[1:] != before[:-1])[: added.size]
        for number in added[~right].tolist():
            message = "accumulates what the compute before it did not make, or what is accumulated already"
            yield Violation((rank, number), message)
        if added.size < made.size:
            number = int(np.setdiff1d(made, before)[0])
            where = f"stage {columns.stages[number]}, microbatch {columns.microbatches[number]}"
            message = f"the gradients of {where} are not accumulated before the rank goes on"
            yield Violation((rank, number), message)
        yield from _tied_not_accumulated(step, rank, columns)


def _tied_not_accumulated(step: ProgramIndex, rank: int, columns: InstructionColumns) -> Iterator[Violation]:
    """Gradients of tied weights that are not accumulated once, after they have arrived."""
    waits = step.tied_transfers(rank, Op.WAIT_RECV)
    added = columns.numbers_of(Op.ACCUMULATE)
    added = added[taken(columns.link_numbers, added) >= 0]
    arrived = {(columns.link_numbers[k], columns.peers[k]): k for k in waits.tolist()}
    for number in added.tolist():
        before = arrived.pop((columns.link_numbers[number], columns.peers[number]), len(columns))
        if number < before:
            yield Violation((rank, number), "accumulates gradients that are not awaited before")
    for number in arrived.values():
        yield Violation((rank, number), "the gradients that came here are never accumulated")
