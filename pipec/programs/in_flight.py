"""What a rank holds while it runs its cells, and how many microbatches that are: counted here alone."""

from collections.abc import Sequence

import numpy as np

from pipec.ir import Compute, Op, Program, StageMemory
from pipec.ir.columns import OP_CODE, PHASES, Cells, Floats, aligned


def held(order: Sequence[Compute], memory: Sequence[StageMemory]) -> Floats:
    """What a rank holds while each cell of its order runs, without what its stages hold once.

    ``memory[stage]`` is what a stage holds. For one with ``saved=2, kept=1, transient=5``::

        cells                 F0  F1  B0  W0
        growth at the start   +7  +7  +5  +5
        growth at the end     -5  -5  -6  -6
        held                   7   9   9   8
    """
    cells = Cells.of(order)
    growth = np.array([[stage.growth(phase) for stage in memory] for phase in PHASES])
    starts, ends = growth[cells.phases, cells.stages].T
    return np.asarray(np.cumsum(starts + ends) - ends)


def most_in_flight(order: Sequence[Compute]) -> int:
    """The most microbatches a rank holds at once, from forward to whole backward or weight gradient."""
    cells = Cells.of(order)
    one_each = [StageMemory(saved=1, kept=1)] * (int(cells.stages.max(initial=-1)) + 1)
    return int(held(cells, one_each).max(initial=0)) if one_each else 0


def peak_in_flight(program: Program) -> int:
    """The most pairs of stage and microbatch that a rank holds at once, from forward to free."""
    (columns,) = aligned([program])
    starts, ends = columns.ops == OP_CODE[Op.FORWARD], columns.ops == OP_CODE[Op.FREE]
    return int(np.cumsum(starts.astype(int) - ends).max(initial=0))
