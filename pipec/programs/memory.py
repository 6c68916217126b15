"""What a rank holds while its computes run, and how much of it is in flight: counted here alone."""

from collections.abc import Sequence

import numpy as np

from pipec.ir import Compute, Op, Program, StageMemory
from pipec.ir.columns import OP_CODE, PHASES, Cells, Floats, Instructions, Ints, aligned


def held(order: Sequence[Compute], stages: Sequence[StageMemory]) -> Floats:
    """What the microbatches of one rank hold while each of its cells runs, in order.

    ``stages[stage]`` is what each stage holds; what it holds once is left out. For a stage that saves 3 and
    has 1 of transient memory::

        cell     F0  F1  B0  F2  B1  B2
        starts   +4  +4  +1  +4  +1  +1     by how much memory grows when the cell starts
        ends     -1  -1  -4  -1  -4  -4     by how much it grows when the cell ends
        held      4   7   7   7   7   4
    """
    cells = Cells.of(order)
    growth = np.array([[stage.growth(phase) for stage in stages] for phase in PHASES], np.float64)
    starts, ends = growth.reshape(len(PHASES), len(stages), 2)[cells.phases, cells.stages].T
    while_running: Floats = np.cumsum(starts + ends) - ends
    return while_running


def most_in_flight(order: Sequence[Compute]) -> int:
    """The most microbatches a rank holds at once, from forward to whole backward or weight gradient."""
    cells = Cells.of(order)
    one_each = [StageMemory(saved=1, kept=1)] * (int(cells.stages.max(initial=-1)) + 1)
    return int(held(cells, one_each).max(initial=0))


def in_flight(instructions: Instructions) -> Ints:
    """After each instruction of a rank, the pairs of stage and microbatch between forward and free."""
    begun, freed = (instructions.ops == OP_CODE[op] for op in (Op.FORWARD, Op.FREE))
    begun = begun & (instructions.parts <= 0)
    pairs: Ints = np.cumsum(begun.astype(np.int64) - freed)
    return pairs


def peak_in_flight(program: Program) -> int:
    """The most pairs of stage and microbatch that a rank holds at once, from forward to free."""
    (columns,) = aligned([program])
    return int(in_flight(columns).max(initial=0))
