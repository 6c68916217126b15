"""Pairs each wait of a program with the instruction that started the collective or the copy it is for."""

import numpy as np

from pipec.ir import WAIT_OF, Op
from pipec.ir.columns import OP_CODE, OPS, InstructionColumns, Ints, one_of, taken

STARTED_OP = np.array([OP_CODE[op.traits.awaits or op] for op in OPS], np.int32)
"""For the code of each wait, the code of the op that it waits for; for others, their own."""

_AWAITED = [op for op in WAIT_OF if op is not Op.RECV]
IS_WAIT = one_of(*(WAIT_OF[op] for op in _AWAITED))
"""For each code of an op, whether it waits for a collective or a copy."""

SAME_FIELDS = [1, 2, 6, 8]
"""The columns that a wait shares with its start: stage, microbatch, bucket and model collective."""


def awaited_starts(columns: InstructionColumns) -> tuple[Ints, Ints]:
    """The numbers of the waits for collectives and copies, and of the instruction that started each.

    A wait is for the last start with the same fields before it.
    """
    ordered, _ = starts_and_waits(columns)
    waits = np.flatnonzero(IS_WAIT[columns.ops[ordered]])
    return ordered[waits], ordered[waits - 1]


def starts_and_waits(columns: InstructionColumns) -> tuple[Ints, Ints]:
    """The numbers of starts and waits, those with the same fields together and in order, and their fields."""
    involved = columns.numbers_of(*_AWAITED, *(WAIT_OF[op] for op in _AWAITED))
    if not involved.size:
        return involved, np.empty((1 + len(SAME_FIELDS), 0), np.int32)
    named = [taken(columns.columns[k], involved) for k in SAME_FIELDS]
    fields = np.stack([STARTED_OP[columns.ops[involved]], *named])
    order = np.lexsort([involved, *fields])
    return involved[order], fields[:, order]
