"""Pairs each wait of a program with the instruction that started the collective or the copy it is for."""

import numpy as np

from pipec.ir import WAIT_OF, Op
from pipec.ir.columns import OP_CODE, OPS, InstructionColumns, Ints

STARTED_BY_WAIT = np.array([OP_CODE[op.traits.awaits] if op.traits.awaits else -1 for op in OPS], np.int32)
"""For the code of each wait, the code of the op that it waits for; -1 for other ops."""

_STARTS = np.array([op in WAIT_OF and op is not Op.RECV for op in OPS])
_WAITS = np.array([op.traits.awaits not in (None, Op.RECV) for op in OPS])
SAME_FIELDS = [1, 2, 6, 8]
"""The columns that a wait shares with its start: stage, microbatch, bucket and model collective."""


def awaited_starts(columns: InstructionColumns) -> tuple[Ints, Ints]:
    """The numbers of the waits for collectives and copies, and of the instruction that started each.

    A wait is for the last start with the same fields before it.
    """
    involved = np.flatnonzero(_STARTS[columns.ops] | _WAITS[columns.ops])
    if not involved.size:
        return involved, involved
    ops = columns.ops[involved]
    started = np.where(_WAITS[ops], STARTED_BY_WAIT[ops], ops)
    order = np.lexsort([involved, started, *columns.matrix[SAME_FIELDS][:, involved]])
    waits = np.flatnonzero(_WAITS[ops[order]])
    return involved[order[waits]], involved[order[waits - 1]]
