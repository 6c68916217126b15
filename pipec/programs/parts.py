"""Which cells are run part by part, those between whose parts something else stands, and in what parts."""

import numpy as np

from pipec.ir import GRADIENT_PHASES, Ending, Joins, Parts
from pipec.ir.columns import PART, PHASE_CODE, Cells, Instructions, Ints


def parts_run_apart(cells: Cells, ending: Ending, parts: Parts, joins: Joins) -> Ints:
    """For each cell of a rank, in how many parts it is run: 1 if it is run as a whole.

    Between the parts of a backward there are sums of gradients: of the last one of its stage, or of each one
    if gradients are summed after each round. Between the parts of any phase there is what replicas join.
    """
    counts = np.ones(len(cells), np.int32)
    for (stage, phase), number in parts.items():
        if any(join.phase is phase for join in joins.get(stage, ())):
            counts[(cells.phases == PHASE_CODE[phase]) & (cells.stages == stage)] = number
        early = [
            bucket
            for bucket in ending.buckets
            if bucket.stage == stage and bucket.part < number - 1 and not bucket.lent
        ]
        if phase in GRADIENT_PHASES and early:
            own = np.flatnonzero((cells.phases == PHASE_CODE[phase]) & (cells.stages == stage))
            counts[own if any(map(ending.reduces_each_round, early)) else own[-1:]] = number
    return counts


def part_by_part(columns: Instructions, parts: Parts) -> tuple[Instructions, Ints]:
    """The instructions with each phase in its parts, and of each the instruction that it belongs to::

    2  backward  stage 0  mb 0             2  backward  stage 0  mb 0  part 0
                                    ->     2  backward  stage 0  mb 0  part 1
    3  backward  stage 0  mb 1  part 0     3  backward  stage 0  mb 1  part 0
    """
    counts = np.ones(len(columns), np.int64)
    for (stage, phase), number in parts.items():
        of_phase = (columns.phases == PHASE_CODE[phase]) & (columns.stages == stage)
        counts[of_phase & (columns.parts < 0)] = number
    numbers = np.repeat(np.arange(len(columns)), counts)
    matrix = columns.matrix[:, numbers]
    firsts = np.cumsum(counts) - counts
    divided = counts[numbers] > 1
    matrix[PART, divided] = (np.arange(numbers.size) - firsts[numbers])[divided]
    return Instructions(matrix, columns.links), numbers
